"""How training and test images are split, read and transformed."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision.transforms import RandomHorizontalFlip

from dcls_convert.errors import DclsConvertError
from dcls_convert.tuning.training_images import open_images, set_transforms_

from ..command_line import net

# timm does not close image files.
pytestmark = [
    pytest.mark.usefixtures("images_here"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


def test_images_of_16_bits_keep_their_shades(tmp_path):
    """timm's reader converts them with Pillow, which would make most pixels white."""
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    for number in range(10):
        for label in ("dark", "light"):
            path = tmp_path / "deep" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(ramp).save(path)
    data = open_images(tmp_path / "deep")
    set_transforms_(data, net(2), (3, 64, 64), "none")
    for part in (data.train, data.test):
        normalise = part.transform.transforms[-1]
        image = part[0][0] * torch.as_tensor(normalise.std).view(-1, 1, 1)
        shade = (image + torch.as_tensor(normalise.mean).view(-1, 1, 1)).mean()
        assert abs(float(shade) - 0.5) < 0.02


@pytest.mark.parametrize("augmentation", ["light", "strong"])
def test_the_share_of_mirrored_images_is_as_requested(augmentation):
    data = open_images(Path("images"))
    for mirrored in (0.0, 0.25):
        set_transforms_(data, net(2), (3, 32, 32), augmentation, mirrored=mirrored)
        shares = [
            step.p
            for step in data.train.transform.transforms
            if isinstance(step, RandomHorizontalFlip)
        ]
        assert shares == ([mirrored] if mirrored else [])


@pytest.mark.parametrize(("channels", "mode"), [(1, "RGB"), (3, "L")])
def test_images_have_the_channels_that_the_network_takes(channels, mode):
    data = open_images(Path("images"))
    size = (channels, 32, 32)
    set_transforms_(data, timm.create_model("test_convnext", in_chans=channels), size)
    for part in (data.train, data.test):
        assert part.transform(Image.new(mode, (40, 40))).shape == size
    with pytest.raises(DclsConvertError, match="images have 1 or 3 channels; the model takes 2"):
        set_transforms_(data, timm.create_model("test_convnext", in_chans=2), (2, 32, 32))


def test_without_split_folders_each_class_is_split(tmp_path):
    data = open_images(tmp_path / "images" / "train")
    assert data.classes == ("dark", "light")
    assert (len(data.train), len(data.test)) == (14, 2)
    paths = [{path for path, _ in part.reader.samples} for part in (data.train, data.test)]
    assert not paths[0] & paths[1]
    assert {label for _, label in data.test.reader.samples} == {0, 1}


def test_unreadable_images_are_reported_and_skipped_and_classes_need_training_images(tmp_path):
    folder = tmp_path / "images"
    notes = []
    intact = open_images(folder, note=notes.append)
    assert notes == []
    image = next((folder / "train/light").iterdir())
    (folder / "train/dark/cut.png").write_bytes(image.read_bytes()[:60])
    (folder / "train/dark/none.jpg").write_text("no image")
    damaged = open_images(folder, note=notes.append)
    assert damaged.train.reader.samples == intact.train.reader.samples
    (line,) = notes
    assert line.endswith("skipping 2 images that cannot be read: dark/cut.png, dark/none.jpg")
    (folder / "validation/dark").rename(folder / "validation/dusk")
    with pytest.raises(DclsConvertError, match="dusk: there are test images, but none to train on"):
        open_images(folder)
    (folder / "validation/dusk").rename(tmp_path / "dusk")
    notes.clear()
    light_only = open_images(folder, note=notes.append).test
    assert {label for _, label in light_only.reader.samples} == {1}
    assert notes[-1].endswith(": classes without images to test with: 1 (dark)")


def test_classes_too_small_for_test_images_are_reported(tmp_path):
    for label, images in {"a": 1, "b": 4, "c": 5, "d": 9, "e": 2, "f": 3}.items():
        folder = tmp_path / "classes" / label
        folder.mkdir(parents=True)
        for number in range(images):
            Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    notes = []
    data = open_images(tmp_path / "classes", note=notes.append)
    assert len(data.test) == 2
    (line,) = notes
    assert line.endswith(": classes without images to test with: 4 (a, b, e and 1 more)")
