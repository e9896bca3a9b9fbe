"""Emoji of four vendors as a data set: python benchmarks/emoji.py FOLDER [--test VENDOR] [--packages FOLDER]

FOLDER gets `train`, with a folder for each emoji of a thing (an animal, a dish, a place ...) that has it as three
vendors draw it, and `validation`, with that of the fourth: 64 x 64 pixels, on white. The pictures are of the npm
registry's packages emoji-datasource-VENDOR, which npm fetches, or which lie in the folder of --packages.

Then, in benchmarks/:

    dcls-convert compare emoji:small_convnext --data FOLDER --input-size 3x64x64 --sizes 17,9 --seeds 3
"""

import argparse
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

import timm
from PIL import Image
from torch import nn

VENDORS = ("apple", "facebook", "google", "twitter")
VERSION = "16.0.0"
SIDE = 64  # pixels
THINGS = ("Animals & Nature", "Food & Drink", "Travel & Places", "Activities", "Objects")  # not faces, flags, signs


def small_convnext(num_classes: int = 1000, **options: object) -> nn.Module:
    """A ConvNeXt for small images: maps of 32, 16, 8 and 4 cells; a million parameters."""
    dims = {"depths": (1, 1, 3, 1), "dims": (24, 48, 96, 192), "patch_size": 2}
    return timm.create_model("convnext_atto", num_classes=num_classes, **dims, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--test", choices=VENDORS, default="apple")
    parser.add_argument("--packages", type=Path, help="folder of emoji-datasource-VENDOR-VERSION.tgz")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as fetched:
        packages = options.packages or Path(fetched)
        for vendor in VENDORS if options.packages is None else ():
            name = f"emoji-datasource-{vendor}@{VERSION}"
            subprocess.run(["npm", "pack", "--silent", name], cwd=fetched, check=True)
        archives = {one: tarfile.open(packages / f"emoji-datasource-{one}-{VERSION}.tgz") for one in VENDORS}
        names = json.load(archives[VENDORS[0]].extractfile("package/emoji.json"))
        things = [one for one in names if one["category"] in THINGS]
        shared = [one["image"] for one in things if all(one[f"has_img_{vendor}"] for vendor in VENDORS)]
        for vendor, archive in archives.items():
            split = "validation" if vendor == options.test else "train"
            members = {member.name: member for member in archive}
            for image in shared:
                picture = Image.open(archive.extractfile(members[f"package/img/{vendor}/{SIDE}/{image}"]))
                picture = picture.convert("RGBA").resize((SIDE, SIDE))
                folder = options.folder / split / Path(image).stem
                folder.mkdir(parents=True, exist_ok=True)
                white = Image.new("RGBA", picture.size, "white")
                Image.alpha_composite(white, picture).convert("RGB").save(folder / f"{vendor}.png")
    print(f"{len(shared)} emoji, {len(VENDORS) - 1} vendors to learn from, {options.test} to test")


if __name__ == "__main__":
    main()
