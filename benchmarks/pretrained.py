"""Measure how well a conversion keeps the outputs of a pretrained network.

    python benchmarks/pretrained.py [--only ROW ...] [--table]

EfficientNet-Lite0 is converted and compared with the original on photographs; see lite0.py. The
photographs are split into two halves: crops of one half are for calibration, crops of the other for
testing. Then the halves change places. Each row is one way to convert: its start, its budget in
percent, and what differs from scope model, ties per stage and window 9. The measures on the test
crops are the share with the same top-1 class, KL(old || new) of the softmax in nats, and
|new - old| / |old| of the logits of all crops.

Results go to benchmarks/results/pretrained.jsonl; a new call measures the missing rows. Stored rows
named healed were also trained on the photographs for calibration, with the original as a teacher
and Mixup, and are not measured again.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
    from lite0 import Fold
    from torch import Tensor, nn

    from dcls_convert import ConversionReport

PACKAGES = ("torch", "timm", "dcls-convert", "scikit-image", "scikit-learn", "matplotlib")
FOLDS = (0, 1)
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to convert."""

    start: str  # an `init` of `convert_`, "calibrated" (fitted to crops), or one of YARDSTICKS
    budget: int = 100  # percent
    scope: str = "model"
    tie: str = "stage"
    window: int = 9  # cells
    healed: bool = False

    @property
    def name(self) -> str:
        parts = {
            "healed": self.healed,
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
        *(Row(start=start, budget=60, healed=True) for start in ("fit", "calibrated")),
    )
}


# Measuring.


def convert(fold: "Fold", row: Row) -> "tuple[nn.Module, ConversionReport]":
    """Return the converted network and its report."""
    import dcls_convert

    model = copy.deepcopy(fold.network)
    report = dcls_convert.convert_(
        model,
        dilated_size=row.window,
        budget=row.budget,
        scope=row.scope,
        tie=row.tie,
        init="fit" if row.start == "calibrated" else row.start,  # type: ignore[arg-type]
        calibration=fold.folder if row.start == "calibrated" else None,
    )
    return model, report


def measure(fold: "Fold", row: Row) -> dict[str, Any]:
    """Measure one row of one fold: numbers of the report, and the measures on the test crops."""
    from lite0 import compare_logits, logits

    begun = time.perf_counter()
    if row.start in YARDSTICKS:
        measured = {
            "row": row.name,
            "fold": fold.number,
            "params": None,
            "kernel_counts": [],
            "kernel_error": None,
            "summed_error": None,
            "seconds": 0.0,
        }
        return measured | compare_logits(fold.outputs, yardstick(fold, row.start))
    model, report = convert(fold, row)
    errors = [layer.fit_error for layer in report.layers if layer.fit_error is not None]
    measured = {
        "row": row.name,
        "fold": fold.number,
        "params": report.params.after,
        "kernel_counts": sorted({layer.kernel_count for layer in report.layers}),
        "kernel_error": statistics.fmean(errors) if errors else None,
        "summed_error": sum(errors) if errors else None,
        "seconds": time.perf_counter() - begun,
    }
    return measured | compare_logits(fold.outputs, logits(model, fold.tests))


def yardstick(fold: "Fold", name: str) -> "Tensor":
    """Return the network's logits for the test crops, with weights in bfloat16 or moved crops."""
    from lite0 import logits, torch

    if name == "bf16-weights":
        return logits(copy.deepcopy(fold.network).bfloat16().float(), fold.tests)
    return logits(fold.network, torch.cat([fold.tests[..., :1], fold.tests[..., :-1]], dim=-1))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and store what is not stored yet; return all rows."""
    import torch
    from lite0 import make_fold, pretrained_network

    settings = {
        "calibration_crops": options.calibration_crops,
        "test_crops": options.test_crops,
        "threads": options.threads,
        "seed": SEED,
    }
    stored_before = stored_rows(options.output, settings=settings)
    results = Results(
        path=options.output,
        command="python benchmarks/pretrained.py",
        settings=settings,
        rows=stored_before,
        packages=PACKAGES,
    )
    done = {(row["row"], row["fold"]) for row in results.rows}
    rows = [row for row in ROWS.values() if not row.healed]
    if options.only:
        rows = [row for row in rows if row.name in options.only]
    torch.set_num_threads(options.threads)
    network = pretrained_network()
    numbers = {
        "calibrating": options.calibration_crops,
        "testing": options.test_crops,
        "seed": SEED,
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        folds = [
            make_fold(number, network, scratch / f"crops{number}", **numbers)
            for number in options.folds
        ]
        for row in rows:
            for fold in folds:
                if (row.name, fold.number) not in done:
                    results.add_(measure(fold, row))
    return results.rows


# Results.

MEASURES = {"same_top1": "same top-1", "kl": "KL", "logits_error": "logits' error"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: the mean over the folds and, if they differ, each of them."""
    header = [
        "row",
        "kernel counts",
        "parameters",
        "kernel error",
        "summed",
        "s",
        *MEASURES.values(),
    ]
    lines = []
    # Stored rows that can no longer be measured, of scopes of version 0.1.0, come last.
    for name in dict.fromkeys([*ROWS, *(row["row"] for row in rows)]):
        members = [row for row in rows if row["row"] == name]
        if members:
            lines.append(line(name, sorted(members, key=lambda row: row["fold"])))
    return markdown_table(header, lines)


def line(name: str, members: Sequence[dict[str, Any]]) -> list[str]:
    counts = dict.fromkeys(least_and_most(row["kernel_counts"]) for row in members)
    seconds = statistics.fmean(row["seconds"] + row.get("healing_seconds", 0) for row in members)
    errors = [
        cell([row[key] for row in members], ".3f") for key in ("kernel_error", "summed_error")
    ]
    measures = [cell([row[key] for row in members], ".3f") for key in MEASURES]
    return [
        name,
        ", ".join(counts),
        cell([row["params"] for row in members], ",.0f"),
        *errors,
        f"{seconds:.0f}",
        *measures,
    ]


def least_and_most(counts: Sequence[int]) -> str:
    """Format sorted counts as "3-12", or as "3" if they are all the same."""
    return "-".join(map(str, sorted({*counts[:1], *counts[-1:]})))


def cell(values: Sequence[float], form: str) -> str:
    if None in values:
        return ""
    mean = format(statistics.fmean(values), form)
    texts = [format(value, form) for value in values]
    return mean if set(texts) == {mean} else f"{mean} ({', '.join(texts)})"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument(
        "--folds", nargs="+", type=int, choices=FOLDS, default=FOLDS, help="half for calibration"
    )
    parser.add_argument("--calibration-crops", type=int, default=64)
    parser.add_argument("--test-crops", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    add_results_options_(parser, RESULTS / "pretrained.jsonl")
    options = parser.parse_args()
    print(table(stored(options.output)["rows"] if options.table else run(options)))


if __name__ == "__main__":
    main()
