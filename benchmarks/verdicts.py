"""How often `dcls-convert compare` claims what is not, and finds what is.

    python benchmarks/verdicts.py [--repetitions N] [--table]

Simulated comparisons, whose differences go through the package's own functions. A network
classifies an image right if a score is above 0 (a latent probit model). The score is a sum: how
easy the image is for all networks, how easy it is for this network, how well this network was
trained with this seed, and how that training took this image; all are normal. Each network has 80 %
of all images right, but for the power, where the first conversion has 82 %.

The former rule claims a difference for each conversion whose interval over seeds and that over
images both exclude 0. Results go to benchmarks/results/verdicts.json.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from measuring import RESULTS, markdown_table, script_parser, store, stored
from scipy import stats

from dcls_convert.compare.arm_results import (
    LEVEL,
    Correction,
    Difference,
    holm,
    measured_difference,
)

STORED = RESULTS / "verdicts.json"
SEEDS = (3, 5, 10, 20)
IMAGES = (100, 1000, 10000)
CONVERSIONS = (1, 3, 6)
LOOKS = {"3, 5, 10": (3, 5, 10), "3, 5, 10, 20": (3, 5, 10, 20), "3 to 20": tuple(range(3, 21))}
# Rules, by their names in the stored results, where two are called "new".
FORMER = "former"
HOLM = "new"  # of several conversions
LEVEL_OVER_LOOKS = "by looks"  # of several looks: the n-th has the level divided by n
LEVEL_OVER_SQUARE = "new"  # of several looks: as the package does
# Shares of the comparisons in which the gain of the first conversion is found.
FOUND_FORMERLY = "found formerly"
FOUND_ALONE = "found"
FOUND_AMONG_ALL = "found among 6"
ACCURACY = 0.8
GAIN = 0.02
# Standard deviations of the parts of a score.
IMAGE = 1.0
IMAGE_AND_NETWORK = 0.3
IMAGE_AND_TRAINING = 0.3
SCORE = math.hypot(IMAGE, IMAGE_AND_NETWORK, IMAGE_AND_TRAINING)
# Standard deviation of the accuracy over the seeds, percentage points; stored as "seed_points".
SEED_DEVIATIONS = (0.5, 1.5)


def conversions_key(rule: str, conversions: int) -> str:
    """Of the share of comparisons of so many conversions with a false claim."""
    return f"{rule} {conversions}"


def looks_key(rule: str, looks: str) -> str:
    """Of the share of comparisons with a false claim at any of the looks."""
    return f"{rule}, {looks}"


def simulated(draw: np.random.Generator, seed_deviation: float, gain: float) -> Any:
    """Whether networks classify images right: (networks, seeds, images), 0 or 1.

    Network 0 is the original; `gain` is that of the first conversion.
    """
    networks = 1 + max(CONVERSIONS)
    seeds = max(SEEDS)
    images = max(IMAGES)

    def normal(deviation: float, *shape: int) -> Any:
        return deviation * draw.standard_normal(shape, dtype=np.float32)

    slope = 100 * stats.norm.pdf(stats.norm.ppf(ACCURACY)) / SCORE  # points by score
    score = normal(IMAGE, 1, 1, images) + normal(IMAGE_AND_NETWORK, networks, 1, images)
    score = score + normal(seed_deviation / slope, networks, seeds, 1)
    score += normal(IMAGE_AND_TRAINING, networks, seeds, images)
    score += np.float32(SCORE * stats.norm.ppf(ACCURACY))
    score[1] += np.float32(SCORE * (stats.norm.ppf(ACCURACY + gain) - stats.norm.ppf(ACCURACY)))
    return (score > 0).astype(np.float32)


def claimed_formerly(difference: Difference) -> bool:
    """Whether both intervals exclude 0."""
    widest = max(difference.half_width_over_seeds(LEVEL), difference.half_width_over_images(LEVEL))
    return abs(difference.mean) > widest


def differences(right: Any, seeds: int, images: int) -> list[Difference]:
    """Those of each conversion, from the first seeds and images."""
    part = right[:, :seeds, :images]
    found = []
    for conversion in range(1, len(part)):
        found.append(measured_difference(part[conversion] - part[0]))
    return found


def by_number(found: Sequence[Difference]) -> dict[str, float]:
    """p-values by the number of the conversion, from "0"."""
    return {str(number): difference.p_value() for number, difference in enumerate(found)}


def count_false_claims_(counts: Counter[str], found: Sequence[Difference]) -> None:
    """Count whether anything is claimed, by either rule, for each number of conversions."""
    formerly = [claimed_formerly(difference) for difference in found]
    p_values = by_number(found)
    for conversions in CONVERSIONS:
        counts[conversions_key(FORMER, conversions)] += any(formerly[:conversions])
        first = dict(list(p_values.items())[:conversions])
        least = min(holm(first, conversions).values())
        counts[conversions_key(HOLM, conversions)] += least <= LEVEL


def count_found_(counts: Counter[str], found: Sequence[Difference]) -> None:
    """Count whether the first one's gain is found, alone and among others that gain nothing."""
    p_values = by_number(found)
    counts[FOUND_FORMERLY] += claimed_formerly(found[0])
    counts[FOUND_ALONE] += p_values["0"] <= LEVEL
    counts[FOUND_AMONG_ALL] += holm(p_values, len(p_values))["0"] <= LEVEL


def count_claims_of_looks_(counts: Counter[str], found: dict[int, Difference]) -> None:
    """Count whether any of the looks claims something, for each way of looking.

    Args:
        counts: Changed.
        found: The difference by the number of seeds.
    """
    p_values = {seeds: difference.p_value() for seeds, difference in found.items()}
    for name, looks in LOOKS.items():
        formerly = [claimed_formerly(found[seeds]) for seeds in looks]
        counts[looks_key(FORMER, name)] += any(formerly)
        over_looks = []
        over_square = []
        for number, seeds in enumerate(looks, start=1):
            over_looks.append(p_values[seeds] <= LEVEL / number)
            over_square.append(p_values[seeds] <= Correction(looks=number).level)
        counts[looks_key(LEVEL_OVER_LOOKS, name)] += any(over_looks)
        counts[looks_key(LEVEL_OVER_SQUARE, name)] += any(over_square)


def measure(repetitions: int, seed_deviation: float) -> list[dict[str, Any]]:
    """A row for each number of images and of seeds; looks are in the row without seeds."""
    counts: dict[tuple[int, int], Counter[str]] = {}
    detectable: dict[tuple[int, int], list[float]] = {}
    of_looks: dict[int, Counter[str]] = {images: Counter() for images in IMAGES}
    draw = np.random.default_rng(0)
    for _ in range(repetitions):
        right = simulated(draw, seed_deviation, gain=0)
        with_gain = simulated(draw, seed_deviation, gain=GAIN)
        for images in IMAGES:
            for seeds in SEEDS:
                cell = images, seeds
                cell_counts = counts.setdefault(cell, Counter())
                count_false_claims_(cell_counts, differences(right, seeds, images))
                found = differences(with_gain, seeds, images)
                count_found_(cell_counts, found)
                detectable.setdefault(cell, []).append(found[0].detectable(LEVEL))
            first = {}
            for seeds in range(3, max(SEEDS) + 1):
                first[seeds] = differences(right[:2], seeds, images)[0]
            count_claims_of_looks_(of_looks[images], first)
    rows: list[dict[str, Any]] = []
    for images in IMAGES:
        for seeds in SEEDS:
            rows.append(
                {
                    "seed_points": seed_deviation,
                    "images": images,
                    "seeds": seeds,
                    "detectable": float(np.median(detectable[images, seeds])),
                    **shares(counts[images, seeds], repetitions),
                }
            )
        rows.append(
            {
                "seed_points": seed_deviation,
                "images": images,
                **shares(of_looks[images], repetitions),
            }
        )
    return rows


def shares(counts: Counter[str], repetitions: int) -> dict[str, float]:
    return {name: count / repetitions for name, count in counts.items()}


def percents(row: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{100 * row[name]:.1f}" for name in names]


def table() -> str:
    """False claims and power, by seeds; and false claims where seeds are added after looks."""
    rows = stored(STORED)["rows"]
    false = []
    for rule in (FORMER, HOLM):
        for conversions in CONVERSIONS:
            false.append(conversions_key(rule, conversions))
    found = [FOUND_FORMERLY, FOUND_ALONE, FOUND_AMONG_ALL]
    looks = []
    for name in LOOKS:
        for rule in (FORMER, LEVEL_OVER_LOOKS, LEVEL_OVER_SQUARE):
            looks.append(looks_key(rule, name))
    lines = []
    look_lines = []
    for row in rows:
        start = [f"{row['seed_points']:g}", f"{row['images']:,}"]
        if "seeds" in row:
            points = f"{row['detectable']:.1f}"
            numbers = percents(row, false) + percents(row, found)
            lines.append([*start, str(row["seeds"]), *numbers, points])
        else:
            look_lines.append([*start, *percents(row, looks)])
    start = ["seeds' deviation", "images"]
    first = markdown_table([*start, "seeds", *false, *found, "detectable"], lines)
    second = markdown_table([*start, *looks], look_lines)
    return f"{first}\n\n{second}"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--table", action="store_true", help="print the stored results")
    arguments = parser.parse_args()
    if not arguments.table:
        rows: list[dict[str, Any]] = []
        repetitions = arguments.repetitions
        with ProcessPoolExecutor() as pool:
            for found in pool.map(measure, itertools.repeat(repetitions), SEED_DEVIATIONS):
                rows += found
        store(
            STORED,
            command="python benchmarks/verdicts.py",
            settings={"repetitions": repetitions, "accuracy": ACCURACY, "gain": GAIN},
            rows=rows,
            packages=("numpy", "scipy", "dcls-convert"),
        )
    print(table())


if __name__ == "__main__":
    main()
