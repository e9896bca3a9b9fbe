"""Exported files state what their users need, and nothing about the machine that made them."""

import json
import shutil
import zipfile
from pathlib import Path

import onnx
import pytest
import torch

import dcls_convert
from dcls_convert.checkpoints.folder import CONFIG
from dcls_convert.export.fold import fold_checkpoint
from dcls_convert.export.pt2 import METADATA

from ..checkpoints.folders import IMAGE, edit_json, seal

CLASSES = 1000  # of the checkpoint "convnext"
NAMES = [f"class {index}" for index in range(CLASSES)]
# Keyword arguments of `fold_checkpoint`.
ONNX = {"format": "onnx"}
PT2 = {"format": "pt2"}
EXPORTS = [PT2, pytest.param(ONNX, marks=pytest.mark.slow)]


def facts_of(written):
    return facts_of_file(Path(written.output))


def facts_of_file(file):
    if Path(file).suffix == ".onnx":
        return {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    extra = {METADATA: ""}
    torch.export.load(file, extra_files=extra)
    return json.loads(extra[METADATA])


def as_strings(facts):
    strings = {}
    for name, fact in facts.items():
        strings[name] = fact if isinstance(fact, str) else json.dumps(fact)
    return strings


@pytest.fixture
def labelled(tmp_path, checkpoints):
    folder = tmp_path / "labelled"
    shutil.copytree(checkpoints / "convnext", folder)
    labels = {"label_names": NAMES, "label_descriptions": {"class 0": "a tench"}}
    edit_json(folder / CONFIG, lambda config: config["pretrained_cfg"].update(labels))
    return folder


@pytest.mark.parametrize("arguments", EXPORTS)
def test_the_file_states_the_checkpoints_preprocessing_and_classes(labelled, arguments):
    written = fold_checkpoint(labelled, **arguments)
    stated = json.loads((labelled / CONFIG).read_text())["pretrained_cfg"]
    facts = {
        "dcls_convert_version": dcls_convert.__version__,
        "base_model": "timm:test_convnext",
        "input_name": "input" if written.format == "onnx" else "x",
        "input_size": list(IMAGE),
        "mean": stated["mean"],
        "std": stated["std"],
        "interpolation": stated["interpolation"],
        "crop_pct": stated["crop_pct"],
        "crop_mode": stated["crop_mode"],
        "class_names": NAMES,
        "class_descriptions": {"class 0": "a tench"},
    }
    expected = as_strings(facts) if written.format == "onnx" else facts
    assert facts_of(written) == expected


@pytest.mark.parametrize("arguments", EXPORTS)
def test_the_file_omits_what_the_checkpoint_does_not_state(checkpoints, arguments):
    written = fold_checkpoint(checkpoints / "Plain", trust_code=True, **arguments)
    assert facts_of(written).keys() == {
        "dcls_convert_version",
        "base_model",
        "input_name",
        "input_size",
    }


def test_class_names_and_means_for_another_head_or_stem_are_omitted(labelled):
    other = {"label_names": NAMES[:10], "mean": [0.5], "std": [0.5]}
    edit_json(labelled / CONFIG, lambda config: config["pretrained_cfg"].update(other))
    seal(labelled)
    facts = facts_of(fold_checkpoint(labelled, **PT2))
    assert not {"class_names", "mean", "std"} & facts.keys()
    assert "interpolation" in facts


def test_class_names_are_read_from_where_timms_savers_write_them(labelled):
    edit_json(labelled / CONFIG, lambda config: config.update(label_names=NAMES[::-1]))
    assert facts_of(fold_checkpoint(labelled, **PT2))["class_names"] == NAMES[::-1]


@pytest.mark.parametrize("arguments", EXPORTS)
@pytest.mark.parametrize("name", ["convnext", "Branching"])
def test_no_file_has_paths_of_the_machine_that_made_it(checkpoints, name, arguments):
    written = fold_checkpoint(checkpoints / name, trust_code=True, **arguments)
    parts = [Path(written.output).read_bytes()]
    if written.format == "pt2":
        with zipfile.ZipFile(written.output) as archive:
            parts = [archive.read(member) for member in archive.namelist()]
    for file in (torch.__file__, __file__):
        for folder in Path(file).parents[:2]:
            assert not any(str(folder).encode() in part for part in parts), folder
