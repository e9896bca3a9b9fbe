"""Time of whole converted models: inference, a training step, and the share of construction.

Beside them: the dense original, the folded model, and the authors' package (`dcls` on PyPI) with
the same elements in the same places, whose outputs are compared before anything is timed. One
process for every model and mode, in which the implementations take turns. On CUDA also throughput
beside the dense original, as the paper states it.

    python benchmarks/models.py [--threads 2] [--seconds 20] [--models NAME ...]
    python benchmarks/models.py --table   # prints what is stored
"""

import argparse
import copy
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

IMAGE = (3, 224, 224)
MIN_ROUNDS, MAX_ROUNDS = 3, 30
SLOW = 2.0  # seconds of one image; such an implementation is not warmed again, and constructs once
TOLERANCE = 1e-4  # of the largest output
FLOATS_KEPT = 10  # by the authors' v0 in training, for every element and cell of its window; about
OURS, FOLDED, DENSE, AUTHORS = "ours", "ours folded", "dense original", "authors' package"
OURS_LAST, FOLDED_LAST = "ours, channels_last", "ours folded, channels_last"
PAPER_RATIOS = {
    "convnext_tiny": 0.936,
    "convnext_small": 0.969,
    "convnext_base": 0.977,
}  # table 1, throughput
CUDA_BATCH = 128
PACKAGES = ("torch", "timm", "dcls-convert", "dcls")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the window of its converted layers."""

    model: str
    window: int
    # Whether the model's own blocks run in it, so that there is nothing to compare.
    channels_last: bool = False


CASES = (
    Case(model="convnext_tiny", window=17, channels_last=True),
    Case(model="resnet50", window=7),
    Case(model="resnet18", window=7),
    Case(model="mobilenetv3_large_100", window=13),
    Case(model="efficientnet_b0", window=13),
)
MODES = {
    "inference, batch 1": (1, False),
    "inference, batch 8": (8, False),
    "training step, batch 8": (8, True),
}


# One process: all implementations of a model in a mode.


def build(case: Case, version: str, training: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """name -> model, and name -> why there is none.

    They have the same parameters, so far as they have the same.
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
    """A copy in which every DCLS layer is one of theirs; layers that are tied share their P, as the
    authors' do.

    Raises:
        NotImplementedError: There is something that theirs cannot do, or not in this machine's
        memory.
    """
    import DCLS.construct.modules as authors
    from torch import nn

    from dcls_convert.layers.dcls_conv import DclsConv2d, DclsConvNd

    model = copy.deepcopy(converted)
    layers = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, DclsConvNd)
    ]
    bytes_of = [
        4 * FLOATS_KEPT * layer.weight.numel() * layer.dilated_kernel_size[0] ** 2
        for _, layer in layers
    ]
    needed = sum(bytes_of) if training else max(bytes_of)
    if needed > 0.7 * available_bytes():
        raise NotImplementedError(f"not run: its construction keeps about {needed / 2**30:.0f} GiB")
    shared: dict[int, nn.Parameter] = {}
    logging.disable(logging.WARNING)  # of a CUDA extension that is not there
    for name, layer in layers:
        if (
            not isinstance(layer, DclsConv2d)
            or len(set(layer.dilated_kernel_size)) > 1
            or layer.dense_axes
        ):
            raise NotImplementedError(f"{name}: theirs is right for square windows only")
        if (
            isinstance(layer.padding, str)
            or layer.dilation != (1, 1)
            or layer.interpolation != "bilinear"
        ):
            raise NotImplementedError(
                f"{name}: theirs has no padding={layer.padding!r}, dilation={layer.dilation}"
            )
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
        theirs.weight, theirs.bias = layer.weight, layer.bias
        places = layer.positions
        order = (0, 1) if version == "v0" else (1, 0)  # theirs: v0 (row, column), v1 the reverse
        theirs.P = shared.setdefault(id(places), nn.Parameter(places.detach()[list(order)].clone()))
        model.set_submodule(name, theirs)
    leftover = [name for name, _ in model.named_parameters() if "positions" in name]
    for name in leftover:
        owner, _, entry = name.rpartition(".")
        delattr(model.get_submodule(owner), entry)
    return model


def available_bytes() -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return int(text.partition("MemAvailable:")[2].split()[0]) * 1024


def worker(case: Case, mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
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
    times = interleaved(run, options.seconds, warm=slow)
    rows = [
        {
            "model": case.model,
            "window": case.window,
            "mode": mode,
            "implementation": name,
            "seconds": measuring.summary(found),
            "over_ours": measuring.summary(
                [a / b for a, b in zip(found, times[OURS], strict=True)]
            ),
        }
        for name, found in times.items()
    ]
    if mode == "inference, batch 8":
        for row in rows:
            if row["implementation"] in (OURS, AUTHORS):
                share = construction(
                    models[row["implementation"]], once=row["implementation"] in slow
                )
                row["construction_seconds"] = measuring.summary(share)
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
    """What does not give our outputs, though it should, and why; and what is slow."""
    import torch

    differing, slow, outputs = {}, set(), {}
    with torch.inference_mode():
        for name, model in models.items():
            begun = time.perf_counter()
            outputs[name] = model.eval()(images)
            if time.perf_counter() - begun > SLOW:
                slow.add(name)
    wanted = outputs[OURS]
    for name in models.keys() - {OURS, DENSE}:
        error = ((outputs[name] - wanted).abs().max() / wanted.abs().max()).item()
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
    warm: Iterable[str] = (),
    least: int = MIN_ROUNDS,
) -> dict[str, list[float]]:
    """Rounds in which each takes one turn, after one for warmth of those that are not warm.

    As many as fit.
    """
    for name in run.keys() - set(warm):
        run[name]()
    times: dict[str, list[float]] = {name: [] for name in run}
    end = time.perf_counter() + seconds
    names = list(run)
    for count in range(MAX_ROUNDS):
        if count >= least and time.perf_counter() > end:
            break
        for name in names[count % len(names) :] + names[: count % len(names)]:
            begun = time.perf_counter()
            run[name]()
            times[name].append(time.perf_counter() - begun)
    return times


def construction(model: Any, *, once: bool) -> list[float]:
    """Seconds to construct the kernels of all layers once, repeatedly."""
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

    return interleaved({"": all_kernels}, 0 if once else 3, warm=[""] if once else [], least=1)[""]


# CUDA.


def cuda_rows(name: str, seconds: float) -> list[dict[str, Any]]:
    """Images per second at batch 128 in bfloat16 and channels_last, eager and compiled."""
    import torch

    models, _ = build(Case(model=name, window=17, channels_last=True), "v0", training=False)
    models.pop(AUTHORS, None)
    images = torch.randn(CUDA_BATCH, *IMAGE, device="cuda", dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)
    rows = []
    for compiled in (False, True):
        torch.compiler.reset()
        run = {}
        for kind, model in models.items():
            placed = model.eval().to("cuda", torch.bfloat16, memory_format=torch.channels_last)
            run[kind] = synchronized(torch.compile(placed) if compiled else placed, images)
        times = interleaved(run, seconds)
        for kind, found in times.items():
            ratios = [dense / own for dense, own in zip(times[DENSE], found, strict=True)]
            rows.append(
                {
                    "model": name,
                    "mode": f"CUDA, batch {CUDA_BATCH}, {'compiled' if compiled else 'eager'}",
                    "implementation": kind,
                    "images_per_second": measuring.summary([CUDA_BATCH / one for one in found]),
                    "of_dense": measuring.summary(ratios),
                }
            )
    return rows


def synchronized(model: Any, images: Any) -> Callable[[], None]:
    import torch

    def run() -> None:
        with torch.inference_mode():
            model(images)
        torch.cuda.synchronize()

    return run


def has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


# The table.


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    rows = list(rows)
    found: dict[str, dict[str, dict[str, Any]]] = {}  # model and mode -> implementation -> row
    for row in rows:
        if "images_per_second" not in row:
            title = f"{row['model']} ({row['window']}), {row['mode']}"
            found.setdefault(title, {})[row["implementation"]] = row
    others = (AUTHORS, DENSE, FOLDED, OURS_LAST, FOLDED_LAST)
    lines = [
        [title, *(timed(of.get(name), name) for name in (OURS, *others))]
        for title, of in found.items()
    ]
    yield (
        "Of ours, ms (quartiles); of the others, "
        "how many times as long as ours in the same round (quartiles)"
    )
    yield ""
    yield measuring.markdown_table(["", OURS, *others], lines)
    shares = [
        [title, *(share(of.get(name)) for name in (OURS, AUTHORS))] for title, of in found.items()
    ]
    if shares := [line for line in shares if any(line[1:])]:
        yield ""
        yield "Construction in that forward, ms and % of it"
        yield ""
        yield measuring.markdown_table(["", OURS, AUTHORS], shares)
    on_cuda = [row for row in rows if "images_per_second" in row]
    if on_cuda:
        yield ""
        header = ["CUDA", "images/s", "of dense (quartiles)", "the paper's"]
        yield measuring.markdown_table(header, [throughput(row) for row in on_cuda])


def timed(row: dict[str, Any] | None, name: str) -> str:
    if row is None or "note" in row:
        return "" if row is None else row["note"]
    if name != OURS:
        return spread(row["over_ours"], 2)
    return spread({key: 1e3 * value for key, value in row["seconds"].items()}, 1)


def spread(found: dict[str, float], digits: int) -> str:
    low, middle, high = (
        f"{found[key]:.{digits}f}" for key in ("first_quartile", "median", "third_quartile")
    )
    return f"{middle} ({low} to {high})"


def share(row: dict[str, Any] | None) -> str:
    if row is None or "construction_seconds" not in row:
        return ""
    seconds = row["construction_seconds"]["median"]
    return f"{1e3 * seconds:.2f}, {100 * seconds / row['seconds']['median']:.1f} %"


def throughput(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['model']}, {row['mode']}: {row['implementation']}",
        f"{row['images_per_second']['median']:.0f}",
        spread(row["of_dense"], 3),
        f"{PAPER_RATIOS[row['model']]}" if row["implementation"] == OURS else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for the rounds of a model in a mode"
    )
    parser.add_argument(
        "--version", choices=["v0", "v1"], default="v0", help="of the authors' layers"
    )
    parser.add_argument("--models", nargs="+", choices=[case.model for case in CASES])
    parser.add_argument("--modes", nargs="+", choices=list(MODES))
    parser.add_argument("--output", type=Path, default=measuring.RESULTS / "models.json")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the tables of the stored results, measure nothing",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # "model|mode"
    options = parser.parse_args()
    if options.worker:
        model, _, mode = options.worker.partition("|")
        if mode == "cuda":
            print(json.dumps(cuda_rows(model, options.seconds)))
        else:
            print(
                json.dumps(
                    worker(next(case for case in CASES if case.model == model), mode, options)
                )
            )
        return
    if not options.table:
        measure(options)
    print("\n".join(table(json.loads(options.output.read_text(encoding="utf-8"))["rows"])))


def measure(options: argparse.Namespace) -> None:
    """Every model and mode in a process of its own.

    What an earlier run with the same settings has, is kept.
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
    rows = measuring.stored_rows(options.output, settings=settings)
    jobs = [
        (case.model, mode)
        for case in CASES
        for mode in MODES
        if (not options.models or case.model in options.models)
        and (not options.modes or mode in options.modes)
    ]
    if not options.models and has_cuda():
        jobs += [(model, "cuda") for model in PAPER_RATIOS]
    elif not options.models:
        print("CUDA is not available: throughput beside the paper's is skipped", file=sys.stderr)
    for model, mode in jobs:
        if any(row["model"] == model and row["mode"].lower().startswith(mode) for row in rows):
            continue
        environment = {
            "OMP_NUM_THREADS": str(options.threads),
            "MKL_NUM_THREADS": str(options.threads),
        }
        try:
            found, *_ = measuring.fresh_process(
                __file__, "--worker", f"{model}|{mode}", *shared, env=environment
            )
        except measuring.FreshProcessError as error:
            found = [
                {
                    "model": model,
                    "mode": mode,
                    "implementation": OURS,
                    "note": str(error).splitlines()[-1],
                }
            ]
        rows += found
        for row in found:
            print(json.dumps(row), file=sys.stderr, flush=True)
        command = " ".join(["python benchmarks/models.py", *shared])
        measuring.store(
            options.output, command=command, settings=settings, rows=rows, packages=PACKAGES
        )


if __name__ == "__main__":
    main()
