"""Folding keeps the outputs of a model, whether our function folds it or timm's."""

import copy
import pickle
from dataclasses import replace

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.utils import reparameterize_model
from torch import nn

from dcls_convert import (
    PlanError,
    apply_plan_,
    convert_,
    find_convs,
    fold_to_dense_,
    plan_conversion,
)
from dcls_convert.conversion.provenance import PROVENANCE_ATTRIBUTE
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.layers.position_parameters import clamp_positions_
from dcls_convert.reports.report import predict_report
from dcls_convert.running.compare_outputs import max_relative_error

from ..conftest import TINY
from ..model_state import state_of
from ..reports.measured import measure_report

FLOAT64_ERROR = 1e-12  # relative: some thousand roundings of 2e-16
FLOAT32_ERROR = 1e-5  # relative: kernels are rounded, and sums have another order
IMAGE = (3, 32, 32)


def with_random_values(model):
    """Change all values, as a training would, and return the model in evaluation mode."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    clamp_positions_(model)
    return model.eval()


def outputs(model, size=IMAGE):
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return model(images.to(next(model.parameters()).dtype))


def position_entries(model):
    return [name for name in model.state_dict() if "dcls_" in name or "positions" in name]


class Stage(nn.Module):
    def __init__(self, dims):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first = conv(4, 4, 3, padding=1, stride=2, groups=4)
        self.others = nn.Sequential(conv(4, 4, 3, padding="same", groups=4, bias=False), nn.Tanh())
        self.last = conv(4, 4, 3, padding=1, groups=4, padding_mode="circular")

    def forward(self, x):
        return self.last(self.others(self.first(x)))


def converted():
    """Make a model of two `Stage` modules, whose six layers have tied positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Stage(2), Stage(2)), nn.Tanh())
    convert_(model, dilated_size=7, input_size=IMAGE, init="random", positions="uniform")
    return with_random_values(model)


def test_a_layer_with_a_forward_of_its_own_is_refused_before_anything_changes():
    model = converted()
    model[1][1].last.forward = lambda x: x
    before = state_of(model)
    with pytest.raises(PlanError, match=r"^1.1.last cannot be folded: it has a forward of its own"):
        fold_to_dense_(model)
    assert state_of(model) == before


SETTINGS = [("stride", 3), ("dilation", (2, 1)), ("padding_mode", "circular"), ("padding", (2, 5))]


@pytest.mark.parametrize(("setting", "value"), SETTINGS)
def test_a_layer_obeys_what_is_set_after_the_conversion(setting, value):
    """As the convolution with the layer's kernel does."""
    layer = converted()[1][0].first
    images = torch.randn(2, 4, 12, 15)
    plain = nn.Conv2d(4, 4, 7, **({"stride": 2, "padding": 3, "groups": 4} | {setting: value}))
    plain.load_state_dict(layer.fuse().state_dict())
    setattr(layer, setting, value)
    for module in (layer, pickle.loads(pickle.dumps(layer)), layer.fuse()):
        torch.testing.assert_close(module(images), plain(images))


@pytest.mark.parametrize(
    ("dims", "tie", "interpolation"),
    [
        (1, "stage", "bilinear"),
        (2, "stage", "gaussian"),
        (2, "none", "bilinear"),
        (3, "stage", "triangle"),
    ],
)
def test_folding_and_a_folded_plan_agree_in_outputs_and_report(dims, tie, interpolation):
    size = (4, 17, 16, 15)[: dims + 1]
    model = nn.Sequential(nn.Sequential(Stage(dims), Stage(dims)), nn.Tanh()).double()
    unconverted = copy.deepcopy(model)
    plan = plan_conversion(
        find_convs(model, size), dilated_size=7, tie=tie, interpolation=interpolation
    )
    assert all((layer.tie_group is not None) == (tie == "stage") for layer in plan.layers)
    apply_plan_(model, plan, init="random", positions="uniform")
    expected = outputs(with_random_values(model), size)
    assert fold_to_dense_(model) == 6
    assert max_relative_error(expected, outputs(model, size)) < FLOAT64_ERROR
    assert not position_entries(model)
    folded_plan = replace(plan, folded=True)
    apply_plan_(unconverted, folded_plan, init="random")
    unconverted.load_state_dict(model.state_dict())
    assert torch.equal(outputs(unconverted.eval(), size), outputs(model, size))
    report = predict_report(folded_plan)
    assert report.to_dict() == measure_report(model, folded_plan)
    assert report.to_dict() == measure_report(unconverted, folded_plan)


def test_timms_saver_writes_a_folded_model_that_timm_loads(tmp_path):
    model = timm.create_model(TINY)
    convert_(model, input_size=IMAGE, init="random", positions="uniform", dilated_size=9)
    expected = outputs(with_random_values(model))
    save_for_hf(model, tmp_path / "before", safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'before'}", pretrained=True).eval()
    for number, folded in enumerate([model, loaded]):
        fold_to_dense_(folded)
        save_for_hf(folded, tmp_path / str(number), safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path / str(number)}", pretrained=True)
        assert not position_entries(again)
        assert torch.equal(outputs(again.eval()), outputs(folded))
        assert max_relative_error(expected, outputs(again)) < FLOAT32_ERROR
    # Of ours, the folded network keeps only the record of its conversion.
    assert vars(model).keys() - vars(timm.create_model(TINY)).keys() == {PROVENANCE_ATTRIBUTE}


def test_reparameterize_model_keeps_the_outputs_of_plain_networks():
    """timm calls `fuse` of each layer."""
    model = converted().double()
    expected = outputs(model)
    folded = reparameterize_model(model)
    assert not any(isinstance(module, DclsConvNd) for module in folded.modules())
    assert max_relative_error(expected, outputs(folded)) < FLOAT64_ERROR
    assert torch.equal(outputs(model), expected)
