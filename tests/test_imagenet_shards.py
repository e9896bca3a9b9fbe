"""examples/imagenet_shards.py packs what is data."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "imagenet_shards.py"


def test_hidden_folders_and_files_are_no_data(tmp_path):
    for name in (
        "cat/1.png",
        "dog/2.png",
        "cat/._1.png",
        ".ipynb_checkpoints/3.png",
        "@eaDir/4.png",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    images_by_class = runpy.run_path(str(EXAMPLE))["images_by_class"]
    assert images_by_class(tmp_path) == [(tmp_path / "cat/1.png", 0), (tmp_path / "dog/2.png", 1)]
