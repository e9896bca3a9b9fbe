"""Simulate how often examples/compare.py claims false differences, and finds true ones.

    python benchmarks/verdicts.py [--repetitions N] [--output FILE] [--table]

Comparisons are simulated, and their differences go through the script's own functions. A network
classifies an image right if a score is above 0 (a latent probit model). The score is a sum of four
normal variables: how easy the image is for all networks, how easy it is for this network, how well
this network was trained with this seed, and how well that training suits this image. Each network
classifies 80 % of all images right; to measure power, the first conversion classifies 82 %.
Results go to benchmarks/results/verdicts.jsonl.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from measuring import (
    EXAMPLES,
    RESULTS,
    add_results_options_,
    markdown_table,
    script_parser,
    store,
    stored,
)
from scipy import stats

sys.path.insert(0, str(EXAMPLES))
from compare import LEVEL, Difference, difference_of, holm

SEEDS = (3, 5, 10, 20)
IMAGES = (100, 1000, 10000)
CONVERSIONS = (1, 3, 6)
# Shares of the comparisons in which the gain of the first conversion is found.
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


def claims_key(conversions: int) -> str:
    """Return the key of the share of comparisons of so many conversions with a false claim."""
    return f"claims {conversions}"


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


def differences(right: Any, seeds: int, images: int) -> list[Difference]:
    """Return the difference of each conversion from the original, on the first seeds and images."""
    part = right[:, :seeds, :images]
    measured = []
    for conversion in range(1, len(part)):
        measured.append(difference_of(part[conversion] - part[0]))
    return measured


def p_values_by_number(measured: Sequence[Difference]) -> dict[str, float]:
    """Return p-values by the number of the conversion, from "0"."""
    return {str(number): difference.p_value() for number, difference in enumerate(measured)}


def count_false_claims_(counts: Counter[str], measured: Sequence[Difference]) -> None:
    """Count whether anything is claimed, for each number of conversions."""
    p_values = p_values_by_number(measured)
    for conversions in CONVERSIONS:
        first = dict(list(p_values.items())[:conversions])
        counts[claims_key(conversions)] += min(holm(first, conversions).values()) <= LEVEL


def count_found_(counts: Counter[str], measured: Sequence[Difference]) -> None:
    """Count whether the first conversion's gain is found, alone and among others without one."""
    p_values = p_values_by_number(measured)
    counts[FOUND_ALONE] += p_values["0"] <= LEVEL
    counts[FOUND_AMONG_ALL] += holm(p_values, len(p_values))["0"] <= LEVEL


def measure(repetitions: int, seed_deviation: float) -> list[dict[str, Any]]:
    """Return a row for each number of images and of seeds."""
    counts: dict[tuple[int, int], Counter[str]] = {}
    detectable: dict[tuple[int, int], list[float]] = {}
    draw = np.random.default_rng(0)
    for _ in range(repetitions):
        right = simulate(draw, seed_deviation, gain=0)
        with_gain = simulate(draw, seed_deviation, gain=GAIN)
        for images, seeds in itertools.product(IMAGES, SEEDS):
            cell_counts = counts.setdefault((images, seeds), Counter())
            count_false_claims_(cell_counts, differences(right, seeds, images))
            measured = differences(with_gain, seeds, images)
            count_found_(cell_counts, measured)
            detectable.setdefault((images, seeds), []).append(measured[0].detectable(LEVEL))
    rows: list[dict[str, Any]] = []
    for (images, seeds), cell_counts in counts.items():
        row = {"seed_points": seed_deviation, "images": images, "seeds": seeds}
        row["detectable"] = float(np.median(detectable[images, seeds]))
        rows.append(row | shares(cell_counts, repetitions))
    return rows


def shares(counts: Counter[str], repetitions: int) -> dict[str, float]:
    return {name: count / repetitions for name, count in counts.items()}


def percents(row: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{100 * row[name]:.1f}" for name in names]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of false claims and power, by the numbers of images and seeds."""
    claims = [claims_key(conversions) for conversions in CONVERSIONS]
    keys = [*claims, FOUND_ALONE, FOUND_AMONG_ALL]
    lines = []
    for row in rows:
        start = [f"{row['seed_points']:g}", f"{row['images']:,}", str(row["seeds"])]
        lines.append([*start, *percents(row, keys), f"{row['detectable']:.1f}"])
    return markdown_table(["seeds' deviation", "images", "seeds", *keys, "detectable"], lines)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    add_results_options_(parser, RESULTS / "verdicts.jsonl")
    arguments = parser.parse_args()
    if not arguments.table:
        rows: list[dict[str, Any]] = []
        repetitions = arguments.repetitions
        with ProcessPoolExecutor() as pool:
            for part in pool.map(measure, itertools.repeat(repetitions), SEED_DEVIATIONS):
                rows += part
        store(
            arguments.output,
            command="python benchmarks/verdicts.py",
            settings={"repetitions": repetitions, "accuracy": ACCURACY, "gain": GAIN},
            rows=rows,
            packages=("numpy", "scipy", "dcls-convert"),
        )
    print(table(stored(arguments.output)["rows"]))


if __name__ == "__main__":
    main()
