"""Networks of the kanji runs beside one another, where `dcls-convert compare` has no answer.

    python benchmarks/glyphs_paired.py

`compare` compares with the network as it is, in one call. This prints the differences between other
pairs of networks, by its own half widths, and the p-values of all calls that share the network as
it is, corrected together by Holm's method. It reads results/glyphs.tar.gz, where all runs are.
"""

import json
import tarfile
from typing import Any

import numpy as np
from measuring import RESULTS, script_parser

from dcls_convert.compare.arm_results import holm, measured_difference

RUNS = RESULTS / "glyphs.tar.gz"
SEEDS = range(10)
LEVEL = 0.05
# Folder in the archive and name of its runs, without the seed.
LEARNT = ("glyphs-ablated", "9x9-kernel")
FROZEN = ("glyphs-ablated", "9x9-frozen-kernel")
DENSE = ("glyphs-ablated", "9x9-dense")
AS_IT_IS = ("glyphs-ablated", "as-it-is")
DILATED = ("glyphs-dilated", "as-it-is")
PAIRS = ((LEARNT, FROZEN), (LEARNT, DENSE), (DILATED, AS_IT_IS), (LEARNT, DILATED))
CALLS_OF_ONE_ORIGINAL = ("glyphs", "glyphs-ablated")


def read(archive: tarfile.TarFile, name: str) -> Any:
    """The JSON of a file in the archive."""
    member = archive.extractfile(name)
    assert member is not None
    return json.load(member)


def answers(archive: tarfile.TarFile, folder: str, name: str) -> "np.ndarray":
    """(seeds, images): 1 where an image was classified right, else 0."""
    rows = []
    for seed in SEEDS:
        right = read(archive, f"{folder}/runs/{name}-seed{seed}/run.json")["right"]
        rows.append([int(answer) for answer in right])
    return np.array(rows)


def print_difference(
    archive: tarfile.TarFile, one: tuple[str, str], other: tuple[str, str]
) -> None:
    difference = measured_difference(answers(archive, *one) - answers(archive, *other))
    by_seed = ", ".join(f"{value:+.1f}" for value in difference.by_seed)
    print(
        f"{' '.join(one)} less {' '.join(other)}: "
        f"{difference.mean:+.2f} ± {difference.half_width(LEVEL):.2f} points; by seed {by_seed}"
    )


def main() -> None:
    script_parser(__doc__).parse_args()
    p_values = {}
    with tarfile.open(RUNS) as archive:
        for one, other in PAIRS:
            print_difference(archive, one, other)
        for folder in CALLS_OF_ONE_ORIGINAL:
            for arm in read(archive, f"{folder}/comparison.json")["arms"]:
                if arm["p_value"] is not None:
                    p_values[arm["label"]] = arm["p_value"]
    print(f"p-values of {len(p_values)} conversions, corrected together:")
    for label, p_value in holm(p_values, len(p_values)).items():
        print(f"  {label}: {p_value:.3f}")


if __name__ == "__main__":
    main()
