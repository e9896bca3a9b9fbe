"""Convert, fold and reload every model for real.

    python benchmarks/deep_sweep.py [--models PATTERN] [--workers N] [--failed | --table]

Every model of timm's and torchvision's registries that has convolutions to replace and at most 60
million parameters is built, converted with random elements all over the window, run, saved,
reloaded and run again, folded and run again. Images are as small as the model allows. Two errors
are measured in float32: the largest difference between folded and unfolded outputs, divided by the
largest output, which may be at most 1e-4; and the largest difference between the outputs of the
reloaded and the converted model, which must be 0. Results go to
benchmarks/results/deep_sweep.jsonl; with --table, the script prints deep_sweep.md from them.
"""

import contextlib
import io
import json
import math
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from measuring import (
    RESULTS,
    add_results_options_,
    machine_of,
    markdown_table,
    script_parser,
    store,
    stored,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import dcls_convert
from dcls_convert.networks.building import build_model
from dcls_convert.networks.find_convs import find_convs_for, inputs_of
from dcls_convert.networks.source import registry_names, resolve_model
from dcls_convert.networks.torchvision_inputs import assumed_inputs

MAX_PARAMS = 60_000_000
MAX_FOLD_ERROR = 1e-4
SIDES = (32, 64, 96, 128, 160, 192, 224, 256)  # tried in turn, before the model's own
NOT_RUN = ("nothing matches", "too large")
PACKAGES = ("torch", "torchvision", "timm", "dcls-convert")
Row = dict[str, Any]


def timed_row(name: str) -> Row:
    """Measure one model; return its row, with the seconds it took."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        row = measured_row(name)
    return {"name": name, **row, "seconds": round(time.perf_counter() - start, 1)}


def measured_row(name: str) -> Row:
    """Convert, reload and fold one model; return its row."""
    source = resolve_model(name)
    meta_model = build_model(source, device="meta")
    params = sum(parameter.numel() for parameter in meta_model.parameters())
    inputs = inputs_of(meta_model, None, None) or assumed_inputs(source, meta_model)
    if params > MAX_PARAMS:
        return {"status": "too large", "params": params}
    try:
        convs = find_convs_for(meta_model, inputs)
        plan = dcls_convert.plan_conversion(convs, model=source.name)
    except dcls_convert.NothingMatchesError:
        return {"status": "nothing matches", "params": params}
    model = build_model(source).eval()
    perturb_zeros_(model)
    size = smallest_input(model, inputs[0].shape[1:])
    generator = torch.Generator().manual_seed(0)
    dcls_convert.apply_plan_(model, plan, init="random", positions="uniform", generator=generator)
    image = torch.rand(1, *size, generator=torch.Generator().manual_seed(1))
    converted = outputs(model, image)
    with tempfile.TemporaryDirectory() as folder:
        dcls_convert.save_converted(model, plan, f"{folder}/model")
        reloaded = dcls_convert.load_converted(f"{folder}/model").eval()
    reload_difference = largest_difference(outputs(reloaded, image), converted)
    folded = dcls_convert.fold_to_dense_(model)
    fold_error = largest_difference(outputs(model, image), converted) / largest(converted)
    is_right = fold_error <= MAX_FOLD_ERROR and reload_difference == 0
    module = type(meta_model).__module__
    return {
        "status": "done" if is_right else "failed",
        "family": module.removeprefix("torchvision.models.").rpartition("timm.models.")[2],
        "params": params,
        "layers": folded,
        "rules": plan.rules,
        "input_size": list(size),
        "fold_error": fold_error,
        "reload_difference": reload_difference,
    }


def perturb_zeros_(model: nn.Module) -> None:
    """Add noise to parameters that start at or near 0, which would hide what they multiply."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and parameter.abs().max() < 1e-3:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def smallest_input(model: nn.Module, own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest input size that the model runs on, or its own if no smaller one works."""
    for side in SIDES:
        if side >= own[-1]:
            break
        size = (*own[:-2], side, side)
        # The model's own code may raise anything for a size that it is not made for.
        with contextlib.suppress(Exception):
            if largest(outputs(model, torch.rand(1, *size))) > 0:
                return size
    return own


def outputs(model: nn.Module, image: Tensor) -> list[Tensor]:
    """Return all floating-point tensors in the model's output.

    If it has no numbers, as of a detector that finds nothing, return those of its children.
    """
    child_outputs: list[Any] = []
    handles = [
        child.register_forward_hook(lambda _, __, output: child_outputs.append(output))
        for child in model.children()
    ]
    try:
        if ".detection." in type(model).__module__:
            result = model([image[0]])
        elif ".optical_flow." in type(model).__module__:
            result = model(image, image.flip(-1))
        else:
            result = model(image)
    finally:
        for handle in handles:
            handle.remove()
    tensors = _floats(result)
    if sum(tensor.numel() for tensor in tensors) == 0:
        tensors = _floats(child_outputs)
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ArithmeticError("outputs are not finite")
    return tensors


def _floats(tree: Any) -> list[Tensor]:
    return [
        leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def largest(tensors: list[Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors if tensor.numel())


def largest_difference(tensors: list[Tensor], others: list[Tensor]) -> float:
    pairs = list(zip(tensors, others, strict=True))
    if any(first.shape != second.shape for first, second in pairs):
        return math.inf
    return max(float((first - second).abs().max()) for first, second in pairs if first.numel())


def table(rows: list[Row]) -> str:
    """Return Markdown with a line for each family."""
    families: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["status"] == "done":
            families[f"{row['name'].partition(':')[0]} {row['family']}"].append(row)
    lines = []
    for family, members in sorted(families.items()):
        lines.append(
            [
                family,
                str(len(members)),
                str(sum(row["layers"] for row in members)),
                f"{max(row['fold_error'] for row in members):.1e}",
                f"{max(row['reload_difference'] for row in members):g}",
            ]
        )
    header = ["family", "models", "layers", "worst fold error", "worst reload difference"]
    return markdown_table(header, lines, align_right=False)


def document(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a page that shows the stored results."""
    summary = result["summary"]
    yield "# Deep sweep"
    yield ""
    yield (
        "Models that have convolutions to replace and at most 60 million parameters, converted, "
        "saved, reloaded and"
    )
    yield (
        "folded for real; fold errors are relative to the largest output. "
        "A printout of `deep_sweep.py --table`."
    )
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"`{result['command']}`, {result['date']}, {machine_of(result)}, {versions}"
    yield ""
    yield (
        f"**{summary['done']} models tried, {summary['failed']} failed; worst fold error "
        f"{summary['worst fold error']:.1e}, "
        f"worst reload difference {summary['worst reload difference']:g}.** "
        f"Not run: {summary['nothing matches']} in which nothing matches, "
        f"{summary['too large']} with more parameters."
    )
    yield ""
    yield table(result["rows"])


def sweep(names: list[str], workers: int) -> list[Row]:
    """Measure all models; return their rows in the order in which they end."""
    rows: list[Row] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=set_up_worker) as pool:
        name_of = {pool.submit(timed_row, name): name for name in names}
        for future in as_completed(name_of):
            error = future.exception()
            if error is None:
                row = future.result()
            else:  # if the process died, so do the rows after it: --failed repeats them
                reason = f"{type(error).__name__}: {error}"
                row = {"name": name_of[future], "status": "failed", "reason": reason}
            rows.append(row)
            if row["status"] not in NOT_RUN:
                print(f"[{len(rows)}/{len(names)}] {json.dumps(row)}", file=sys.stderr, flush=True)
    return rows


def summary_of(rows: list[Row], not_run_before: dict[str, int]) -> dict[str, Any]:
    """Count models by status, and find the worst errors.

    Args:
        rows: All rows, from this sweep and an earlier one.
        not_run_before: Status -> number of models that an earlier sweep did not run.
    """
    counts = Counter(row["status"] for row in rows)
    summary: dict[str, Any] = {"done": counts["done"], "failed": counts["failed"]}
    for status in NOT_RUN:
        summary[status] = not_run_before.get(status, 0) + counts[status]
    done = [row for row in rows if row["status"] == "done"]
    fold_errors = [row["fold_error"] for row in done]
    summary["worst fold error"] = max(fold_errors, default=0.0)
    reload_differences = [row["reload_difference"] for row in done]
    summary["worst reload difference"] = max(reload_differences, default=0.0)
    return summary


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--models", default="", help="only models with this text in their names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--failed", action="store_true", help="only models that failed in the stored results"
    )
    add_results_options_(parser, RESULTS / "deep_sweep.jsonl")
    options = parser.parse_args()
    if options.table:
        print("\n".join(document(stored(options.output))))
        return
    before = stored(options.output) if options.failed else {"rows": [], "summary": {}}
    done_before = [row for row in before["rows"] if row["status"] == "done"]
    failed_before = {row["name"] for row in before["rows"] if row["status"] == "failed"}
    known = registry_names()
    names = [name for name in known if options.models in name]
    if options.failed:
        names = [name for name in names if name in failed_before]
    rows = [*sweep(names, options.workers), *done_before]
    rows.sort(key=lambda row: known.index(row["name"]))
    summary = summary_of(rows, before["summary"])
    command = f"python benchmarks/deep_sweep.py --workers {options.workers}"
    if options.models:
        command += f" --models {options.models}"
    if failed_before:
        command += f", then {', '.join(sorted(failed_before))} again with --failed"
    store(
        options.output,
        command=command,
        settings={"most_params": MAX_PARAMS, "most_fold_error": MAX_FOLD_ERROR},
        rows=[row for row in rows if row["status"] not in NOT_RUN],
        packages=PACKAGES,
        summary=summary,
    )
    print(table(rows))
    print(json.dumps(summary))
    sys.exit(any(row["status"] == "failed" for row in rows))


def set_up_worker() -> None:
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
