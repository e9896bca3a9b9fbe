"""A comparison finds effects that are planted in the data, and finds none if there is nothing to
learn.
"""

import random
from pathlib import Path

import pytest
from PIL import Image

from ..command_line import run
from .comparisons import read_comparison

pytestmark = [
    pytest.mark.slow,
    # timm does not close image files.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
SIDE = 24  # pixels
IMAGES = 96  # two thirds are for training
NETWORK = """
from torch import nn

def net(num_classes):
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
    return nn.Sequential(
        nn.Conv2d(3, 16, 1), depthwise, nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
    )
"""


def lagged_noise(lags: tuple[int, int], *, shuffled: bool) -> None:
    """Write images of noise, in which a pixel is the inverse of the one `lag` columns before it.

    Each class has its own lag. With `shuffled`, classes are random.
    """
    draw = random.Random(0)
    for index in range(IMAGES):
        lag = lags[index % 2]
        pixels = []
        for _ in range(SIDE):
            row = [draw.choice((0, 255)) for _ in range(lag)]
            for column in range(lag, SIDE):
                row.append(255 - row[column - lag])
            pixels += row
        label = draw.randrange(2) if shuffled else index % 2
        folder = Path("noise", "train" if index < 2 * IMAGES // 3 else "validation", str(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.frombytes("L", (SIDE, SIDE), bytes(pixels)).save(folder / f"{index}.png")


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """A function that compares the network with 9x9 windows on the images in `noise`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("planted.py").write_text(NETWORK)

    def compare(options):
        arguments = (
            "--data noise --sizes 9 --batch-size 16 --device cpu --input-size 3x24x24 --output out"
        )
        run("compare", "planted:net", *arguments.split(), *options.split())
        return read_comparison(tmp_path / "out")

    return compare


# A 3x3 kernel relates columns up to 2 apart, and a 9x9 kernel columns up to 8 apart. A single
# element, which spreads over two cells, relates only columns 1 apart.
@pytest.mark.parametrize(
    ("lags", "shuffled", "count", "expected"),
    [
        ((3, 4), False, 20, ["helps by"]),
        ((2, 4), False, 1, ["harms by"]),
        ((3, 4), True, 20, ["no difference", "too few seeds", "too few test images"]),
    ],
    ids=["gain", "loss", "nothing"],
)
def test_planted_effects_are_found(compared, lags, shuffled, count, expected):
    lagged_noise(lags, shuffled=shuffled)
    training = "--epochs 12 --lr 0.03 --augmentation none --positions uniform"
    sentence = compared(f"{training} --kernel-count {count}").arms[1].sentence
    assert any(phrase in sentence for phrase in expected), sentence


def test_equal_networks_have_equal_runs(compared):
    """With a learning rate of 0, trainable positions stay where they are, like frozen ones."""
    lagged_noise((2, 4), shuffled=False)
    all_runs = compared("--ablate --position-lr-scale 0 --epochs 1 --seeds 2").runs
    runs = {(run.arm.kind, run.seed): run for run in all_runs}
    for seed in range(2):
        moving = runs["converted", seed]
        frozen = runs["frozen", seed]
        assert (moving.loss, moving.top1, moving.right) == (frozen.loss, frozen.top1, frozen.right)
