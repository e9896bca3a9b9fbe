"""Does DCLS help a larger network that is trained for long? Ten minutes of one GPU.

    # Where the typefaces are (see glyphs.py), write all images into one file.
    python benchmarks/long_training.py --prepare kanji64.npz
    # On a machine with a GPU, with torch and timm.
    python benchmarks/long_training.py --images kanji64.npz --minutes 9.3 [--output FILE]
    # The verdict, from the file of runs, where scipy and accelerate are installed.
    python benchmarks/long_training.py --table FILE

The images are those of glyphs.py, at 64 pixels: 400 kanji, 23 typefaces to learn from, ten others
to test with. The network is ConvNeXt-Pico with a stem of two pixels, so that its maps have 32, 16,
8 and 4 cells. Beside it, with windows of 17x17: "17" (elements start anywhere near the centre, by
the default), "17-kernel" (in the place of the old kernel), "17-frozen" (positions are not
trained), and "17-dense" (plain convolutions with kernels as large as the window). For each seed,
all start from the same weights but for these convolutions, and see the same images in the same
order.

Everything is decided before the first result: each network is timed for a few steps; then the
number of epochs is the largest, of at most MAX_EPOCHS, for which SEEDS seeds of all networks fit
into what is left of the minutes. If fewer than MIN_EPOCHS fit, the last networks are left out. The
plan is printed. No run begins that would end too late. The verdict is that of examples/compare.py,
corrected for all networks beside the original, whatever comes out.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measuring import EXAMPLES
from torch import Tensor, nn

# The first ones are the most important.
NETWORKS = ("original", "17", "17-frozen", "17-dense", "17-kernel")
SIDE = 64  # pixels
CLASSES = 400
SEEDS = 5
MIN_EPOCHS = 20
MAX_EPOCHS = 200
BATCH = 512  # images, so that the GPU is busy, and not Python alone
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.05
WARM_UP = 0.1  # share of the steps
SHARE_OF_TIME = 0.92  # that is planned; the rest is for slower steps
# Augmentation: largest shift and scale as a share of the image, and rotation in radians.
SHIFT, SCALE, ROTATION = 0.08, 0.1, 0.12


@dataclass(frozen=True, kw_only=True)
class Data:
    """Images (N, 1, S, S) as bytes, and classes, to learn from and to test with; on one device."""

    train: Tensor
    train_classes: Tensor
    test: Tensor
    test_classes: Tensor


class InBlocks(nn.Module):
    """A depthwise convolution with a wide kernel; on GPUs, in this package's blocks."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self._convolve: dict[tuple[object, ...], Any] = {}

    def forward(self, maps: Tensor) -> Tensor:
        if not maps.is_cuda:
            return self.conv(maps)
        from dcls_convert.depthwise.blocks import convolver_of_windows

        dtype = torch.get_autocast_dtype("cuda")
        key = (maps.shape, maps.stride(), maps.dtype)
        if key not in self._convolve:
            window = (self.conv.kernel_size[0], self.conv.kernel_size[1])
            convolver = convolver_of_windows(maps, window, (1, 1), dtype, has_bias=True)
            self._convolve[key] = convolver
        output: Tensor = self._convolve[key](maps, self.conv.bias, self.conv.weight)
        return output


def build(name: str, seed: int, *, tiny: bool) -> nn.Module:
    """Return a network, with the weights of this seed."""
    import timm

    import dcls_convert

    torch.manual_seed(seed)
    options: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)} if tiny else {}
    network: nn.Module = timm.create_model(
        "convnext_pico", in_chans=1, num_classes=CLASSES, patch_size=2, ls_init_value=0.1, **options
    )
    size, *words = name.split("-")
    if size == "original":
        return network
    arguments: dict[str, Any] = {"init": "random"}
    if "dense" in words:  # zeros around the old kernel
        arguments = {"kernel_count": "exact", "init": "exact"}
    elif "kernel" in words:
        arguments["positions"] = "kernel"
    dcls_convert.convert_(
        network, dilated_size=int(size), input_size=(1, SIDE, SIDE), seed=seed, **arguments
    )
    if "dense" in words:
        dcls_convert.fold_to_dense_(network)
        for module in list(network.modules()):
            for child_name, child in module.named_children():
                if isinstance(child, nn.Conv2d) and child.kernel_size == (int(size), int(size)):
                    setattr(module, child_name, InBlocks(child))
    if "frozen" in words:
        for parameter_name in dcls_convert.tuning.no_weight_decay(network):
            network.get_parameter(parameter_name).requires_grad_(False)
    return network


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift, scale and rotate bytes (N, 1, S, S) at random; returns numbers from -1 to 1."""
    count = len(images)
    random = torch.rand((4, count), generator=generator, device=images.device) * 2 - 1
    angle = ROTATION * random[0]
    scale = 1 + SCALE * random[1]
    matrix = torch.empty((count, 2, 3), device=images.device)
    matrix[:, 0, 0] = matrix[:, 1, 1] = scale * angle.cos()
    matrix[:, 0, 1] = -scale * angle.sin()
    matrix[:, 1, 0] = scale * angle.sin()
    matrix[:, :, 2] = 2 * SHIFT * random[2:].T
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(normalised(images), grid, padding_mode="border", align_corners=False)


def normalised(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def steps_of_epoch(data: Data) -> int:
    return max(1, len(data.train) // BATCH)


def batches(data: Data, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield augmented images and their classes, equal for all networks of a seed."""
    generator = torch.Generator(data.train.device).manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(data.train), generator=generator, device=data.train.device)
        for step in range(steps_of_epoch(data)):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            yield augmented(data.train[chosen], generator), data.train_classes[chosen]


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train_(network: nn.Module, data: Data, steps: int, epochs: int, seed: int) -> None:
    """Train for so many steps; epochs and steps determine the learning rate of each."""
    from dcls_convert import tuning

    device = data.train.device
    groups = tuning.param_groups(network, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, fused=device.type == "cuda")
    total = epochs * steps_of_epoch(data)

    def share(step: int) -> float:
        warm = max(1, int(WARM_UP * total))
        return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / total))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    network.train()
    for _, (images, classes) in zip(range(steps), batches(data, epochs, seed), strict=False):
        with autocast(device):
            loss = F.cross_entropy(network(images), classes, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def which_are_right(network: nn.Module, data: Data) -> str:
    """Return a digit for each test image: 1 if it was classified right."""
    network.eval()
    digits: list[int] = []
    for images, classes in zip(data.test.split(BATCH), data.test_classes.split(BATCH), strict=True):
        with autocast(data.test.device):
            right = network(normalised(images)).argmax(1) == classes
        digits += right.int().tolist()
    return "".join(map(str, digits))


@dataclass(frozen=True, kw_only=True)
class Times:
    """What a network takes, in seconds."""

    step: float
    rest: float  # to build it, and to test it

    def of_run(self, steps: int) -> float:
        return self.rest + steps * self.step


def times_of(name: str, data: Data, *, tiny: bool) -> Times:
    """Time a network, after as many steps that compile and warm up."""
    start = time.monotonic()
    network = build(name, 0, tiny=tiny).to(data.train.device)
    build_seconds = time.monotonic() - start
    steps = 1 if tiny else 15
    for _ in range(2):
        start = time.monotonic()
        train_(network, data, steps, epochs=1, seed=0)
        if data.train.is_cuda:
            torch.cuda.synchronize()
        step = (time.monotonic() - start) / steps
        start = time.monotonic()
        which_are_right(network, data)
        test_seconds = time.monotonic() - start
    return Times(step=step, rest=build_seconds + test_seconds)


def plan(times: dict[str, Times], steps: int, budget: float) -> tuple[list[str], int]:
    """Return which networks are trained, and for how many epochs of so many steps."""
    networks = list(times)
    while True:
        rest = SEEDS * sum(times[name].rest for name in networks)
        an_epoch = SEEDS * steps * sum(times[name].step for name in networks)
        epochs = min(MAX_EPOCHS, int((SHARE_OF_TIME * budget - rest) / an_epoch))
        if epochs >= MIN_EPOCHS or len(networks) == 2:
            return networks, max(1, epochs)
        networks.pop()


def train_all(data: Data, output: Path, end: float, *, tiny: bool) -> None:
    """Time, plan, train, and append a line for each run."""
    build("17", 0, tiny=tiny)  # imports, which are no part of a run
    times = {name: times_of(name, data, tiny=tiny) for name in NETWORKS}
    for name, found in times.items():
        print(f"{name}: {1e3 * found.step:.1f} ms a step, {found.rest:.1f} s besides", flush=True)
    steps = steps_of_epoch(data)
    networks, epochs = plan(times, steps, end - time.monotonic())
    if tiny:
        networks, epochs = list(NETWORKS), 1
    print(f"PLAN: {SEEDS} seeds of {', '.join(networks)}; {epochs} epochs", flush=True)
    for seed in range(SEEDS):
        for name in networks:
            if time.monotonic() + times[name].of_run(steps * epochs) > end:
                print(f"{name}, seed {seed}: no time left")
                return
            start = time.monotonic()
            network = build(name, seed, tiny=tiny).to(data.train.device)
            train_(network, data, epochs * steps, epochs, seed)
            right = which_are_right(network, data)
            accuracy = 100 * right.count("1") / len(right)
            run = {
                "network": name,
                "seed": seed,
                "params": sum(parameter.numel() for parameter in network.parameters()),
                "seconds": round(time.monotonic() - start, 1),
                "epochs": [{"epoch": epochs, "accuracy": accuracy}],
                "right": right,
            }
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(f"{name}, seed {seed}: {accuracy:.2f} % ({run['seconds']} s)", flush=True)


def verdict(output: Path) -> str:
    """Return the answer of examples/compare.py to the runs in a file."""
    sys.path.insert(0, str(EXAMPLES))
    from compare import answer

    runs = {}
    for line in output.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        runs[run["network"], run["seed"]] = run
    trained = {name for name, _ in runs}
    return answer(runs, [name for name in NETWORKS if name in trained])


def prepare(file: Path) -> None:
    """Draw the kanji, and write them into a file."""
    import glyphs

    characters = glyphs.shared_kanji()[: 3 * CLASSES]
    drawn = {font: glyphs.draw(font, characters, SIDE) for font in (*glyphs.TRAIN, *glyphs.TEST)}
    has_ink = [all(map(glyphs.has_ink, images)) for images in zip(*drawn.values(), strict=True)]
    chosen = np.flatnonzero(has_ink)[:CLASSES]
    parts: dict[str, Any] = {}
    for name, fonts in (("train", glyphs.TRAIN), ("test", glyphs.TEST)):
        images = [np.asarray(drawn[font][number]) for font in fonts for number in chosen]
        parts[name] = np.stack(images)[:, None]
        parts[f"{name}_classes"] = np.tile(np.arange(CLASSES), len(fonts))
    np.savez_compressed(file, **parts)
    print(f"{len(parts['train'])} and {len(parts['test'])} images in {file}")


def read(file: Path | None, device: torch.device) -> Data:
    """Read images; without a file, make a few random ones, for --tiny."""
    if file is None:
        draw = np.random.default_rng(0)
        parts = {
            name: draw.integers(0, 256, (count, 1, SIDE, SIDE), np.uint8)
            for name, count in (("train", 40), ("test", 40))
        }
        for name in ("train", "test"):
            parts[f"{name}_classes"] = np.arange(len(parts[name])) % CLASSES
    else:
        parts = dict(np.load(file))
    return Data(**{name: torch.from_numpy(values).to(device) for name, values in parts.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--images", type=Path, metavar="FILE", help="what --prepare wrote")
    parser.add_argument("--output", type=Path, default=Path("long_training.jsonl"))
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="draw the images, and end")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the verdict, and end")
    parser.add_argument("--tiny", action="store_true", help="a test of this script, on a CPU")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    if options.prepare is not None:
        return prepare(options.prepare)
    if options.table is not None:
        if not options.table.is_file():
            sys.exit(f"error: {options.table}: no such file")
        return print(verdict(options.table))
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU here; --tiny tests this script without one")
    if not options.tiny and options.images is None:
        sys.exit("error: --images FILE is needed; --prepare FILE makes it")
    if options.images is not None and not options.images.is_file():
        sys.exit(f"error: {options.images}: no such file; --prepare FILE makes it")
    if options.output.exists():
        sys.exit(f"error: {options.output}: holds other runs already; give another --output")
    device = torch.device("cpu" if options.tiny else "cuda")
    train_all(read(options.images, device), options.output, end, tiny=options.tiny)
    if not options.output.exists():
        sys.exit("error: no run fitted into the minutes")
    try:
        print(verdict(options.output))
    except ImportError as error:
        print(f"{error}; elsewhere, print the verdict by --table {options.output}")


if __name__ == "__main__":
    main()
