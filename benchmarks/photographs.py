"""Photographs, random crops of them, and how far a network's outputs for them move (extra `bench`).

The photographs are all that scikit-image, scikit-learn and matplotlib install: of people, things,
places and textures, and through telescope, microscope and ophthalmoscope. They exclude drawings,
pictures smaller than half a crop, and the second picture of a stereo pair. Nothing is downloaded.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.functional import to_tensor

BATCH = 16  # crops
# timm's values for EfficientNet-Lite; the original's, 127/255 and 128/255, differ by 0.4 %.
MEAN = 0.5
STD = 0.5
SIDE = 224  # pixels
# A crop's area is a share of its image: of a photograph, or for small crops of its quarter.
CROP = RandomResizedCrop(SIDE, (0.2, 1.0), interpolation=InterpolationMode.BICUBIC)
SMALL_CROP = RandomResizedCrop(64, (0.02, 0.25), interpolation=InterpolationMode.BICUBIC)
MISSING = "is not installed: pip install '.[bench]'"

# Two halves with similar content.
PHOTOGRAPHS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "skimage/data": (
            "camera.png",
            "chelsea.png",
            "clock_motion.png",
            "coins.png",
            "gravel.png",
            "motorcycle_left.png",
            "page.png",
            "retina.jpg",
            "rocket.jpg",
        ),
        "matplotlib/mpl-data/sample_data": ("grace_hopper.jpg",),
    },
    {
        "skimage/data": (
            "astronaut.png",
            "brick.png",
            "coffee.png",
            "grass.png",
            "hubble_deep_field.jpg",
            "ihc.png",
            "moon.png",
            "text.png",
        ),
        "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
    },
)


def photographs(half: int) -> dict[str, Image.Image]:
    """Return the photographs of a half: file name -> RGB image."""
    images = {}
    for location, names in PHOTOGRAPHS[half].items():
        package, _, folder = location.partition("/")
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"error: {package} {MISSING}")
        for name in names:
            with Image.open(Path(spec.submodule_search_locations[0], folder, name)) as image:
                images[name] = image.convert("RGB")
    return images


def quarters(half: int) -> list[Image.Image]:
    """Return four images of each photograph of a half."""
    images = []
    for image in photographs(half).values():
        width = image.width // 2
        height = image.height // 2
        for left in (0, width):
            for top in (0, height):
                images.append(image.crop((left, top, left + width, top + height)))
    return images


def crops(half: int, count: int, *, seed: int) -> list[Image.Image]:
    """Return random crops of SIDE x SIDE pixels, of the half's photographs in turn."""
    return random_crops([*photographs(half).values()], CROP, count, seed=seed)


def small_crops(half: int, count: int, *, seed: int) -> list[Image.Image]:
    """Return random crops of 64 x 64 pixels, of the quarters of the half's photographs in turn."""
    return random_crops(quarters(half), SMALL_CROP, count, seed=seed)


def random_crops(
    images: Sequence[Image.Image], crop: RandomResizedCrop, count: int, *, seed: int
) -> list[Image.Image]:
    """Crop each image in turn, in a random order, `count` times in all."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        order = torch.randperm(len(images)).tolist()
        return [crop(images[order[index % len(images)]]) for index in range(count)]


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """Return images (N, 3, rows, columns), normalised for the networks."""
    return (torch.stack([to_tensor(image) for image in images]) - MEAN) / STD


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits (N, classes) in float64."""
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in images.split(BATCH)]).double()


def compare_logits(old: Tensor, new: Tensor) -> dict[str, float]:
    """Measure how far the new network's logits (N, classes) are from the old one's."""
    log_old = old.log_softmax(1)
    log_new = new.log_softmax(1)
    return {
        "same_top1": float((old.argmax(1) == new.argmax(1)).double().mean()),
        "kl": float((log_old.exp() * (log_old - log_new)).sum(1).mean()),  # nats
        "logits_error": float((new - old).norm() / old.norm()),
    }
