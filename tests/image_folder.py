"""A folder of images of two classes, for training and validation."""

from pathlib import Path

from PIL import Image


def write_images(folder: Path) -> None:
    """Write 16 images for training, and 4 for validation."""
    for index in range(20):
        split = "validation" if index % 5 == 4 else "train"
        path = folder / split / ("dark" if index % 2 else "light") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((64, 64), 20 + 5 * index).convert("RGB").save(path)
