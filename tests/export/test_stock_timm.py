"""Folding for stock timm: a folder that timm loads alone, or else a folded checkpoint."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf

import dcls_convert.export.stock_timm
from dcls_convert import load_converted, predict_report
from dcls_convert.checkpoints.folder import CARD, CONFIG, FILES, REPORT, WEIGHTS
from dcls_convert.errors import CheckpointError, DclsConvertError
from dcls_convert.export.fold import fold_folder
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.running.compare_outputs import max_relative_error

from ..checkpoints.folders import IMAGE, convert, outputs, save
from ..conftest import TINY
from ..rules import rules_of
from .running import FLOAT32_ERROR

LATE_STAGES = rules_of(
    {"match": {"stage": "stages.[23]", "kind": "depthwise"}, "dilated_size": 9},
    {"match": {"stage": "stages.1", "kind": "depthwise"}, "dilated_size": 11},
)
STOCK_TIMM = """
import sys

sys.modules["dcls_convert"] = None  # as if it were not installed
import timm
import torch

torch.set_num_threads(1)
model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
assert not timm.is_model("dcls_convert")
with torch.no_grad():
    torch.save(model(torch.load("images.pt")), "outputs.pt")
"""


def outputs_by_stock_timm(folder, images):
    """Run the folder's model in a process that has timm and torch, but not this package."""
    torch.save(images, "images.pt")
    code = STOCK_TIMM.format(folder=folder)
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    return torch.load("outputs.pt")


@pytest.mark.processes
def test_stock_timm_loads_a_folded_convnext(checkpoints):
    written = fold_folder(checkpoints / "convnext", "timm")
    assert (written.kind, written.output, written.kernel_args) == (
        "stock timm",
        "convnext-folded",
        {"kernel_sizes": 9},
    )
    folder = Path("convnext-folded")
    assert {path.name for path in folder.iterdir()} == {CONFIG, WEIGHTS, CARD}
    images = torch.randn(2, *IMAGE)
    original = load_converted(checkpoints / "convnext").eval()
    with torch.no_grad():
        expected = original(images)
    by_timm = outputs_by_stock_timm(folder.resolve(), images)
    assert max_relative_error(expected, by_timm) < FLOAT32_ERROR
    assert "import dcls_convert" not in (folder / CARD).read_text()
    assert written.params_before == sum(p.numel() for p in original.parameters())
    config, before = (
        json.loads((path / CONFIG).read_text()) for path in (folder, checkpoints / "convnext")
    )
    assert (config["architecture"], config["model_args"]) == (TINY, {"kernel_sizes": 9})
    assert config["pretrained_cfg"] == before["pretrained_cfg"]


def test_stock_timm_gets_one_size_per_stage_and_the_models_own_arguments(tmp_path):
    model, plan = convert(args={"num_classes": 7, "in_chans": 1}, rules=LATE_STAGES, size="auto")
    save(tmp_path / "in", model, plan, check=False)
    written = fold_folder(tmp_path / "in", "timm", tmp_path / "out")
    assert (written.kind, written.kernel_args) == ("stock timm", {"kernel_sizes": [7, 11, 9, 9]})
    loaded = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert outputs(loaded, 1).shape == (1, 7)
    assert max_relative_error(outputs(model, 1), outputs(loaded, 1)) < FLOAT32_ERROR


def test_windows_of_the_old_kernels_size_need_no_argument(tmp_path):
    save(tmp_path / "in", *convert("timm:test_resnet", 3), check=False)
    written = fold_folder(tmp_path / "in", "timm", tmp_path / "out")
    assert (written.kind, written.kernel_args) == ("stock timm", {})
    with pytest.raises(CheckpointError, match="is folded for timm already, or was never converted"):
        fold_folder(tmp_path / "out", "timm", tmp_path / "again")


def test_matching_shapes_are_not_enough_for_stock_timm(tmp_path, monkeypatch, checkpoints):
    """timm's model is run and compared: here it is another network with the same shapes."""
    build = dcls_convert.export.stock_timm.build_model

    def another_network(source, *, pretrained=False, **options):
        model = build(source, pretrained=pretrained, **options)
        if pretrained:
            model.stages[1].blocks[0].gamma.data.mul_(2)
        return model

    monkeypatch.setattr(dcls_convert.export.stock_timm, "build_model", another_network)
    written = fold_folder(checkpoints / "convnext", "timm", tmp_path / "out")
    assert written.kind == "dcls"
    assert "kernel_sizes=9: the outputs' relative error is" in written.note
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(FILES)


def test_other_architectures_become_a_folded_checkpoint(tmp_path, checkpoints):
    written = fold_folder(checkpoints / "efficientnet", "timm", tmp_path / "out")
    assert written.kind == "dcls"
    assert "stem_kernel_size" in written.note
    original = load_converted(checkpoints / "efficientnet").eval()
    loaded = load_converted(tmp_path / "out").eval()
    by_timm = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    for folded in (loaded, by_timm):
        assert not any(isinstance(module, DclsConvNd) for module in folded.modules())
        assert max_relative_error(outputs(original), outputs(folded)) < FLOAT32_ERROR
    plan = dcls_convert.checkpoints.folder.open_folder(tmp_path / "out").plan
    assert plan.folded
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report == replace(predict_report(plan), output=".").to_dict()
    assert "The model is folded" in (tmp_path / "out" / CARD).read_text()


def test_force_replaces_folders_of_both_kinds(tmp_path, checkpoints):
    out = tmp_path / "out"
    for name in ("convnext", "Plain", "convnext"):
        if out.exists():
            with pytest.raises(DclsConvertError, match="already exists"):
                fold_folder(checkpoints / name, "timm", out, trust_code=True)
        kind = fold_folder(checkpoints / name, "timm", out, force=True, trust_code=True).kind
        assert kind == ("stock timm" if name == "convnext" else "dcls")
        assert (out / REPORT).exists() is (name == "Plain")
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_written_by_another_program_is_not_replaced(tmp_path, checkpoints):
    save_for_hf(timm.create_model(TINY), tmp_path / "out", safe_serialization=True)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(DclsConvertError, match="was not written by dcls-convert"):
        fold_folder(checkpoints / "convnext", "timm", tmp_path / "out", force=True)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
