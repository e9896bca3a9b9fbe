"""A folder with scikit-learn's digits, one folder for each class."""

from pathlib import Path

from PIL import Image


def write_digits(folder: Path, *, classes: int = 4, images: int = 10) -> None:
    """Write some images of the first classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(classes):
        (folder / str(label)).mkdir(parents=True)
        for number, pixels in enumerate(digits.images[digits.target == label][:images]):
            image = Image.fromarray((15 * pixels).astype("uint8"))
            image.resize((32, 32)).save(folder / str(label) / f"{number:03}.png")
