"""Compare pairs of networks of the kanji runs that `dcls-convert compare` does not compare.

    python benchmarks/glyphs_paired.py

Each call of `compare` compares converted networks with the network as it is. This script prints the
differences between other pairs, with half widths as `compare` computes them, and the p-values of
all calls that share the network as it is, corrected together by Holm's method. It reads
results/glyphs.tar.gz, which has all runs.
"""

import json
import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from measuring import RESULTS, script_parser

from dcls_convert.compare.answer import holm, summarize_difference

RUNS = RESULTS / "glyphs.tar.gz"
SEEDS = range(10)
LEVEL = 0.05
# Networks: the folder in the archive, and the name of the runs without the seed.
LEARNT = ("glyphs-ablated", "9x9-kernel")
FROZEN = ("glyphs-ablated", "9x9-frozen-kernel")
DENSE = ("glyphs-ablated", "9x9-dense")
AS_IT_IS = ("glyphs-ablated", "as-it-is")
DILATED = ("glyphs-dilated", "as-it-is")
CONVNEXT = ("glyphs-convnext-ablated", "as-it-is")
CONVNEXT_LEARNT = ("glyphs-convnext-ablated", "13x13")
CONVNEXT_FROZEN = ("glyphs-convnext-ablated", "13x13-frozen")
CONVNEXT_3X3 = ("glyphs-convnext-3x3", "as-it-is")
PAIRS = (
    (LEARNT, FROZEN),
    (LEARNT, DENSE),
    (DILATED, AS_IT_IS),
    (LEARNT, DILATED),
    (CONVNEXT_LEARNT, CONVNEXT_FROZEN),
    (CONVNEXT_3X3, CONVNEXT),
    (CONVNEXT_LEARNT, CONVNEXT_3X3),
)
# Calls that share the runs of the network as it is.
CALLS_OF_ONE_ORIGINAL = (
    ("glyphs", "glyphs-ablated"),
    ("glyphs-convnext", "glyphs-convnext-ablated"),
)


def read(archive: tarfile.TarFile, name: str) -> Any:
    """Return the JSON of a file in the archive."""
    member = archive.extractfile(name)
    assert member is not None
    return json.load(member)


def answers(archive: tarfile.TarFile, folder: str, name: str) -> "np.ndarray":
    """Return (seeds, images): 1 if the image was classified right, else 0."""
    rows = []
    for seed in SEEDS:
        right = read(archive, f"{folder}/runs/{name}-seed{seed}/run.json")["right"]
        rows.append([int(answer) for answer in right])
    return np.array(rows)


def print_difference(
    archive: tarfile.TarFile, first: tuple[str, str], second: tuple[str, str]
) -> None:
    difference = summarize_difference(answers(archive, *first) - answers(archive, *second))
    by_seed = ", ".join(f"{value:+.1f}" for value in difference.by_seed)
    print(
        f"{' '.join(first)} less {' '.join(second)}: "
        f"{difference.mean:+.2f} ± {difference.half_width(LEVEL):.2f} points; by seed {by_seed}"
    )


def print_corrected_p_values(archive: tarfile.TarFile, folders: Sequence[str]) -> None:
    """Print the p-values of all conversions of these calls, corrected together."""
    p_values = {}
    for folder in folders:
        for arm in read(archive, f"{folder}/comparison.json")["arms"]:
            if arm["p_value"] is not None:
                p_values[arm["label"]] = arm["p_value"]
    print(f"{' and '.join(folders)}: p-values of {len(p_values)} conversions, corrected together:")
    for label, p_value in holm(p_values, len(p_values)).items():
        print(f"  {label}: {p_value:.3f}")


def main() -> None:
    script_parser(__doc__).parse_args()
    with tarfile.open(RUNS) as archive:
        for first, second in PAIRS:
            print_difference(archive, first, second)
        for folders in CALLS_OF_ONE_ORIGINAL:
            print_corrected_p_values(archive, folders)


if __name__ == "__main__":
    main()
