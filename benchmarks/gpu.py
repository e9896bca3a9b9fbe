"""Converted layers and models on a GPU: torch's convolutions, and wide windows as matrix products.

    python benchmarks/gpu.py [--minutes 8] [--batch 128]; --table prints what is stored

For ConvNeXt-T and -B with windows of 17, in this order, while the minutes last:

- the construction of each layer's kernel, forward and backward;
- each depthwise layer alone, contiguous and channels_last, in bfloat16 and float32, by torch's
  convolution and by matrix products: milliseconds of a forward pass, and of one with both
  gradients;
- the models in bfloat16 autocast: the dense original, converted (both ways), folded, and with the
  authors' layers. Images per second of inference and of training, and the most memory that either
  takes.

All ways take turns. Without a GPU it says what it skipped.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measuring
import models
import torch
import torch.nn.functional as F

from dcls_convert.depthwise.choice import VARIABLE, conv2d
from dcls_convert.layers.dcls_conv import DclsConv2d

WINDOW = 17
# Channels, side of the map, and layers of the stages, for images of 224 x 224.
NETWORKS = {
    "convnext_tiny": ((96, 56, 3), (192, 28, 3), (384, 14, 9), (768, 7, 3)),
    "convnext_base": ((128, 56, 3), (256, 28, 3), (512, 14, 27), (1024, 7, 3)),
}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
WAYS = ("torch", "matmul")
ROUNDS, CALLS = 5, 10  # a round is so many calls, whose end alone is waited for
DEVICE = "cuda"

Runs = dict[str, Callable[[], object]]
Rows = Iterator[dict[str, Any]]


@contextlib.contextmanager
def going(way: str) -> Iterator[None]:
    """The variable is read at every forward."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = way
    try:
        yield
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})


def measured(runs: Runs) -> dict[str, dict[str, Any]]:
    """Milliseconds of a call and the most memory that it adds.

    All take turns, after one call for warmth.
    """
    peaks, times = {}, {name: [] for name in runs}
    for name, call in runs.items():
        call()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / measuring.MIB
    for _ in range(ROUNDS):
        for name, call in runs.items():
            begun = now()
            for _ in range(CALLS):
                call()
            times[name].append(1e3 * (now() - begun) / CALLS)
    return {
        name: {"ms": measuring.summary(found), "peak_mib": peaks[name]}
        for name, found in times.items()
    }


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def construction(name: str, batch: int) -> Rows:
    for channels, _, count in NETWORKS[name]:
        layer = DclsConv2d(
            channels,
            channels,
            kernel_count=34,
            dilated_kernel_size=WINDOW,
            groups=channels,
            device=DEVICE,
        )
        elements = [layer.weight, layer.positions]
        grad = torch.randn_like(layer.kernel())
        found = measured(
            {"construction": lambda layer=layer, of=elements, to=grad: step(layer.kernel(), of, to)}
        )
        yield {"what": f"kernels of {count} layers, {channels} channels", "step": found}


def step(output: torch.Tensor, of: list[torch.Tensor], grad: torch.Tensor) -> object:
    return torch.autograd.grad(output, of, grad)


def layers(name: str, batch: int) -> Rows:
    for channels, side, count in NETWORKS[name]:
        for dtype in (torch.bfloat16, torch.float32):
            for format, memory_format in FORMATS.items():
                options = {"device": DEVICE, "dtype": dtype}
                maps = torch.randn(batch, channels, side, side, **options).to(
                    memory_format=memory_format
                )
                grad = maps.clone()
                maps.requires_grad_()
                kernel = (
                    torch.randn(channels, 1, WINDOW, WINDOW, **options)
                    .div_(WINDOW)
                    .requires_grad_()
                )

                def forward(
                    way: str, maps: Any = maps, kernel: Any = kernel, groups: int = channels
                ) -> torch.Tensor:
                    with going(way):
                        return conv2d(
                            maps, kernel, None, (1, 1), (WINDOW // 2,) * 2, (1, 1), groups
                        )

                inference = {
                    way: torch.no_grad()(lambda way=way, run=forward: run(way)) for way in WAYS
                }
                training = {
                    way: lambda way=way, run=forward, of=[maps, kernel], to=grad: step(
                        run(way), of, to
                    )
                    for way in WAYS
                }
                what = f"{count} layers, {channels} channels of {side}x{side}, {dtype}, {format}"
                yield {"what": what, "forward": measured(inference), "step": measured(training)}


def networks(name: str, batch: int) -> Rows:
    built, notes = models.build(
        models.Case(model=name, window=WINDOW, channels_last=True), "v0", training=True
    )
    images, classes = (
        torch.randn(batch, *models.IMAGE, device=DEVICE),
        torch.arange(batch, device=DEVICE),
    )
    inference: Runs = {}
    training: Runs = {}
    for kind, model in built.items():
        optimizer = torch.optim.AdamW(model.to(DEVICE).parameters(), lr=1e-5)
        for way in WAYS if kind == models.OURS else WAYS[:1]:

            def infer(model: Any = model, way: str = way) -> None:
                model.eval()
                with going(way), torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
                    model(images)

            def train(model: Any = model, way: str = way, optimizer: Any = optimizer) -> None:
                model.train()
                optimizer.zero_grad()
                with going(way), torch.autocast(DEVICE, torch.bfloat16):
                    loss = F.cross_entropy(model(images), classes)
                loss.backward()
                optimizer.step()

            label = f"{kind}, {way}" if kind == models.OURS else kind
            inference[label], training[label] = infer, train
    yield {
        "what": "the model",
        "notes": notes,
        "forward": measured(inference),
        "step": measured(training),
    }


PARTS: dict[str, Callable[[str, int], Rows]] = {
    "construction": construction,
    "layers": layers,
    "models": networks,
}


def tables(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        for way, found in row["step"].items():
            forward = row.get("forward", {}).get(way)
            cells = [found["ms"]["median"], found["peak_mib"]]
            first = "" if forward is None else f"{forward['ms']['median']:.3g}"
            lines.append(
                [row["model"], row["what"], way, first, f"{cells[0]:.3g}", f"{cells[1]:,.0f}"]
            )
    header = ["network", "what", "way", "forward, ms", "forward and backward, ms", "peak, MiB"]
    return measuring.markdown_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after which nothing more is begun"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--output", type=Path, default=measuring.RESULTS / "gpu.json")
    parser.add_argument(
        "--smoke", action="store_true", help=argparse.SUPPRESS
    )  # a toy on the CPU; stores nothing
    parser.add_argument(
        "--table", action="store_true", help="print what is stored, measure nothing"
    )
    options = parser.parse_args()
    if options.smoke:
        return smoke()
    if not options.table:
        measure(options)
    if options.output.exists():
        print(tables(json.loads(options.output.read_text(encoding="utf-8"))["rows"]))


def smoke() -> None:
    global DEVICE, ROUNDS, CALLS
    DEVICE, ROUNDS, CALLS, models.IMAGE = "cpu", 1, 1, (3, 64, 64)
    toy = "test_convnext"
    NETWORKS[toy] = ((4, 9, 1),)
    print(tables([{"model": toy, **row} for run in PARTS.values() for row in run(toy, 2)]))


def measure(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    for part, run in PARTS.items():
        if not torch.cuda.is_available():
            print(f"{part} of {' and '.join(NETWORKS)}: skipped, there is no GPU")
            continue
        for name in NETWORKS:
            if time.monotonic() > end:
                print(f"{part} of {name}: skipped, {options.minutes:g} minutes are over")
                continue
            for row in run(name, options.batch):
                rows.append({"model": name, "part": part, **row})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if rows:
        settings = {"batch": options.batch, "gpu": torch.cuda.get_device_name()}
        command = f"python benchmarks/gpu.py --batch {options.batch}"
        measuring.store(
            options.output, command=command, settings=settings, rows=rows, packages=models.PACKAGES
        )


if __name__ == "__main__":
    main()
