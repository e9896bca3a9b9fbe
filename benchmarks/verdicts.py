"""Simulate how often `dcls-convert compare` claims false differences, and finds true ones.

    python benchmarks/verdicts.py [--repetitions N] [--table]

Comparisons are simulated, and their differences go through the package's own functions. A network
classifies an image right if a score is above 0 (a latent probit model). The score is a sum of four
normal variables: how easy the image is for all networks, how easy it is for this network, how well
this network was trained with this seed, and how well that training suits this image. Each network
classifies 80 % of all images right; to measure power, the first conversion classifies 82 %.

The former rule claims a difference for each conversion whose intervals over seeds and over images
both exclude 0. Results go to benchmarks/results/verdicts.json.
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

from dcls_convert.compare.answer import (
    LEVEL,
    Correction,
    Difference,
    holm,
    summarize_difference,
)

STORED = RESULTS / "verdicts.json"
SEEDS = (3, 5, 10, 20)
IMAGES = (100, 1000, 10000)
CONVERSIONS = (1, 3, 6)
LOOKS = {"3, 5, 10": (3, 5, 10), "3, 5, 10, 20": (3, 5, 10, 20), "3 to 20": tuple(range(3, 21))}
# Rules, by their names in the stored results, where two are called "new".
FORMER = "former"
HOLM = "new"  # for several conversions
LEVEL_OVER_LOOKS = "by looks"  # for several looks: the n-th has the level divided by n
LEVEL_OVER_SQUARE = "new"  # for several looks: the package's rule
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
# Standard deviations of the accuracy over seeds, in percentage points; stored as "seed_points".
SEED_DEVIATIONS = (0.5, 1.5)


def conversions_key(rule: str, conversions: int) -> str:
    """Return the key of the share of comparisons of so many conversions with a false claim."""
    return f"{rule} {conversions}"


def looks_key(rule: str, looks: str) -> str:
    """Return the key of the share of comparisons with a false claim at any of the looks."""
    return f"{rule}, {looks}"


def simulate(draw: np.random.Generator, seed_deviation: float, gain: float) -> Any:
    """Simulate which images are classified right: (networks, seeds, images), 0 or 1.

    Network 0 is the original. `gain` is the gain in accuracy of network 1, the first conversion.
    """
    networks = 1 + max(CONVERSIONS)
    seeds = max(SEEDS)
    images = max(IMAGES)

    def normal(deviation: float, *shape: int) -> Any:
        return deviation * draw.standard_normal(shape, dtype=np.float32)

    slope = 100 * stats.norm.pdf(stats.norm.ppf(ACCURACY)) / SCORE  # points per unit of the score
    score = normal(IMAGE, 1, 1, images) + normal(IMAGE_AND_NETWORK, networks, 1, images)
    score = score + normal(seed_deviation / slope, networks, seeds, 1)
    score += normal(IMAGE_AND_TRAINING, networks, seeds, images)
    score += np.float32(SCORE * stats.norm.ppf(ACCURACY))
    score[1] += np.float32(SCORE * (stats.norm.ppf(ACCURACY + gain) - stats.norm.ppf(ACCURACY)))
    return (score > 0).astype(np.float32)


def claimed_formerly(difference: Difference) -> bool:
    """True if both intervals exclude 0."""
    widest = max(difference.half_width_over_seeds(LEVEL), difference.half_width_over_images(LEVEL))
    return abs(difference.mean) > widest


def differences(right: Any, seeds: int, images: int) -> list[Difference]:
    """Return the difference of each conversion from the original, on the first seeds and images."""
    part = right[:, :seeds, :images]
    measured = []
    for conversion in range(1, len(part)):
        measured.append(summarize_difference(part[conversion] - part[0]))
    return measured


def p_values_by_number(measured: Sequence[Difference]) -> dict[str, float]:
    """Return p-values by the number of the conversion, from "0"."""
    return {str(number): difference.p_value() for number, difference in enumerate(measured)}


def count_false_claims_(counts: Counter[str], measured: Sequence[Difference]) -> None:
    """Count whether anything is claimed, by either rule, for each number of conversions."""
    formerly = [claimed_formerly(difference) for difference in measured]
    p_values = p_values_by_number(measured)
    for conversions in CONVERSIONS:
        counts[conversions_key(FORMER, conversions)] += any(formerly[:conversions])
        first = dict(list(p_values.items())[:conversions])
        least = min(holm(first, conversions).values())
        counts[conversions_key(HOLM, conversions)] += least <= LEVEL


def count_found_(counts: Counter[str], measured: Sequence[Difference]) -> None:
    """Count whether the first conversion's gain is found, alone and among others without one."""
    p_values = p_values_by_number(measured)
    counts[FOUND_FORMERLY] += claimed_formerly(measured[0])
    counts[FOUND_ALONE] += p_values["0"] <= LEVEL
    counts[FOUND_AMONG_ALL] += holm(p_values, len(p_values))["0"] <= LEVEL


def count_claims_of_looks_(counts: Counter[str], difference_of: dict[int, Difference]) -> None:
    """Count whether any of the looks claims something, for each sequence of looks.

    Args:
        counts: Changed.
        difference_of: Number of seeds -> difference.
    """
    p_values = {seeds: difference.p_value() for seeds, difference in difference_of.items()}
    for name, looks in LOOKS.items():
        formerly = [claimed_formerly(difference_of[seeds]) for seeds in looks]
        counts[looks_key(FORMER, name)] += any(formerly)
        over_looks = []
        over_square = []
        for number, seeds in enumerate(looks, start=1):
            over_looks.append(p_values[seeds] <= LEVEL / number)
            over_square.append(p_values[seeds] <= Correction(looks=number).level)
        counts[looks_key(LEVEL_OVER_LOOKS, name)] += any(over_looks)
        counts[looks_key(LEVEL_OVER_SQUARE, name)] += any(over_square)


def measure(repetitions: int, seed_deviation: float) -> list[dict[str, Any]]:
    """Return a row for each number of images and of seeds; rows of looks have no seeds."""
    counts: dict[tuple[int, int], Counter[str]] = {}
    detectable: dict[tuple[int, int], list[float]] = {}
    look_counts: dict[int, Counter[str]] = {images: Counter() for images in IMAGES}
    draw = np.random.default_rng(0)
    for _ in range(repetitions):
        right = simulate(draw, seed_deviation, gain=0)
        with_gain = simulate(draw, seed_deviation, gain=GAIN)
        for images in IMAGES:
            for seeds in SEEDS:
                cell = images, seeds
                cell_counts = counts.setdefault(cell, Counter())
                count_false_claims_(cell_counts, differences(right, seeds, images))
                measured = differences(with_gain, seeds, images)
                count_found_(cell_counts, measured)
                detectable.setdefault(cell, []).append(measured[0].detectable(LEVEL))
            difference_of = {}  # the first conversion's, by the number of seeds
            for seeds in range(3, max(SEEDS) + 1):
                difference_of[seeds] = differences(right[:2], seeds, images)[0]
            count_claims_of_looks_(look_counts[images], difference_of)
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
                **shares(look_counts[images], repetitions),
            }
        )
    return rows


def shares(counts: Counter[str], repetitions: int) -> dict[str, float]:
    return {name: count / repetitions for name, count in counts.items()}


def percents(row: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{100 * row[name]:.1f}" for name in names]


def table() -> str:
    """Return two tables: false claims and power by seeds; false claims if seeds are added later."""
    rows = stored(STORED)["rows"]
    false_claim_keys = []
    for rule in (FORMER, HOLM):
        for conversions in CONVERSIONS:
            false_claim_keys.append(conversions_key(rule, conversions))
    found_keys = [FOUND_FORMERLY, FOUND_ALONE, FOUND_AMONG_ALL]
    look_keys = []
    for name in LOOKS:
        for rule in (FORMER, LEVEL_OVER_LOOKS, LEVEL_OVER_SQUARE):
            look_keys.append(looks_key(rule, name))
    lines = []
    look_lines = []
    for row in rows:
        start = [f"{row['seed_points']:g}", f"{row['images']:,}"]
        if "seeds" in row:
            points = f"{row['detectable']:.1f}"
            numbers = percents(row, false_claim_keys) + percents(row, found_keys)
            lines.append([*start, str(row["seeds"]), *numbers, points])
        else:
            look_lines.append([*start, *percents(row, look_keys)])
    start = ["seeds' deviation", "images"]
    first = markdown_table([*start, "seeds", *false_claim_keys, *found_keys, "detectable"], lines)
    second = markdown_table([*start, *look_keys], look_lines)
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
            for part in pool.map(measure, itertools.repeat(repetitions), SEED_DEVIATIONS):
                rows += part
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
