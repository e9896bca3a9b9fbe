"""Converted layers and models on a GPU, in every way that they can be computed, beside the dense original.

    python benchmarks/gpu.py [--models NAME ...] [--batches 128 1] [--compile] [--write-table]; --table prints again

For ConvNeXt-T and -B (window 17) and ResNet-50 (7), in bfloat16 autocast:

- each kind of converted layer alone: milliseconds of one forward pass, of the input's and of the kernel's gradient, and
  of the construction forward and backward;
- the model: images per second, inference and training step, and the most memory that either takes.

All ways take turns. The roofline is that of the products on tensor cores, or of the memory where that is slower.
--write-table stores the depthwise layers' times where the program looks for them when it chooses between torch's
convolution and Triton's kernel (dcls_convert/depthwise/measured.json). Without a GPU, it runs with batch 1 on the CPU.
"""

import argparse
import contextlib
import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcls_convert.depthwise.choice import conv2d, depthwise_way
from dcls_convert.depthwise.measured import TABLE, VARIABLE
from dcls_convert.layers.dcls_conv import DclsConv2d

DTYPE = torch.bfloat16
WINDOWS = {"convnext_tiny": 17, "convnext_base": 17, "resnet50": 7}
PARTS = ("forward", "input's gradient", "kernel's gradient")
LEAST_ROUNDS, CALLS = 5, 10  # of a way on a GPU; a round is so many calls, whose end alone is waited for
# Bytes and FLOPs (tensor cores, bfloat16) in a second that were seen on such a GPU, below what its maker states.
ROOFS = {"H200": (4.3e12, 790e12), "H100": (3.0e12, 790e12), "A100": (1.7e12, 270e12)}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute a layer."""

    name: str
    kind: str = "ours"  # or "dense" original, or "authors'" package
    depthwise: str = "torch"  # DCLS_CONVERT_DEPTHWISE
    channels_last: bool = False
    cudnn: bool = False  # cuDNN's kernels, where torch would take its own

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = self.depthwise
        settings: Any = {"enabled": True, "depthwise_kernel": "cudnn"}
        try:
            with torch.backends.cudnn.flags(**settings) if self.cudnn else contextlib.nullcontext():
                yield
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before

    def placed(self, value: Any) -> Any:
        """A tensor or a module in the way's memory format."""
        return value.to(memory_format=torch.channels_last) if self.channels_last else value


WAYS = (
    Way(name="dense original", kind="dense"),
    Way(name="dense original, channels_last", kind="dense", channels_last=True),
    Way(name="torch"),
    Way(name="torch, channels_last", channels_last=True),
    Way(name="torch, cuDNN", cudnn=True),
    Way(name="triton", depthwise="triton"),
    Way(name="triton, channels_last", depthwise="triton", channels_last=True),
    Way(name="authors' package", kind="authors'"),
)


class Machine:
    """Where everything runs, and how it is timed."""

    def __init__(self, seconds: float) -> None:
        self.gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.gpu else "cpu")
        self.seconds = seconds

    @property
    def roof(self) -> tuple[float, float] | None:
        name = torch.cuda.get_device_name() if self.gpu else ""
        return next((roof for part, roof in ROOFS.items() if part in name), None)

    def milliseconds(self, run: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        """Of one call; all take turns, after one round for warmth."""
        calls = CALLS if self.gpu else 1
        times: dict[str, list[float]] = {name: [] for name in run}
        end = time.perf_counter() + self.seconds
        for count in itertools.count():
            if count > LEAST_ROUNDS * self.gpu + 1 and time.perf_counter() > end:
                break
            for name, call in run.items():
                self.wait()
                begun = time.perf_counter()
                for _ in range(calls):
                    call()
                self.wait()
                times[name] += [1e3 * (time.perf_counter() - begun) / calls] * (count > 0)
        return {name: measuring.summary(found) for name, found in times.items()}

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def lacks(self, way: Way) -> str | None:
        """Why this way cannot be measured here."""
        return None if self.gpu or (way.depthwise == "torch" and not way.cudnn) else "needs a GPU"

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        if not self.gpu:
            return None
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() / measuring.MIB


# Models.


def built(name: str) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """kind of `Way` -> model, the authors' with our elements; and kind -> why there is none."""
    kinds = {models.OURS: "ours", models.DENSE: "dense", models.AUTHORS: "authors'"}
    found, notes = models.build(models.Case(model=name, window=WINDOWS[name]), "v0", training=False)
    return {kind: found[key] for key, kind in kinds.items() if key in found}, {kinds[key]: notes[key] for key in notes}


def model_rows(name: str, batch: int, machine: Machine, *, compiled: bool) -> Iterator[dict[str, Any]]:
    about = {"model": name, "batch": batch}
    kinds, notes = built(name)
    images = torch.randn(batch, *models.IMAGE, device=machine.device)
    runs: dict[str, dict[str, Callable[[], object]]] = {"inference": {}, "training step": {}}
    for way in WAYS:
        if reason := notes.get(way.kind) or machine.lacks(way):
            yield about | {"way": way.name, "note": reason}
            continue
        model = way.placed(copy.deepcopy(kinds[way.kind]).to(machine.device))
        for mode, run in zip(runs, model_runs(model, way, images, compiled), strict=True):
            runs[mode][way.name] = run
    peaks = {mode: {way: machine.peak_mib(call) for way, call in run.items()} for mode, run in runs.items()}
    found = {mode: machine.milliseconds(run) for mode, run in runs.items()}
    for way_name in runs["inference"]:
        of = {mode: {"ms": found[mode][way_name], "peak_mib": peaks[mode][way_name]} for mode in runs}
        yield about | {"way": way_name} | of


def model_runs(model: nn.Module, way: Way, images: Tensor, compiled: bool) -> Iterator[Callable[[], object]]:
    """Inference, and a training step."""
    run, images = torch.compile(model) if compiled else model, way.placed(images)
    classes = torch.arange(len(images), device=images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def infer() -> None:
        model.eval()
        with way.chosen(), torch.inference_mode(), torch.autocast(images.device.type, DTYPE):
            run(images)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        with way.chosen():
            with torch.autocast(images.device.type, DTYPE):
                loss = F.cross_entropy(run(images), classes)
            loss.backward()
        optimizer.step()

    yield infer
    yield step


# Layers alone.


@dataclass(frozen=True, kw_only=True)
class Site:
    """A kind of converted layer, and how often the model has it."""

    layers: tuple[DclsConv2d, ...]
    original: nn.Conv2d
    authors: nn.Module | None
    maps: tuple[int, int, int]  # channels, rows and columns that it gets

    @property
    def depthwise(self) -> bool:
        return self.original.groups == self.original.in_channels


def sites(kinds: dict[str, nn.Module]) -> list[Site]:
    """The kinds of converted layers, in order; layers are of one kind if they and their maps have the same sizes."""
    found: dict[Any, list[tuple[str, DclsConv2d]]] = {}
    handles = []
    for name, layer in kinds["ours"].named_modules():
        if isinstance(layer, DclsConv2d):

            def note(layer: DclsConv2d, inputs: tuple[Tensor], _: Tensor, name: str = name) -> None:
                key = tuple(inputs[0].shape[1:]), layer.weight.shape, layer.stride
                found.setdefault(key, []).append((name, layer))

            handles.append(layer.register_forward_hook(note))
    with torch.inference_mode():
        kinds["ours"].eval()(torch.zeros(1, *models.IMAGE))
    for handle in handles:
        handle.remove()
    return [
        Site(
            layers=tuple(layer for _, layer in members),
            original=kinds["dense"].get_submodule(members[0][0]),
            authors=kinds["authors'"].get_submodule(members[0][0]) if "authors'" in kinds else None,
            maps=key[0],
        )
        for key, members in found.items()
    ]


def layer_rows(name: str, batch: int, machine: Machine) -> Iterator[dict[str, Any]]:
    kinds, notes = built(name)
    for site in sites(kinds):
        about = {"model": name, "batch": batch, "map": site.maps, "layers": len(site.layers)}
        about |= {"window": site.layers[0].dilated_kernel_size, "roofline_ms": roofline(site, batch, machine)}
        runs: dict[str, dict[str, Callable[[], object]]] = {part: {} for part in PARTS}
        for way in WAYS:
            if reason := notes.get(way.kind) or machine.lacks(way) or unlike(way, site, batch, machine):
                yield about | {"way": way.name, "note": reason}
                continue
            for part, call in zip(PARTS, layer_runs(site, way, machine, batch), strict=True):
                runs[part][way.name] = call
        found = {part: machine.milliseconds(run) for part, run in runs.items()}
        for way in WAYS:
            if way.name in runs["forward"]:
                kept = {"kind": way.kind, "choice": way.depthwise, "channels_last": way.channels_last}
                yield about | {"way": way.name} | kept | {"ms": {part: found[part][way.name] for part in PARTS}}
        constructing = {"forward": construction(copy.deepcopy(site.layers[0]).to(machine.device))}
        found = machine.milliseconds(constructing)
        yield about | {"way": "construction, forward and backward", "kind": "construction", "ms": found}


def unlike(way: Way, site: Site, batch: int, machine: Machine) -> str | None:
    """Why this layer is not computed in this way."""
    if way.depthwise != "triton":
        return None
    layer = site.layers[0]
    geometry = (layer.kernel().shape, layer.stride, layer.padding, layer.dilation, layer.groups)
    with way.chosen():
        found = depthwise_way(machine.device, DTYPE, way.channels_last, (batch, *site.maps), *geometry)
    return None if found == "triton" else "torch's way is taken"


def layer_runs(site: Site, way: Way, machine: Machine, batch: int) -> Iterator[Callable[[], object]]:
    """The convolution's forward pass and each gradient of it; the authors' layer constructs its kernel, too."""
    images = way.placed(torch.randn(batch, *site.maps, device=machine.device, dtype=DTYPE)).requires_grad_()
    if way.kind == "authors'":
        module = copy.deepcopy(site.authors).to(machine.device)
        convolve, kernel = (lambda: module(images)), module.weight
    else:
        source = site.original if way.kind == "dense" else site.layers[0]
        weight = source.weight if way.kind == "dense" else source.kernel()
        kernel = way.placed(weight.detach().to(machine.device, DTYPE)).requires_grad_()
        function = F.conv2d if way.kind == "dense" else conv2d
        geometry = (source.stride, source.padding, source.dilation, source.groups)
        convolve = lambda: function(images, kernel, None, *geometry)  # noqa: E731

    def forward() -> Tensor:
        with way.chosen(), torch.autocast(machine.device.type, DTYPE):
            return convolve()

    output = forward()
    grad = torch.randn_like(output)

    def gradient(of: Tensor) -> Callable[[], object]:
        def backward() -> None:
            with way.chosen():
                torch.autograd.grad(output, of, grad, retain_graph=True)

        return backward

    yield torch.no_grad()(forward)
    yield gradient(images)
    yield gradient(kernel)


def construction(layer: DclsConv2d) -> Callable[[], object]:
    wanted = [parameter for name, parameter in layer.named_parameters() if name != "bias"]
    grad = torch.randn_like(layer.kernel())
    return lambda: torch.autograd.grad(layer.kernel(), wanted, grad)


def roofline(site: Site, batch: int, machine: Machine) -> float | None:
    """Milliseconds of a forward pass of a depthwise layer; see `products` in the text above."""
    roof, layer = machine.roof, site.layers[0]
    if roof is None or not site.depthwise:
        return None
    channels, rows, columns = site.maps
    cells = batch * channels * rows * columns
    tile = 16 if columns >= 14 else 8  # columns of outputs that share a product
    height, width = layer.dilated_kernel_size
    products = cells / columns * -(-columns // tile) * tile * height * (tile + width - 1)
    return 1e3 * max(2 * 2 * cells / roof[0], 2 * products / roof[1])


# Results.


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    layers = [row for row in rows if "map" in row]
    header = ["layer", "way", *(f"{part}, ms" for part in PARTS), "roofline, forward"]
    yield measuring.markdown_table(header, [layer_line(row) for row in layers])
    sums: dict[str, float] = {}  # what all converted layers of a model take
    for row in layers:
        if row.get("kind", "construction") != "construction":
            of = f"{row['model']}, batch {row['batch']}, {row['way']}"
            sums[of] = sums.get(of, 0.0) + row["layers"] * row["ms"]["forward"]["median"]
    yield measuring.markdown_table(
        ["all converted layers", "forward, ms"], [[of, f"{ms:.2f}"] for of, ms in sums.items()]
    )
    header = ["model", "way", "inference, images/s", "MiB", "training, images/s", "MiB"]
    yield measuring.markdown_table(header, [model_line(row) for row in rows if "map" not in row])


def layer_line(row: dict[str, Any]) -> list[str]:
    size = "x".join(map(str, row["map"]))
    layer = f"{row['model']}, batch {row['batch']}: {row['layers']} of {size}, window {row['window'][0]}"
    times = [f"{row['ms'][part]['median']:.3g}" if part in row.get("ms", {}) else "" for part in PARTS]
    roof = "" if row["roofline_ms"] is None else f"{row['roofline_ms']:.3g}"
    return [layer, row["way"], *(times if "ms" in row else [row["note"], "", ""]), roof]


def model_line(row: dict[str, Any]) -> list[str]:
    cells = []
    for mode in ("inference", "training step"):
        if mode in row:
            peak = row[mode]["peak_mib"]
            cells += [f"{1e3 * row['batch'] / row[mode]['ms']['median']:.1f}", "" if peak is None else f"{peak:,.0f}"]
    return [f"{row['model']}, batch {row['batch']}", row["way"], *(cells or [row["note"], "", "", ""])]


def write_table(rows: Sequence[dict[str, Any]]) -> None:
    """What the program chooses by: each layer's three parts together, torch's in the fastest of its settings."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("kind") == "ours":
            kept = {name: row[name] for name in ("channels_last", "window", "batch")}
            case = {
                "dtype": str(DTYPE).removeprefix("torch."),
                **kept,
                "channels": row["map"][0],
                "map": row["map"][1:],
            }
            ms, whole = cases.setdefault(json.dumps(case), {}), sum(part["median"] for part in row["ms"].values())
            ms[row["choice"]] = min(whole, ms.get(row["choice"], whole))
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    entries = [{**json.loads(case), "ms": ms} for case, ms in cases.items() if "triton" in ms]
    table["gpus"][torch.cuda.get_device_name()] = entries
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WINDOWS), default=list(WINDOWS))
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 1])
    parser.add_argument("--seconds", type=float, default=3.0, help="for all ways of one thing together, at least")
    parser.add_argument("--compile", action="store_true", help="the models by torch.compile")
    parser.add_argument("--output", type=Path, default=measuring.RESULTS / "gpu.json")
    parser.add_argument("--write-table", action="store_true", help="store the times where the program chooses by them")
    parser.add_argument("--table", action="store_true", help="print the tables of the stored results, measure nothing")
    options = parser.parse_args()
    if not options.table:
        measure(options)
    rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    if options.write_table:
        write_table(rows)
    print("\n\n".join(tables(rows)))


def measure(options: argparse.Namespace) -> None:
    """What an earlier run with the same settings has, is kept."""
    settings = {"seconds": options.seconds, "compile": options.compile, "dtype": str(DTYPE)}
    rows, machine = measuring.stored_rows(options.output, settings=settings), Machine(options.seconds)
    for name, batch in itertools.product(options.models, options.batches):
        if any((row["model"], row["batch"]) == (name, batch) for row in rows):
            continue
        if batch > 1 and not machine.gpu:
            print(f"{name}, batch {batch}: skipped, needs a GPU", file=sys.stderr)
            continue
        for row in [*layer_rows(name, batch, machine), *model_rows(name, batch, machine, compiled=options.compile)]:
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
        command = f"python benchmarks/gpu.py --seconds {options.seconds:g}{' --compile' * options.compile}"
        measuring.store(options.output, command=command, settings=settings, rows=rows, packages=models.PACKAGES)


if __name__ == "__main__":
    main()
