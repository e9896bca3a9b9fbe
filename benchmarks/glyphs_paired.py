"""Print the answers about the stored trainings on kanji.

    python benchmarks/glyphs_paired.py

For each call of the comparison, it prints the table and the sentences of examples/compare.py; then
differences between networks of different calls, and the p-values of calls that share the original
network, corrected together by Holm's method. results/glyphs.jsonl has a line for each run.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from measuring import EXAMPLES, RESULTS, script_parser

sys.path.insert(0, str(EXAMPLES))
import compare
from compare import LEVEL, ORIGINAL, Difference, difference_of, holm, right

RUNS = RESULTS / "glyphs.jsonl"
SEEDS = range(10)
# Networks: the call, and the name of the network in it.
LEARNT = ("glyphs-ablated", "9x9-kernel")
FROZEN = ("glyphs-ablated", "9x9-frozen-kernel")
DENSE = ("glyphs-ablated", "9x9-dense")
AS_IT_IS = ("glyphs-ablated", ORIGINAL)
DILATED = ("glyphs-dilated", ORIGINAL)
CONVNEXT = ("glyphs-convnext-ablated", ORIGINAL)
CONVNEXT_LEARNT = ("glyphs-convnext-ablated", "13x13")
CONVNEXT_FROZEN = ("glyphs-convnext-ablated", "13x13-frozen")
CONVNEXT_3X3 = ("glyphs-convnext-3x3", ORIGINAL)
PAIRS = (
    (LEARNT, FROZEN),
    (LEARNT, DENSE),
    (DILATED, AS_IT_IS),
    (LEARNT, DILATED),
    (CONVNEXT_LEARNT, CONVNEXT_FROZEN),
    (CONVNEXT_3X3, CONVNEXT),
    (CONVNEXT_LEARNT, CONVNEXT_3X3),
)
# Calls that share the runs of the original network.
CALLS_OF_ONE_ORIGINAL = (
    ("glyphs", "glyphs-ablated"),
    ("glyphs-convnext", "glyphs-convnext-ablated"),
)
Calls = Mapping[str, compare.Runs]


def read_calls() -> Calls:
    """Return the runs of each call."""
    calls: dict[str, dict[tuple[str, int], Any]] = {}
    for line in RUNS.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        calls.setdefault(run["call"], {})[run["network"], run["seed"]] = run
    return calls


def networks_of(runs: compare.Runs) -> list[str]:
    """Return the names of the networks, the original first."""
    return [ORIGINAL, *sorted({name for name, _ in runs} - {ORIGINAL})]


def paired(calls: Calls, first: tuple[str, str], second: tuple[str, str]) -> Difference:
    answers = [right(calls[call], network, SEEDS) for call, network in (first, second)]
    return difference_of(answers[0] - answers[1])


def print_difference(calls: Calls, first: tuple[str, str], second: tuple[str, str]) -> None:
    difference = paired(calls, first, second)
    by_seed = ", ".join(f"{value:+.1f}" for value in difference.by_seed)
    print(
        f"{' '.join(first)} less {' '.join(second)}: "
        f"{difference.mean:+.2f} ± {difference.half_width(LEVEL):.2f} points; by seed {by_seed}"
    )


def print_corrected_p_values(calls: Calls, names: Sequence[str]) -> None:
    """Print the p-values of all conversions of these calls, corrected together."""
    p_values = {}
    for call in names:
        for network in networks_of(calls[call])[1:]:
            p_values[network] = paired(calls, (call, network), (call, ORIGINAL)).p_value()
    print(f"{' and '.join(names)}: p-values of {len(p_values)} conversions, corrected together:")
    for network, p_value in holm(p_values, len(p_values)).items():
        print(f"  {network}: {p_value:.3f}")


def main() -> None:
    script_parser(__doc__).parse_args()
    calls = read_calls()
    for call, runs in calls.items():
        print(f"{call}:\n\n{compare.answer(runs, networks_of(runs))}\n")
    for first, second in PAIRS:
        print_difference(calls, first, second)
    for names in CALLS_OF_ONE_ORIGINAL:
        print_corrected_p_values(calls, names)


if __name__ == "__main__":
    main()
