"""Time whole converted models: inference, a training step, and the share of kernel construction.

They are compared with the dense original, the folded model, and the authors' package (`dcls` on
PyPI) with the same elements in the same places, whose outputs are compared before anything is
timed. Every model and mode has its own process, in which the implementations take turns. All runs
on the CPU; gpu.py measures GPUs.

    python benchmarks/models.py [--threads 2] [--seconds 20] [--models NAME ...]
    python benchmarks/models.py --table   # prints the stored results
"""

import argparse
import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

IMAGE = (3, 224, 224)
MIN_ROUNDS = 3
MAX_ROUNDS = 30
# Seconds per image. A slower implementation gets no more warm-up, and constructs kernels only once.
SLOW = 2.0
CONSTRUCTION_SECONDS = 3.0  # for the timed constructions of each model
TOLERANCE = 1e-4  # of the largest output
# Numbers that the authors' v0 keeps in memory in training, per element and cell of a window: its
# masks and intermediate products; an estimate.
FLOATS_KEPT = 10
OURS = "ours"
FOLDED = "ours folded"
DENSE = "dense original"
AUTHORS = "authors' package"
OURS_LAST = "ours, channels_last"
FOLDED_LAST = "ours folded, channels_last"
PACKAGES = ("torch", "timm", "dcls-convert", "dcls")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the window of its converted layers."""

    model: str
    window: int
    # Whether the model's own blocks run in channels_last, so that there is nothing to compare.
    channels_last: bool = False


CASES = (
    Case(model="convnext_tiny", window=17, channels_last=True),
    Case(model="resnet50", window=7),
    Case(model="resnet18", window=7),
    Case(model="mobilenetv3_large_100", window=13),
    Case(model="efficientnet_b0", window=13),
)
MODES = {  # batch, and whether it is a training step
    "inference, batch 1": (1, False),
    "inference, batch 8": (8, False),
    "training step, batch 8": (8, True),
}


# One process: all implementations of a model in a mode.


def build(case: Case, version: str, training: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return two dictionaries: name -> model, and name -> reason why a model is missing.

    Parameters that models have in common have the same values.
    """
    import timm
    import torch

    import dcls_convert

    torch.manual_seed(0)
    dense = timm.create_model(case.model)
    ours = copy.deepcopy(dense)
    dcls_convert.convert_(ours, dilated_size=case.window, init="random")
    folded = copy.deepcopy(ours)
    dcls_convert.fold_to_dense_(folded)
    models = {OURS: ours, FOLDED: folded, DENSE: dense}
    notes: dict[str, str] = {}
    if not case.channels_last:
        models[OURS_LAST] = copy.deepcopy(ours).to(memory_format=torch.channels_last)
        models[FOLDED_LAST] = copy.deepcopy(folded).to(memory_format=torch.channels_last)
    try:
        models[AUTHORS] = with_authors_layers(ours, version, training)
    except (ImportError, NotImplementedError) as reason:
        notes[AUTHORS] = str(reason)
    return models, notes


def with_authors_layers(converted: Any, version: str, training: bool) -> Any:
    """Return a copy in which every DCLS layer is one of the authors'; tied layers share their P.

    Raises:
        NotImplementedError: The authors' layers cannot do this, or not in this machine's memory.
    """
    from torch import nn

    from dcls_convert.layers.dcls_conv import DclsConvNd

    model = copy.deepcopy(converted)
    layers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, DclsConvNd):
            check_authors_can(name, layer)
            layers[name] = layer
    check_memory(list(layers.values()), training)
    logging.disable(logging.WARNING)  # the authors' package warns of a missing CUDA extension
    shared: dict[int, nn.Parameter] = {}  # id of our positions -> their P
    for name, layer in layers.items():
        theirs = authors_layer(layer, version)
        positions = layer.positions
        if id(positions) not in shared:
            shared[id(positions)] = authors_positions(positions, version)
        theirs.P = shared[id(positions)]
        model.set_submodule(name, theirs)
    return model


def check_authors_can(name: str, layer: Any) -> None:
    """Raise NotImplementedError if the authors' package has no layer like this one."""
    from dcls_convert.layers.dcls_conv import DclsConv2d

    is_square = isinstance(layer, DclsConv2d) and len(set(layer.dilated_kernel_size)) == 1
    if not is_square or layer.dense_axes:
        raise NotImplementedError(f"{name}: theirs is right for square windows only")
    if (
        isinstance(layer.padding, str)
        or layer.dilation != (1, 1)
        or layer.interpolation != "bilinear"
    ):
        raise NotImplementedError(
            f"{name}: theirs has no padding={layer.padding!r}, dilation={layer.dilation}"
        )


def check_memory(layers: Sequence[Any], training: bool) -> None:
    """Raise NotImplementedError if the authors' construction does not fit into memory."""
    needed_by_layer = []
    for layer in layers:
        window_cells = math.prod(layer.dilated_kernel_size)
        needed_by_layer.append(4 * FLOATS_KEPT * layer.weight.numel() * window_cells)
    needed = sum(needed_by_layer) if training else max(needed_by_layer)
    if needed > 0.7 * available_bytes():
        raise NotImplementedError(f"not run: its construction keeps about {needed / 2**30:.0f} GiB")


def authors_layer(layer: Any, version: str) -> Any:
    """Return an authors' layer like ours, with the same weight and bias, but new positions."""
    import DCLS.construct.modules as authors

    theirs = authors.Dcls2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_count,
        stride=layer.stride,
        padding=layer.padding,
        dilated_kernel_size=layer.dilated_kernel_size,
        groups=layer.groups,
        bias=layer.bias is not None,
        padding_mode=layer.padding_mode,
        version=version,
    )
    theirs.weight = layer.weight
    theirs.bias = layer.bias
    return theirs


def authors_positions(positions: Any, version: str) -> Any:
    """Return our positions in the authors' order of axes: v0 (row, column), v1 the reverse."""
    from torch import nn

    in_their_order = positions.detach() if version == "v0" else positions.detach().flip(0)
    return nn.Parameter(in_their_order.clone())


def available_bytes() -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return int(text.partition("MemAvailable:")[2].split()[0]) * 1024


def worker(case: Case, mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one model in one mode in this process; return the rows."""
    import torch

    torch.set_num_threads(options.threads)
    batch, training = MODES[mode]
    models, notes = build(case, options.version, training)
    images = torch.randn(batch, *IMAGE, generator=torch.Generator().manual_seed(1))
    differing, slow = first_run(models, images[:1])
    notes |= differing
    for name in notes:
        models.pop(name, None)
    run = {name: runner(name, model, images, training) for name, model in models.items()}
    times = interleaved(run, options.seconds, already_warm=slow)
    rows = [
        {
            "model": case.model,
            "window": case.window,
            "mode": mode,
            "implementation": name,
            "seconds": measuring.summary(own_times),
            "over_ours": measuring.summary(
                [own / ours for own, ours in zip(own_times, times[OURS], strict=True)]
            ),
        }
        for name, own_times in times.items()
    ]
    if mode == "inference, batch 8":
        for row in rows:
            if row["implementation"] in (OURS, AUTHORS):
                seconds = construction_seconds(
                    models[row["implementation"]], once=row["implementation"] in slow
                )
                row["construction_seconds"] = measuring.summary(seconds)
    rows += [
        {
            "model": case.model,
            "window": case.window,
            "mode": mode,
            "implementation": name,
            "note": note,
        }
        for name, note in notes.items()
    ]
    return rows


def first_run(models: dict[str, Any], images: Any) -> tuple[dict[str, str], set[str]]:
    """Return which outputs differ from ours, though they should not, and what is slow."""
    import torch

    differing: dict[str, str] = {}
    slow: set[str] = set()
    outputs: dict[str, Any] = {}
    with torch.inference_mode():
        for name, model in models.items():
            begun = time.perf_counter()
            outputs[name] = model.eval()(images)
            if time.perf_counter() - begun > SLOW:
                slow.add(name)
    expected = outputs[OURS]
    for name in models.keys() - {OURS, DENSE}:
        error = ((outputs[name] - expected).abs().max() / expected.abs().max()).item()
        if not error <= TOLERANCE:
            differing[name] = f"not timed: outputs differ by {error:.1e} of the largest"
    return differing, slow


def runner(name: str, model: Any, images: Any, training: bool) -> Callable[[], None]:
    import torch

    if "channels_last" in name:
        images = images.to(memory_format=torch.channels_last)
    classes = torch.arange(len(images))
    if not training:
        model.eval()

        def infer() -> None:
            with torch.inference_mode():
                model(images)

        return infer
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()

    return step


def interleaved(
    run: dict[str, Callable[[], None]],
    seconds: float,
    *,
    already_warm: Iterable[str] = (),
) -> dict[str, list[float]]:
    """Time functions in rounds in which each runs once; return the seconds of each function.

    As many rounds are run as fit into `seconds`. Functions that are not already warm first run once
    untimed.
    """
    for name in run.keys() - set(already_warm):
        run[name]()
    times: dict[str, list[float]] = {name: [] for name in run}
    end = time.perf_counter() + seconds
    names = list(run)
    for count in range(MAX_ROUNDS):
        if count >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name in names[count % len(names) :] + names[: count % len(names)]:
            times[name].append(seconds_of(run[name]))
    return times


def seconds_of(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def construction_seconds(model: Any, *, once: bool) -> list[float]:
    """Time the construction of the kernels of all layers, once or as often as fits."""
    import torch

    from dcls_convert.layers.dcls_conv import DclsConvNd

    ours = [layer.kernel for layer in model.modules() if isinstance(layer, DclsConvNd)]
    theirs = [
        lambda layer=layer: layer.DCK(layer.weight, layer.P, layer.SIG)
        for layer in model.modules()
        if hasattr(layer, "DCK")
    ]

    def all_kernels() -> None:
        with torch.inference_mode():
            for construct in ours + theirs:
                construct()

    if once:
        return [seconds_of(all_kernels)]
    return interleaved({"kernels": all_kernels}, CONSTRUCTION_SECONDS)["kernels"]


# The table.


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    rows_of: dict[str, dict[str, dict[str, Any]]] = {}  # model and mode -> implementation -> row
    for row in rows:
        title = f"{row['model']} ({row['window']}), {row['mode']}"
        rows_of.setdefault(title, {})[row["implementation"]] = row
    others = (AUTHORS, DENSE, FOLDED, OURS_LAST, FOLDED_LAST)
    times = []
    shares = []
    for title, row_of in rows_of.items():
        times.append([title, *(timed(row_of.get(name)) for name in (OURS, *others))])
        of_construction = [construction_share(row_of.get(name)) for name in (OURS, AUTHORS)]
        if any(of_construction):
            shares.append([title, *of_construction])
    yield (
        "Of ours, ms (quartiles); of the others, "
        "how many times as long as ours in the same round (quartiles)"
    )
    yield ""
    yield measuring.markdown_table(["", OURS, *others], times)
    if shares:
        yield ""
        yield "Construction in that forward, ms and % of it"
        yield ""
        yield measuring.markdown_table(["", OURS, AUTHORS], shares)


def timed(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "note" in row:
        return str(row["note"])
    if row["implementation"] == OURS:
        return measuring.quartiles_text(row["seconds"], ".1f", scale=1e3)
    return measuring.quartiles_text(row["over_ours"], ".2f")


def construction_share(row: dict[str, Any] | None) -> str:
    if row is None or "construction_seconds" not in row:
        return ""
    seconds = row["construction_seconds"]["median"]
    return f"{1e3 * seconds:.2f}, {100 * seconds / row['seconds']['median']:.1f} %"


def main() -> None:
    parser = measuring.script_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="time for the rounds of a model in a mode"
    )
    parser.add_argument(
        "--version", choices=["v0", "v1"], default="v0", help="version of the authors' layers"
    )
    parser.add_argument("--models", nargs="+", choices=[case.model for case in CASES])
    parser.add_argument("--modes", nargs="+", choices=list(MODES))
    measuring.add_results_options_(parser, measuring.RESULTS / "models.jsonl")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # "model|mode"
    options = parser.parse_args()
    if options.worker:
        model, _, mode = options.worker.partition("|")
        case = next(case for case in CASES if case.model == model)
        print(json.dumps(worker(case, mode, options)))
        return
    if not options.table:
        measure(options)
    print("\n".join(table(measuring.stored(options.output)["rows"])))


def measure(options: argparse.Namespace) -> None:
    """Measure every model and mode in a process of its own.

    Rows of an earlier run with the same settings are kept.
    """
    settings = {
        "threads": options.threads,
        "seconds": options.seconds,
        "version": options.version,
        "image": IMAGE,
    }
    shared = [
        "--threads",
        str(options.threads),
        "--seconds",
        str(options.seconds),
        "--version",
        options.version,
    ]
    results = measuring.Results(
        path=options.output,
        command=" ".join(["python benchmarks/models.py", *shared]),
        settings=settings,
        rows=measuring.stored_rows(options.output, settings=settings),
        packages=PACKAGES,
    )
    done = {(row["model"], row["mode"]) for row in results.rows}
    for case, mode in jobs(options):
        if (case.model, mode) in done:
            continue
        environment = {
            "OMP_NUM_THREADS": str(options.threads),
            "MKL_NUM_THREADS": str(options.threads),
        }
        arguments = [__file__, "--worker", f"{case.model}|{mode}", *shared]
        try:
            rows = measuring.json_of_fresh(arguments, env=environment)
        except measuring.FreshProcessError as error:
            failed = {"model": case.model, "window": case.window, "mode": mode}
            rows = [failed | {"implementation": OURS, "note": str(error).splitlines()[-1]}]
        for row in rows:
            results.add_(row)


def jobs(options: argparse.Namespace) -> list[tuple[Case, str]]:
    """Return the cases and modes that were asked for."""
    chosen = []
    for case in CASES:
        for mode in MODES:
            if case.model in (options.models or [case.model]) and mode in (options.modes or MODES):
                chosen.append((case, mode))
    return chosen


if __name__ == "__main__":
    main()
