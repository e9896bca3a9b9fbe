"""Draw effective receptive fields: how much each pixel matters for the middle of a layer.

    python examples/receptive_field.py convnext_tiny convnext_tiny-dcls17 --output field.png
    python examples/receptive_field.py old.pt=convnext_tiny trained-dcls17 --images photographs

Each network is a folder that dcls-convert wrote, a model of timm (with random weights; with
--pretrained, trained ones), or FILE=MODEL, a model of timm with the weights of a file. The field
(Luo et al., 2016) is the mean absolute gradient of the unit in the middle of a layer with respect
to each pixel, over images or seeded noise. The layer is, by default, the last one that was
converted in the last network. The paper's figures have 3x1024x1024 pixels. Needs the extra plot.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from dcls_convert import DclsConv1d, DclsConv2d, DclsConv3d

try:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}; in the clone: pip install '.[plot]'") from None

DCLS = (DclsConv1d, DclsConv2d, DclsConv3d)
NOISE_IMAGES = 4
MAX_IMAGES = 16
MAX_MAP_SIDE = 112  # pixels of a map; larger fields are averaged, which also reduces the noise
SMALLEST = 1e-5  # end of the scale, as a share of the largest gradient


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    home_path = os.path.expanduser  # the shell leaves a "~" in quotes
    add("networks", nargs="+", type=home_path, help="FOLDER, MODEL or FILE=MODEL")
    add("--pretrained", action="store_true", help="timm's weights for MODEL")
    add("--layer", help="default: the last converted layer")
    add("--images", type=home_path, help="folder of images; default: seeded noise")
    add("--input-size", nargs="+", metavar="SIDE", help="3 64 64 or 3x64x64; default: the model's")
    add("--output", type=home_path, default="receptive-field.png", help="default: %(default)s")
    return parser.parse_args()


def load_network(name: str, *, pretrained: bool = False) -> nn.Module:
    """Load a folder, a model of timm, or FILE=MODEL."""
    file, equals, model = name.rpartition("=")
    folder = name.removeprefix("local-dir:")
    if Path(folder).is_dir():
        model, pretrained = f"local-dir:{folder}", True
    torch.manual_seed(0)
    try:
        return timm.create_model(
            model, pretrained=pretrained and not equals, checkpoint_path=file
        ).eval()
    except Exception as error:  # timm has many kinds
        raise ValueError(f"{name}: {str(error) or type(error).__name__}") from error


def last_converted_layer(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if isinstance(module, DCLS)]
    if not names:
        raise ValueError("the last network has no DCLS layer; state a --layer")
    return names[-1]


def images_for(model: nn.Module, folder: str | None, size: list[str] | None) -> list[Tensor]:
    """Return images (channels, rows, columns), as the model takes them."""
    overrides = {}
    if size:
        sides = "x".join(size).split("x")
        if len(sides) != 3 or not all(side.isdecimal() for side in sides):
            raise ValueError(f"--input-size {' '.join(size)}: must be such as 3 64 64 or 3x64x64")
        overrides["input_size"] = tuple(map(int, sides))
    config = resolve_data_config(overrides, model=model)
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        return list(torch.randn(NOISE_IMAGES, *config["input_size"], generator=generator))
    transform = create_transform(**config)
    paths = sorted(path for path in Path(folder).iterdir() if not path.name.startswith("."))
    if not paths:
        raise ValueError(f"--images {folder}: has no images")
    return [transform(Image.open(path).convert("RGB")) for path in paths[:MAX_IMAGES]]


def receptive_field(model: nn.Module, layer: str, images: Sequence[Tensor]) -> Tensor:
    """Return how much each pixel matters for the unit in the middle of the layer's last output.

    The unit is summed over output channels, and the absolute gradients over input channels:
    (rows, columns), in float64.
    """
    outputs: list[Tensor] = []
    hook = model.get_submodule(layer).register_forward_hook(
        lambda module, arguments, output: outputs.append(output)
    )
    gradients = []
    for image in images:
        pixels = image.unsqueeze(0).clone().requires_grad_()
        model(pixels)
        unit = outputs[-1][0]  # (channels, rows, columns)
        outputs.clear()
        for side in unit.shape[1:]:
            unit = unit[:, side // 2]
        (gradient,) = torch.autograd.grad(unit.sum(), pixels)
        gradients.append(gradient.abs().sum((0, 1)).double())
    hook.remove()
    return torch.stack(gradients).mean(0)


def central_side(field: Tensor, share: float) -> int:
    """Return the side of the smallest central square with this share of a field (rows, columns)."""
    rows, columns = ((2 * torch.arange(side) - side + 1).abs() for side in field.shape)
    # A central square of side s has the pixels with a doubled distance below s along both axes.
    distances = torch.maximum(rows[:, None], columns)
    cumulative = torch.bincount(distances.flatten(), field.flatten()).cumsum(0)  # by distance
    target = share * cumulative[-1] * (1 - 1e-9)  # slightly less than the share, for rounding
    return min(int((cumulative < target).sum()) + 1, max(field.shape))


def draw(fields: dict[str, Tensor], layer: str, output: str) -> None:
    """Draw the fields side by side on one logarithmic scale."""
    figure = Figure(figsize=(4.2 * len(fields) + 0.8, 4.4), layout="constrained")
    axes = figure.subplots(1, len(fields), squeeze=False)[0]
    for axis, (name, field) in zip(axes, fields.items(), strict=True):
        rows, columns = field.shape
        size = (min(rows, MAX_MAP_SIDE), min(columns, MAX_MAP_SIDE))
        averaged = F.adaptive_avg_pool2d(field[None], size)[0]
        shares = (averaged / averaged.max()).clamp(min=SMALLEST)
        image = axis.imshow(shares.numpy(), norm=LogNorm(SMALLEST, 1), extent=(0, columns, rows, 0))
        half = central_side(field, 0.5)
        axis.set_title(f"{name}\nhalf of the gradient in {half}x{half} pixels", fontsize=9)
    figure.suptitle(f"Effective receptive field of {layer}", fontsize=10)
    figure.colorbar(image, ax=axes, label="gradient, as a share of the largest")
    figure.savefig(output)


def main() -> None:
    arguments = parse_arguments()
    networks = {}
    for name in arguments.networks:
        networks[name] = load_network(name, pretrained=arguments.pretrained)
    last = networks[arguments.networks[-1]]
    layer = arguments.layer or last_converted_layer(last)
    images = images_for(last, arguments.images, arguments.input_size)
    try:
        fields = {name: receptive_field(model, layer, images) for name, model in networks.items()}
    except (AssertionError, AttributeError, RuntimeError) as error:  # another layer or size
        size = "x".join(map(str, images[0].shape))
        raise ValueError(f"layer {layer}, images of {size}: {error}") from error
    for name, field in fields.items():
        sides = [central_side(field, share) for share in (0.5, 0.99)]
        print(
            f"{name}: half of the gradient in the central {sides[0]}x{sides[0]} pixels, "
            f"99 % in {sides[1]}x{sides[1]}"
        )
    draw(fields, layer, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
