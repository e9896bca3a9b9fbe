"""Measure how well a conversion keeps the outputs of trained networks.

    python benchmarks/pretrained.py [--networks NAME ...] [--images N ...] [--draws N ...]
                                    [--only ROW ...] [--label LABEL]
    python benchmarks/pretrained.py --table

Networks are converted and compared with the originals on photographs; see trained.py and
photographs.py. The photographs are split into two halves: crops of one half are for calibration,
crops of the other for testing. Then the halves change places. Each row is one way to convert: its
start, its budget in percent, and what differs from scope model, ties per stage and window 9.
EfficientNet-Lite0 is converted in all ways, with 64 images. The ways of scope error are measured
for all networks, with 5 and 25 images, and each with three draws of the images.

The measures on the test crops are the share with the same top-1 class, KL(old || new) of the
softmax in nats, and |new - old| / |old| of the logits of all crops. Seconds are processor time.

To measure another checkout, point PYTHONPATH at it, and name its rows with --label. Results go to
benchmarks/results/pretrained.jsonl; a new call measures the missing rows.
"""

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measuring import (
    RESULTS,
    Results,
    add_results_options_,
    markdown_table,
    script_parser,
    stored,
    stored_rows,
)

if TYPE_CHECKING:  # these import torch, which --table does not need
    from torch import Tensor, nn

    from dcls_convert import ConversionReport

PACKAGES = ("torch", "timm", "dcls-convert", "scikit-image", "scikit-learn", "matplotlib")
FOLDS = (0, 1)  # halves for calibration
DRAWS = (0, 1, 2)  # seeds of the images for calibration
TEST_SEED = 1
BATCH = 8  # images, as when a calibration reads a folder
LITE0 = "tf_efficientnet_lite0"
SMALL_RESNET = "small_resnet"
NETWORKS = (LITE0, "tf_efficientnet_lite1", SMALL_RESNET)
ALL_WAYS_IMAGES = 64
FEW_IMAGES = (5, 25)
THIS_CHECKOUT = "now"  # label


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to convert."""

    start: str  # an `init` of `convert_`, "calibrated" (fitted to crops), or one of YARDSTICKS
    budget: int = 100  # percent
    scope: str = "model"
    tie: str = "stage"
    window: int = 9  # cells

    @property
    def name(self) -> str:
        parts = {
            self.start: True,
            str(self.budget): self.start not in YARDSTICKS,
            self.scope: self.scope != "model",
            "untied": self.tie == "none",
            f"window{self.window}": self.window != 9,
        }
        return "-".join(part for part, stated in parts.items() if stated)


# Changes of the original, for comparison: its weights in bfloat16, and images moved by one pixel.
YARDSTICKS = ("bf16-weights", "one-pixel-shift")
ROWS = {
    row.name: row
    for row in (
        *(Row(start=start) for start in YARDSTICKS),
        *(Row(start=start) for start in ("random", "largest", "fit", "calibrated")),
        *(
            Row(start=start, budget=budget)
            for budget in (60, 80, 150)
            for start in ("fit", "calibrated")
        ),
        *(Row(start="calibrated", budget=budget, scope="error") for budget in (60, 80, 100)),
        *(Row(start=start, tie="none") for start in ("fit", "calibrated")),
        *(Row(start="calibrated", window=window) for window in (5, 13)),
    )
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network that is converted in one way."""

    network: str
    row: Row
    images: int  # for calibration
    draw: int


def all_cases() -> list[Case]:
    cases = []
    for row in ROWS.values():
        cases.append(Case(network=LITE0, row=row, images=ALL_WAYS_IMAGES, draw=0))
    for network, images, draw in itertools.product(NETWORKS, FEW_IMAGES, DRAWS):
        for row in ROWS.values():
            if row.scope == "error":
                cases.append(Case(network=network, row=row, images=images, draw=draw))
    return cases


# Measuring.


@dataclass(frozen=True, kw_only=True)
class Fold:
    """A network, and one half of the photographs for calibration, the other half for testing."""

    number: int  # of the half for calibration
    name: str
    network: "nn.Module"  # not converted
    tests: "Tensor"  # test crops (N, 3, rows, columns)
    outputs: "Tensor"  # the network's outputs for the test crops (N, classes)


def images_for(name: str, half: int, count: int, seed: int) -> "Tensor":
    """Return random crops of a half of the photographs, as the network takes them."""
    from photographs import crops, pixels, small_crops

    if name == SMALL_RESNET:
        return pixels(small_crops(half, count, seed=seed))
    return pixels(crops(half, count, seed=seed))


def make_fold(name: str, number: int, test_crops: int) -> Fold:
    """Load a network, and compute its outputs for the test crops."""
    from photographs import logits
    from trained import trained_network

    network = trained_network(name)
    tests = images_for(name, 1 - number, test_crops, TEST_SEED)
    return Fold(
        number=number, name=name, network=network, tests=tests, outputs=logits(network, tests)
    )


def convert(fold: Fold, case: Case, images: "Tensor") -> "tuple[nn.Module, ConversionReport]":
    """Return the converted network and its report."""
    import dcls_convert

    model = copy.deepcopy(fold.network)
    row = case.row
    start = row.start
    calibration = None
    if start == "calibrated":
        start = "fit"
        calibration = dcls_convert.Calibration(batches=images.split(BATCH))
    report = dcls_convert.convert_(
        model,
        input_size=tuple(images.shape[1:]),
        dilated_size=row.window,
        budget=row.budget,
        scope=row.scope,
        tie=row.tie,
        init=start,  # type: ignore[arg-type]
        calibration=calibration,
    )
    return model, report


def measure(fold: Fold, case: Case) -> dict[str, Any]:
    """Measure one case of one fold: numbers of the report, and the measures on the test crops."""
    from photographs import compare_logits, logits

    measured = {"params": None, "kernel_counts": [], "kernel_error": None, "seconds": 0.0}
    if case.row.start in YARDSTICKS:
        outputs = yardstick(fold, case.row.start)
        return measured | compare_logits(fold.outputs, outputs)
    images = images_for(fold.name, fold.number, case.images, case.draw)
    begun = time.process_time()
    model, report = convert(fold, case, images)
    measured["seconds"] = time.process_time() - begun
    measured["params"] = report.params.after
    measured["kernel_counts"] = sorted({layer.kernel_count for layer in report.layers})
    errors = [layer.fit_error for layer in report.layers if layer.fit_error is not None]
    if errors:
        measured["kernel_error"] = statistics.fmean(errors)
    return measured | compare_logits(fold.outputs, logits(model, fold.tests))


def yardstick(fold: Fold, name: str) -> "Tensor":
    """Return the network's logits for the test crops, with weights in bfloat16 or moved crops."""
    import torch
    from photographs import logits

    if name == "bf16-weights":
        return logits(copy.deepcopy(fold.network).bfloat16().float(), fold.tests)
    return logits(fold.network, torch.cat([fold.tests[..., :1], fold.tests[..., :-1]], dim=-1))


def key(label: str, case: Case, fold: int) -> dict[str, Any]:
    """Return the entries that tell a stored row from all others."""
    return {
        "label": label,
        "network": case.network,
        "row": case.row.name,
        "images": case.images,
        "draw": case.draw,
        "fold": fold,
    }


def missing_cases(
    options: argparse.Namespace, rows: Sequence[dict[str, Any]], network: str, fold: int
) -> list[Case]:
    """Return the cases of a network and fold that the options name, and that no row has yet."""
    cases = []
    for case in all_cases():
        is_wanted = (
            case.network == network
            and case.row.name in options.only
            and case.images in options.images
            and case.draw in options.draws
        )
        entries = key(options.label, case, fold)
        if is_wanted and not any(entries.items() <= row.items() for row in rows):
            cases.append(case)
    return cases


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and store what is not stored yet; return all rows."""
    import torch

    settings = {"test_crops": options.test_crops, "threads": options.threads}
    results = Results(
        path=options.output,
        command="python benchmarks/pretrained.py",
        settings=settings,
        rows=stored_rows(options.output, settings=settings),
        packages=PACKAGES,
    )
    torch.set_num_threads(options.threads)
    for name, number in itertools.product(options.networks, FOLDS):
        cases = missing_cases(options, results.rows, name, number)
        if not cases:
            continue
        fold = make_fold(name, number, options.test_crops)
        for case in cases:
            results.add_(key(options.label, case, number) | measure(fold, case))
    return results.rows


# Results.

MEASURES = {"same_top1": "same top-1", "kl": "KL", "logits_error": "logits' error"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: a line for each network, number of images, row and label."""
    header = [
        "network",
        "images",
        "row",
        "version",
        "kernel counts",
        "parameters",
        "kernel error",
        "s",
        *MEASURES.values(),
    ]
    members: dict[tuple[int, int, int, str], list[dict[str, Any]]] = {}
    names = [*ROWS]
    for row in rows:
        network = NETWORKS.index(row["network"])
        place = (network, -row["images"], names.index(row["row"]), row["label"])
        members.setdefault(place, []).append(row)
    return markdown_table(header, [line(members[place]) for place in sorted(members)])


def line(members: Sequence[dict[str, Any]]) -> list[str]:
    first = members[0]
    counts = {count for row in members for count in row["kernel_counts"]}
    seconds = statistics.fmean(row["seconds"] for row in members)
    return [
        first["network"],
        str(first["images"]),
        first["row"],
        first["label"],
        least_and_most(sorted(counts)),
        mean(members, "params", ",.0f"),
        mean(members, "kernel_error", ".3f"),
        f"{seconds:.0f}",
        *(mean_and_draws(members, measure) for measure in MEASURES),
    ]


def least_and_most(counts: Sequence[int]) -> str:
    """Format sorted counts as "3-12", or as "3" if they are all the same."""
    return "-".join(map(str, sorted({*counts[:1], *counts[-1:]})))


def mean(members: Sequence[dict[str, Any]], name: str, form: str) -> str:
    """Format the mean over folds and draws."""
    values = [row[name] for row in members]
    if None in values:
        return ""
    return format(statistics.fmean(values), form)


def mean_and_draws(members: Sequence[dict[str, Any]], name: str) -> str:
    """Format the mean; in brackets, the mean of each draw, if they differ."""
    of_all = mean(members, name, ".3f")
    of_draws = []
    for draw in DRAWS:
        of_draw = [row for row in members if row["draw"] == draw]
        if of_draw:
            of_draws.append(mean(of_draw, name, ".3f"))
    if set(of_draws) == {of_all}:
        return of_all
    return f"{of_all} ({', '.join(of_draws)})"


def main() -> None:
    parser = script_parser(__doc__)
    images = (ALL_WAYS_IMAGES, *FEW_IMAGES)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--images", nargs="+", type=int, choices=images, default=images)
    parser.add_argument("--draws", nargs="+", type=int, choices=DRAWS, default=DRAWS)
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW", help=", ".join(ROWS)
    )
    parser.add_argument("--label", default=THIS_CHECKOUT, help="of the new rows")
    parser.add_argument("--test-crops", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    add_results_options_(parser, RESULTS / "pretrained.jsonl")
    options = parser.parse_args()
    print(table(stored(options.output)["rows"] if options.table else run(options)))


if __name__ == "__main__":
    main()
