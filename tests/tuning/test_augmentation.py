"""The augmentations that we recommend run with the installed Pillow, even at the largest magnitude
that they can draw.
"""

import random
import re
from pathlib import Path

import pytest
from PIL import Image
from timm.data import create_transform

from dcls_convert.tuning.training_images import AUGMENTATIONS

RECIPES = (Path(__file__).parents[2] / "examples/imagenet.md").read_text()
RECOMMENDED = {*re.findall(r"--aa ([\w.-]+)", RECIPES), AUGMENTATIONS["strong"]["auto_augment"]}


@pytest.mark.parametrize("name", sorted(RECOMMENDED))
def test_all_operations_run_at_the_largest_magnitude(monkeypatch, name):
    transform = create_transform((3, 32, 32), is_training=True, auto_augment=name)
    (augmentation,) = [part for part in transform.transforms if hasattr(part, "ops")]
    image = Image.radial_gradient("L").convert("RGB")
    # Six deviations: one draw in a billion is larger.
    monkeypatch.setattr(random, "gauss", lambda mean, deviation: mean + 6 * deviation)
    for operation in augmentation.ops:
        operation.prob = 1.0
        assert operation(image).size == image.size
