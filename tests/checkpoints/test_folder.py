"""Checkpoint folders: dcls-convert and timm load what was saved; what cannot load is not saved."""

import json
import re
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.data import resolve_model_data_config
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dcls_convert import (
    apply_plan_,
    check_output,
    convert_,
    find_convs,
    load_converted,
    plan_conversion,
    predict_report,
    save_converted,
)
from dcls_convert.checkpoints.folder import CONFIG, FILES, WEIGHTS
from dcls_convert.checkpoints.verify import verify_folder as verify
from dcls_convert.errors import CheckpointError
from dcls_convert.export.fold import fold_folder
from dcls_convert.file_checks import builtin_rules

from ..conftest import TINY
from ..model_state import state_of
from .folders import convert, outputs, problems, same_states, save

FAMILIES = [
    (f"timm:{TINY}", 17, {"num_classes": 7, "in_chans": 1}),
    ("timm:test_efficientnet", 9, {}),
    ("timm:test_resnet", 7, {}),
    # Has modules with several names.
    ("timm:coat_lite_tiny", 9, {"img_size": 64, "serial_depths": [1, 1, 1, 1]}),
    ("torchvision:squeezenet1_1", 7, {"num_classes": 10}),
    ("torchvision:mnasnet0_5", 7, {}),  # reads a version in the state dict
]


def users_model():
    """Return a model of the user's own, with -inf in its mask."""
    convs = [nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*convs), nn.ReLU())
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    return model


def test_a_model_of_the_users_own_is_loaded_into_and_replaced_by_force_alone(tmp_path):
    for size, options in [(9, {}), (11, {"force": True})]:
        model = users_model()
        plan = convert_(model, dilated_size=size, init="random").plan
        save_converted(model, plan, tmp_path / "out", **options)
        assert same_states(load_converted(tmp_path / "out", model=users_model()), model)
        with pytest.raises(CheckpointError, match="out already exists; name another"):
            save_converted(model, plan, tmp_path / "out")
    with pytest.raises(CheckpointError, match="give the unconverted network, as model="):
        load_converted(tmp_path / "out")


@pytest.mark.parametrize(("name", "size", "args"), FAMILIES)
def test_a_loaded_model_equals_the_saved_one(tmp_path, name, size, args):
    model, plan = convert(name, size, args=args)
    folder = save(tmp_path / "out", model, plan, check=False)
    loaded = load_converted(folder)
    by_timm = timm.create_model(f"local-dir:{folder}", pretrained=True)
    channels = args.get("in_chans", 3)
    for other in (loaded, by_timm):
        assert other.training
        assert same_states(other, model)
        assert torch.equal(outputs(other, channels), outputs(model, channels))


def test_a_model_that_does_not_fit_stays_as_it_was(folder):
    model = timm.create_model(TINY, num_classes=7)
    before = state_of(model)
    with pytest.raises(CheckpointError, match="has shape"):
        load_converted(folder, model=model)
    assert state_of(model) == before


def test_the_report_in_a_folder_has_the_errors_that_the_start_left(tmp_path):
    model = timm.create_model(TINY)
    plan = plan_conversion(find_convs(model, (3, 32, 32)), dilated_size=9)
    report = apply_plan_(model, plan, init="largest")
    save_converted(model, plan, tmp_path / "out", report=report)
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    errors = [row["fit_error"] for row in stored["layers"]]
    assert errors == [layer.fit_error for layer in report.layers]
    assert min(errors) > 0


def test_the_contents_of_a_folder(converted, tmp_path):
    model, plan = converted
    folder = save_converted(model, plan, tmp_path / "deep" / "er" / "out")
    assert {path.name for path in folder.iterdir()} == set(FILES)
    config = json.loads((folder / CONFIG).read_text())
    assert config["architecture"] == "dcls_convert"
    assert config["model_args"]["plan"] == plan.to_dict()
    assert config["model_args"]["plan"]["rules_text"] == builtin_rules()["depthwise"].read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report == replace(predict_report(plan), output=".").to_dict()
    card = (folder / "README.md").read_text()
    assert f"{report['params']['after']:,}" in card
    assert "Install dcls-convert, as its README says. Then, in the folder" in card
    assert 'timm.create_model("local-dir:out", pretrained=True)' in card


def test_positions_that_a_last_step_left_outside_are_clamped_when_a_folder_is_written(tmp_path):
    model, plan = convert()
    positions = model.stages[0].blocks[0].conv_dw.positions
    with torch.no_grad():
        positions.add_(0.4)
    model.state_dict()
    assert positions.max() > 4
    stored = load_file(save(tmp_path / "out", model, plan) / WEIGHTS)
    assert stored["stages.0.blocks.0.conv_dw.positions"].max() == positions.max() == 4


def test_dtype_is_kept_and_used_for_comparison_and_channels_may_be_last(tmp_path):
    model, plan = convert("timm:test_resnet", 7)
    model = model.to(torch.bfloat16, memory_format=torch.channels_last)
    folder = save(tmp_path / "out", model, plan)
    stored = load_file(folder / WEIGHTS).values()
    dtypes = {tensor.dtype for tensor in stored if tensor.is_floating_point()}
    assert dtypes == {torch.bfloat16, torch.float32}  # the latter for positions
    verified = verify(folder)
    assert problems(verified) == []
    assert verified.checks[-1].detail.startswith("match the stored ones (difference 0.0e+00, ")
    assert verified.checks[-1].detail.endswith(" in bfloat16)")
    model.float()
    assert same_states(load_converted(folder), model)


def test_what_save_converted_would_refuse_is_refused_before_a_training(converted, tmp_path):
    folder = tmp_path / "out"
    check_output(folder)
    assert not folder.exists()
    save(folder, *converted)
    check_output(str(folder), force=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    refused = [
        (folder, False, "already exists"),
        (mine, True, "holds 'notes.txt', which dcls-convert does not write"),
        (folder / WEIGHTS / "below", False, "is not a folder"),
    ]
    for path, force, says in refused:
        with pytest.raises(CheckpointError, match=says) as before:
            check_output(path, force=force)
        with pytest.raises(CheckpointError, match=re.escape(str(before.value))):
            save(path, *converted, force=force)


ONE = torch.ones(1)


class Counter(nn.Module):
    def get_extra_state(self):
        return {"steps": 3}


NOT_FINITE = r"has \d+ of \d+ values that are NaN or infinite"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.to("meta"), "on the meta device, without values; a folder holds ordinary"),
        (
            lambda m: setattr(m.head.fc, "weight", nn.Parameter(TwoTensor(ONE, ONE))),
            r"head\.fc\.weight is of class TwoTensor, which .*; .* save the model before it is",
        ),
        (
            lambda m: m.add_module("counter", Counter()),
            r"counter\._extra_state is of type dict, not a tensor; .* out of its state dict",
        ),
        (lambda m: m.stem[0].weight.data[0].fill_(torch.nan), rf"stem\.0\.weight {NOT_FINITE}"),
        (lambda m: m.pretrained_cfg.update(crop_pct=torch.nan), "cannot be written as JSON"),
    ],
)
def test_what_could_not_be_loaded_is_not_written(converted, tmp_path, change, message):
    model, plan = converted
    change(model)
    with pytest.raises(CheckpointError, match=message) as refusal:
        save(tmp_path / "out", model, plan, check=False)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_the_size_that_a_network_was_trained_at_is_stated_and_exported(tmp_path):
    model = timm.create_model("test_convnext")
    plan = convert_(model, dilated_size=9, init="random", input_size=(3, 96, 96)).plan
    assert resolve_model_data_config(model)["input_size"] == (3, 96, 96)
    model.pretrained_cfg |= {"input_size": (3, 64, 64)}  # as after a training of one's own
    folder = save_converted(model, plan, tmp_path / "trained")
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert resolve_model_data_config(loaded)["input_size"] == (3, 64, 64)
    assert verify(folder).ok
    assert fold_folder(folder, "pt2", tmp_path / "folded.pt2").input_size == (3, 64, 64)
