"""Pack ImageNet, or any folder of images by class, into WebDataset shards.

timm's train.py reads them with --dataset wds/NAME.

    python examples/imagenet_shards.py SOURCE SHARDS [--shards 1024] [--validation-shards 64]

SOURCE has the folders `train` and `val` (or `validation`), each with a folder for every class.
Classes are numbered in the order of their names, as usual. Files are copied as they are, in an
order shuffled with a fixed seed. `_info.json` in SHARDS tells timm how many images each split has,
so that train.py needs only --data-dir.
"""

import argparse
import io
import json
import random
import sys
import tarfile
from pathlib import Path

ENDINGS = {".jpeg", ".jpg", ".png", ".webp"}
# How the names of hidden files begin, and of folders that systems make; in lower case.
NO_DATA = (".", "#recycle", "$recycle.bin", "@eadir", "__macosx", "lost+found", "system volume")


def visible(folder: Path) -> list[Path]:
    """Return what the folder contains, sorted; hidden files and systems' folders are no data."""
    return sorted(path for path in folder.iterdir() if not path.name.lower().startswith(NO_DATA))


def images_by_class(folder: Path) -> list[tuple[Path, int]]:
    class_folders = [path for path in visible(folder) if path.is_dir()]
    images = []
    for label, class_folder in enumerate(class_folders):
        for path in visible(class_folder):
            if path.suffix.lower() in ENDINGS:
                images.append((path, label))
    if not images:
        sys.exit(f"error: {folder}: no images in folders of classes ({', '.join(sorted(ENDINGS))})")
    return images


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    shard.addfile(entry, io.BytesIO(content))


def pack(
    images: list[tuple[Path, int]], split: str, target: Path, shards: int
) -> dict[str, object]:
    """Write the shards of one split; return the entry of the split in `_info.json`."""
    random.Random(0).shuffle(images)
    names = [f"{split}-{index:04d}.tar" for index in range(shards)]
    lengths = []
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
    parser.add_argument("--shards", type=int, default=1024, help="shards of training images")
    parser.add_argument("--validation-shards", type=int, default=64)
    options = parser.parse_args()
    folders = {"train": options.source / "train", "validation": options.source / "validation"}
    if not folders["validation"].is_dir():
        folders["validation"] = options.source / "val"
    counts = {"train": options.shards, "validation": options.validation_shards}
    for folder in folders.values():
        if not folder.is_dir():
            sys.exit(f"error: {folder}: there is no such folder")
    images = {split: images_by_class(folder) for split, folder in folders.items()}
    for split, images_of_split in images.items():
        if not 1 <= counts[split] <= len(images_of_split):
            sys.exit(
                f"error: {counts[split]} shards of {split}: "
                f"must be from 1 to the number of images, {len(images_of_split)}"
            )
    options.target.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, images_of_split in images.items():
        splits[split] = pack(images_of_split, split, options.target, counts[split])
    (options.target / "_info.json").write_text(json.dumps({"splits": splits}, indent=1))


if __name__ == "__main__":
    main()
