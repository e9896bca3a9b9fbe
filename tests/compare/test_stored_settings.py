"""The folder of a comparison accepts only runs with the same images, weights and rules."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file
from timm.data import dataset_factory

from ..command_line import NET, net, run

# timm does not close image files.
pytestmark = [
    pytest.mark.usefixtures("images_here"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
OPTIONS = ("--input-size", "3x32x32", "--batch-size", "4", "--device", "cpu", "--sizes", "9")
ONE_RUN = ("--epochs", "1", "--seeds", "1", "--only", "1/2", "--output", "out")


def compare(*arguments, code=0):
    """Run the command, and return the last line of its messages."""
    _, err = run("compare", NET, *arguments, *OPTIONS, *ONE_RUN, code=code)
    return err.splitlines()[-1]


def test_images_are_identified_by_their_files_wherever_they_are(tmp_path):
    compare("--data", "images")
    settings = json.loads(Path("out/settings.json").read_text())
    assert settings["data"] == "images"
    assert str(tmp_path) not in json.dumps(settings)
    shutil.copytree("images", "elsewhere/renamed")
    compare("--data", "elsewhere/renamed")

    shutil.copytree("images", "other/images")
    Image.new("RGB", (64, 64)).save("other/images/train/dark/1.png")
    refused = "error: output out: holds runs on other images than those of images; "
    assert compare("--data", "other/images", code=2).startswith(refused)
    shutil.copytree("images", "swapped/images")
    for part in ("train", "validation"):
        folder = Path("swapped/images", part)
        (folder / "dark").rename(folder / "was_dark")
        (folder / "light").rename(folder / "dark")
        (folder / "was_dark").rename(folder / "light")
    assert compare("--data", "swapped/images", code=2).startswith(refused)
    Path("other/images/train/dark/1.png").unlink()
    assert "with train images 16, not 15" in compare("--data", "other/images", code=2)


def test_data_sets_without_files_are_identified_by_their_names(monkeypatch):
    """Both data sets have ten classes, and equally many images of the same size."""

    class TenClasses:
        def __init__(self, **_):
            self.classes = self.class_to_idx = {str(digit): digit for digit in range(10)}
            self.transform = None

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return self.transform(Image.new("RGB", (28, 28))), index

    for name in ("mnist", "fashion_mnist"):
        monkeypatch.setitem(dataset_factory._TORCH_BASIC_DS, name, TenClasses)
    compare("--dataset", "torch/mnist", "--data", ".")
    refused = compare("--dataset", "torch/fashion_mnist", "--data", ".", code=2)
    assert "holds runs on other images than those of torch/fashion_mnist" in refused


def test_weights_are_identified_by_their_values():
    for epoch in (10, 90):
        folder = Path(f"epoch_{epoch}")
        folder.mkdir()
        save_file(net(2).state_dict(), folder / "model.safetensors")
    compare("--data", "images", "--checkpoint", "epoch_10/model.safetensors")
    refused = compare("--data", "images", "--checkpoint", "epoch_90/model.safetensors", code=2)
    assert "holds runs from other weights, though their name is the same, " in refused
    Path("epoch_10").rename("moved")
    compare("--data", "images", "--checkpoint", "moved/model.safetensors")


RULES = "format: 1\nrules:\n- match: {kind: depthwise, stage: stages.0}\n"


def test_rules_are_identified_by_their_contents_wherever_their_file_is(tmp_path):
    for name, text in (("one", RULES), ("two", RULES), ("other", RULES.replace("0}", "1}"))):
        Path(name).mkdir()
        Path(name, "rules.yaml").write_text(text)
    compare("--data", "images", "--rules", "one/rules.yaml")
    settings = json.loads(Path("out/settings.json").read_text())
    assert settings["planning"] == {"rules": "rules.yaml"}
    compare("--data", "images", "--rules", tmp_path / "two/rules.yaml")
    Path("two/rules.yaml").rename("moved.yaml")
    compare("--data", "images", "--rules", "moved.yaml")

    refused = "error: output out: holds runs by the rules of rules.yaml, which are not those of "
    for options, new_rules in (
        (("--rules", "other/rules.yaml"), "rules.yaml"),
        (("--rules", "depthwise"), "depthwise"),
        ((), "auto"),
    ):
        line = compare("--data", "images", *options, code=2)
        assert line == f"{refused}{new_rules} now; use the same or another --output"


def make_format_2_():
    """Convert the stored settings to format 2, which has no hash of the rules."""
    path = Path("out/settings.json")
    settings = json.loads(path.read_text()) | {"format": 2}
    del settings["rules_hash"]
    path.write_text(json.dumps(settings))


def test_a_folder_of_the_previous_format_without_rules_is_continued():
    compare("--data", "images")
    make_format_2_()
    compare("--data", "images")
    Path("rules.yaml").write_text(RULES)
    assert "by the rules of auto" in compare("--data", "images", "--rules", "rules.yaml", code=2)


def test_a_folder_of_the_previous_format_with_rules_is_refused():
    Path("rules.yaml").write_text(RULES)
    compare("--data", "images", "--rules", "rules.yaml")
    make_format_2_()
    for options in (("--rules", "rules.yaml"), ()):
        assert compare("--data", "images", *options, code=2) == (
            "error: output out: holds runs of an earlier dcls-convert, "
            "which did not record what rules.yaml says; use another --output"
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 1}, "holds runs of an earlier dcls-convert, "),
        ({"recipe_version": 0}, "holds runs with recipe version 0, not 1; "),
    ],
)
def test_runs_of_incompatible_versions_are_refused(changed, message):
    compare("--data", "images")
    path = Path("out/settings.json")
    settings = json.loads(path.read_text())
    if "format" in changed:
        for name in ("weights_hash", "images_hash", "recipe_version"):
            del settings[name]
    path.write_text(json.dumps(settings | changed))
    refused = compare("--data", "images", code=2)
    assert refused.startswith(f"error: output out: {message}")
