"""Uploads into the cache of the hub's client, which finds them there without a network."""

import hashlib
import shutil
from pathlib import Path


def upload(folder: Path, name: str, cache: Path) -> None:
    """Put all files of a folder into the cache as one commit, and point main at it."""
    files = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    sha = hashlib.sha1(repr(files).encode()).hexdigest()
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / sha)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(sha)
