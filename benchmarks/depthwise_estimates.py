"""Estimate the time of ConvNeXt-T's depthwise layers on GPUs, from counts of operations and bytes.

    python benchmarks/depthwise_estimates.py

Prints the estimates in docs/speed.md. Also prints the ratio of patches x taps to inputs per patch
from which on matrix products are expected to be faster than torch's convolution; the rule in
dcls_convert/depthwise/choice.py uses that ratio. Nothing is measured; expect errors of 40 %.

Each GPU kernel takes the time of its slowest part: bytes to and from memory, instructions, or
matrix products. Time on the host is not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcls_convert.depthwise import matmul

LAYERS = ((96, 56, 3), (192, 28, 3), (384, 14, 9), (768, 7, 3))  # channels, map, number of layers
STEP = ("forward", "input's gradient", "window's gradient")
FORWARD = STEP[:1]
SECTOR = 32  # bytes that a cache transfers for each number that is read across a map
# Instructions per number that a strided copy writes: a constant, and more for each axis of its
# index. Counted in torch's kernels for sm_90.
COPY_INSTRUCTIONS = 20
COPY_INSTRUCTIONS_PER_AXIS = 12
COPY_SHARE = 0.75  # of the peak instruction rate, which copies are expected to reach
# Instructions of torch's convolution per output number and tap, counted in the same way.
TAP_INSTRUCTIONS = {"forward": 7.4, "input's gradient": 14.3, "window's gradient": 34.5}
# Times measured by others are 1.8 to 2 times those of these instructions: see docs/speed.md.
CALIBRATION = 2.0
TILE = 64  # rows or columns of a matrix that a GPU multiplies at once
MIN_USE = 0.3  # share of a GPU's product rate that matrices of any shape reach


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a GPU does per second, as far as known kernels reach it."""

    name: str
    bytes_per_number: int
    memory: float  # bytes
    cache: float  # bytes
    instructions: float  # peak rate
    products: dict[int, float]  # divisor of the rows' lengths -> FLOP


DEVICES = (
    Device(
        name="H100, bfloat16",
        bytes_per_number=2,
        memory=2.85e12,
        cache=3.85e12,
        instructions=132 * 128 * 1.755e9,
        products={8: 450e12, 4: 140e12, 1: 110e12},
    ),
    Device(
        name="RTX 4090, bfloat16",
        bytes_per_number=2,
        memory=0.88e12,
        cache=3.5e12,
        instructions=128 * 128 * 2.52e9,
        products={8: 140e12, 4: 110e12, 1: 95e12},
    ),
    Device(
        name="RTX 4090, float32",
        bytes_per_number=4,
        memory=0.88e12,
        cache=3.5e12,
        instructions=128 * 128 * 2.52e9,
        products={1: 54e12},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A depthwise layer with a square window, on a device; maps are channels_last."""

    device: Device
    channels: int
    map_size: int
    window: int
    images: int

    def copy_seconds(
        self, numbers: float, *, axes: int, read: float, transposed: bool = False
    ) -> float:
        """Return the seconds of a copy that writes `numbers` and reads `read` numbers."""
        device = self.device
        parts = [
            (numbers + read) * device.bytes_per_number / device.memory,
            numbers
            * (COPY_INSTRUCTIONS + COPY_INSTRUCTIONS_PER_AXIS * axes)
            / (COPY_SHARE * device.instructions),
        ]
        if transposed:
            parts.append(numbers * SECTOR / device.cache)
        return max(parts)

    def stream_seconds(self, numbers: float) -> float:
        """Return the seconds to read or write numbers in memory order."""
        return numbers * self.device.bytes_per_number / self.device.memory

    def product_seconds(self, height: int, width: int, inner: int, *, aligned: int) -> float:
        """Return the seconds of a product (height, inner) x (inner, width) for each channel.

        The lengths of the rows of all three matrices are multiples of `aligned`.
        """
        rates = self.device.products
        rate = max(rates[numbers] for numbers in rates if aligned % numbers == 0)
        if len(rates) > 1:  # on tensor cores
            use = [size / (TILE * math.ceil(size / TILE)) for size in (height, width)]
            rate *= max(MIN_USE, math.prod(use))
        numbers = self.channels * (height * inner + inner * width + height * width)
        flop = 2 * self.channels * height * width * inner
        return max(flop / rate, self.stream_seconds(numbers))

    def axis(self) -> matmul.PatchTiling:
        """Return how patches tile the map along rows; along columns, it is the same."""
        size = (self.map_size, self.map_size)
        window = (self.window, self.window)
        return matmul.tile_map(size, window, (self.window // 2, self.window // 2))[0]

    def by_products(self) -> dict[str, float]:
        """Return the seconds of each pass by matrix products, the steps of `matmul.depthwise`."""
        axis = self.axis()
        is_cut = axis.patches > 1
        inputs = matmul.row_length(axis.inputs_per_patch**2, axis, axis)
        outputs = matmul.row_length(axis.outputs_per_patch**2, axis, axis)
        patches = self.images * axis.patches**2
        maps = self.images * self.channels
        cells = maps * self.map_size**2
        results = self.channels * patches * outputs
        bank_cells = self.channels * inputs * outputs

        transposed = self.copy_seconds(cells, axes=3, read=cells, transposed=True)
        cut = 0.0
        cut_outputs = 0.0
        if is_cut:
            padded = maps * (axis.patches * axis.outputs_per_patch + self.window - 1) ** 2
            patch_inputs = self.channels * patches * inputs
            cut = self.copy_seconds(cells, axes=4, read=cells) + self.stream_seconds(padded)
            cut += self.copy_seconds(patch_inputs, axes=6, read=min(patch_inputs, 2 * padded))
            cut_outputs = self.copy_seconds(results, axes=6, read=results)
        bank = self.copy_seconds(bank_cells, axes=4, read=bank_cells / 50)
        folded = self.copy_seconds(results, axes=6 if is_cut else 3, read=results, transposed=True)
        aligned = math.gcd(inputs, outputs)
        convolved = (
            cut + bank + self.product_seconds(patches, outputs, inputs, aligned=aligned) + folded
        )
        # Diagonals are summed along rows and then along columns, each with an intermediate copy.
        row_sums = self.channels * axis.outputs_per_patch * axis.inputs_per_patch * self.window
        diagonals = self.stream_seconds(bank_cells * (1 if is_cut else 2.2))
        diagonals += 8 * row_sums / self.device.memory
        window_gradient = cut + cut_outputs + 2.5 * diagonals
        window_gradient += self.product_seconds(outputs, inputs, patches, aligned=aligned)
        bias = self.stream_seconds(2 * cells)
        bias_gradient = self.stream_seconds(cells)
        return {
            "forward": transposed + convolved + bias,
            "input's gradient": transposed + convolved,
            "window's gradient": window_gradient + bias_gradient,
        }

    def by_torch(self) -> dict[str, float]:
        """Return the seconds of each pass by torch's convolution."""
        taps = self.images * self.channels * self.map_size**2 * self.window**2
        return {
            name: CALIBRATION * taps * count / self.device.instructions
            for name, count in TAP_INSTRUCTIONS.items()
        }

    def ratio(self) -> float:
        """Return patches x taps / inputs per patch, as in the rule."""
        axis = self.axis()
        return self.images * axis.patches**2 * self.window**2 / axis.inputs_per_patch**2


def total(seconds: dict[str, float], passes: Sequence[str]) -> float:
    return sum(seconds[name] for name in passes)


def network(device: Device, images: int, passes: Sequence[str]) -> tuple[float, float]:
    """Return the milliseconds of all layers with windows of 17, by products and by torch."""
    products = 0.0
    torch = 0.0
    for channels, map_size, count in LAYERS:
        layer = Layer(device=device, channels=channels, map_size=map_size, window=17, images=images)
        products += count * total(layer.by_products(), passes)
        torch += count * total(layer.by_torch(), passes)
    return 1e3 * products, 1e3 * torch


def break_even(device: Device, layer: tuple[int, int, int], passes: Sequence[str]) -> str:
    """Return the ratio from which on products are faster with a window of 17."""
    channels, map_size, _ = layer
    for images in range(1, 1000):
        case = Layer(device=device, channels=channels, map_size=map_size, window=17, images=images)
        if total(case.by_products(), passes) < total(case.by_torch(), passes):
            return f"{case.ratio():.0f} (batch {images})"
    return "none"


def main() -> None:
    print("ms of the 18 layers: forward by products and torch, step by products and torch")
    for device in DEVICES:
        for images in (128, 32, 8, 1):
            times = [*network(device, images, FORWARD), *network(device, images, STEP)]
            print(f"{device.name}, batch {images}: " + ", ".join(f"{ms:.1f}" for ms in times))
    print("\nratio from which on products are faster, by map: 56, 28, 14, 7")
    for device in DEVICES:
        for name, passes in (("step", STEP), ("forward", FORWARD)):
            ratios = [break_even(device, layer, passes) for layer in LAYERS]
            print(f"{device.name}, {name}: " + ", ".join(ratios))


if __name__ == "__main__":
    main()
