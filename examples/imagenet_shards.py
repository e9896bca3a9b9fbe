"""Pack ImageNet, or any folder of images by class, into WebDataset shards.

They are for timm's train.py --dataset wds/NAME.

    python examples/imagenet_shards.py SOURCE SHARDS [--shards 1024] [--validation-shards 64]

SOURCE has the folders `train` and `val` (or `validation`), each with a folder for every class.
Classes are numbered in the order of their names, as everywhere. Files are copied as they are, in an
order shuffled with a fixed seed. `_info.json` in SHARDS tells timm how many images each split has,
so that train.py needs no more than --data-dir.
"""

import argparse
import io
import json
import random
import sys
import tarfile
from pathlib import Path

ENDINGS = {".jpeg", ".jpg", ".png", ".webp"}


def images_by_class(folder: Path) -> list[tuple[Path, int]]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [
        (path, index)
        for index, name in enumerate(classes)
        for path in sorted(name.iterdir())
        if path.suffix.lower() in ENDINGS
    ]
    if not found:
        sys.exit(f"error: {folder}: no images in folders of classes ({', '.join(sorted(ENDINGS))})")
    return found


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    shard.addfile(entry, io.BytesIO(content))


def pack(
    images: list[tuple[Path, int]], split: str, target: Path, shards: int
) -> dict[str, object]:
    """Write the shards of one split; returns what `_info.json` has about it."""
    random.Random(0).shuffle(images)
    names, lengths = [f"{split}-{index:04d}.tar" for index in range(shards)], []
    for index, name in enumerate(names):
        with tarfile.open(target / name, "w") as shard:
            part = images[index::shards]
            for number, (path, label) in enumerate(part):
                key = f"{split}-{index:04d}-{number:05d}"
                ending = path.suffix.lower().replace("jpeg", "jpg")
                add(shard, f"{key}{ending}", path.read_bytes())
                add(shard, f"{key}.cls", str(label).encode())
        lengths.append(len(part))
        print(f"\r{name}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {"name": split, "num_samples": len(images), "filenames": names, "shard_lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--shards", type=int, default=1024, help="of the training images")
    parser.add_argument("--validation-shards", type=int, default=64)
    given = parser.parse_args()
    folders = {"train": given.source / "train", "validation": given.source / "validation"}
    if not folders["validation"].is_dir():
        folders["validation"] = given.source / "val"
    counts = {"train": given.shards, "validation": given.validation_shards}
    for folder in folders.values():
        if not folder.is_dir():
            sys.exit(f"error: {folder}: there is no such folder")
    images = {split: images_by_class(folder) for split, folder in folders.items()}
    for split, found in images.items():
        if not 1 <= counts[split] <= len(found):
            sys.exit(
                f"error: {counts[split]} shards of {split}: "
                f"must be from 1 to the number of images, {len(found)}"
            )
    given.target.mkdir(parents=True, exist_ok=True)
    splits = {
        split: pack(found, split, given.target, counts[split]) for split, found in images.items()
    }
    (given.target / "_info.json").write_text(json.dumps({"splits": splits}, indent=1))


if __name__ == "__main__":
    main()
