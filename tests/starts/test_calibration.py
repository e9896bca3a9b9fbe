"""Calibration keeps a network's outputs for images, even in awkward cases."""

import copy
from functools import partial

import pytest
import torch
from timm.layers import StdConv2d
from torch import nn

from dcls_convert import DclsConvertError, apply_plan_, convert_, find_convs, plan_conversion
from dcls_convert.checkpoints.stored_weights import tensors_hash
from dcls_convert.placing.place import make_layers
from dcls_convert.progress import ignore_messages
from dcls_convert.starts import calibration as calibration_module
from dcls_convert.starts.calibration import measure_inputs
from dcls_convert.starts.images import Calibration

from ..model_state import state_of
from ..rules import rules_of
from .networks import INPUT_SIZE, network, output_error, smooth_noise


def test_layers_that_are_measured_in_parts_get_the_same_weights(monkeypatch):
    """Joint moments of dense convolutions take memory, so some layers are measured at a time."""
    states = []
    for max_floats in (calibration_module.MAX_FLOATS, 1):
        monkeypatch.setattr(calibration_module, "MAX_FLOATS", max_floats)
        model = with_convs(nn.Conv2d, network())
        options = {"init": "fit", "rules": "conv3x3", "tie": "none", "input_size": INPUT_SIZE}
        convert_(model, dilated_size=7, calibration=[smooth_noise()], **options)
        states.append(tensors_hash(model.state_dict().items()))
    assert states[0] == states[1]


def test_autocast_and_the_global_generator_do_not_matter():
    options = {"dilated_size": 9, "calibration": smooth_noise(3), "input_size": INPUT_SIZE}
    report = convert_(network(), **options)
    model = network()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert convert_(model, **options) == report
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_is_carried_out_with_images_in_any_form_as_in_one_call():
    images = smooth_noise()
    plan = plan_conversion(find_convs(network(), INPUT_SIZE), dilated_size=9)
    errors = []
    for form in (images, Calibration(batches=(images,))):
        report = apply_plan_(network(), plan, calibration=form)
        errors.append([layer.output_error for layer in report.layers])
    options = {"dilated_size": 9, "scope": "model", "input_size": INPUT_SIZE}
    report = convert_(network(), calibration=images, held_out=(), **options)
    assert errors == [[layer.output_error for layer in report.layers]] * 2
    with pytest.raises(DclsConvertError, match="has no values"):
        convert_(network().to("meta"), calibration=images, held_out=(), **options)


def test_layers_that_share_positions_count_alike_however_large_their_inputs_are():
    torch.manual_seed(0)
    convs = [nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False) for _ in range(2)]
    model = nn.Sequential(*convs)
    rules = rules_of({"stage_pattern": "(?P<both>[01])"})
    plan = plan_conversion(find_convs(model, (4, 16, 16)), rules, dilated_size=9)
    calibration = Calibration(batches=(torch.randn(4, 4, 16, 16),))
    roots = []
    for factor in (1, 1024):
        with torch.no_grad():
            convs[0].weight *= factor  # the second one's inputs are as many times larger
        (group,) = make_layers(model, plan)
        statistics = measure_inputs(model, [group], calibration, ignore_messages)
        roots.append(statistics.cost_roots(group))
    torch.testing.assert_close(*roots, rtol=1e-5, atol=1e-6)


def unchanged(model):
    return model


def zero_some_kernels_(model):
    for block in model[1]:
        block[0].weight.data[::2] = 0


AWKWARD = {
    "zero kernels": (zero_some_kernels_, smooth_noise()),
    "zero": (unchanged, torch.zeros(2, *INPUT_SIZE)),
    "small images": (unchanged, smooth_noise(4, size=3)),
    "bfloat16": (nn.Module.bfloat16, smooth_noise()),
    "float16": (nn.Module.half, smooth_noise()),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_cases_give_finite_tensors_of_the_same_dtype_and_similar_outputs(case):
    model = network()
    change, images = AWKWARD[case]
    change(model)
    dtype = model[0].weight.dtype
    with torch.no_grad():
        before = model(images.to(dtype)).float()
    calibration = Calibration(batches=(images,))
    convert_(model, dilated_size=9, budget=80, calibration=calibration, input_size=INPUT_SIZE)
    state = model.state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    kept = [name for name in state if not name.endswith(("num_batches_tracked", "positions"))]
    assert {state[name].dtype for name in kept} == {dtype}
    with torch.no_grad():
        after = model(images.to(dtype)).float()
    assert float((after - before).norm()) <= 0.6 * float(before.norm())


@pytest.mark.parametrize(
    ("scale", "images", "message"),
    [
        (60000, smooth_noise(), r"1\.\d\.0 has inputs that are not finite"),
        (1, torch.randn(2, 1, 24, 24), "does not accept the images"),
    ],
    ids=["overflow", "channels"],
)
def test_a_calibration_that_fails_names_the_problem_and_leaves_the_model_unchanged(
    scale, images, message
):
    model = network().half()
    model[1][1][0].weight.data *= scale
    before = state_of(model)
    with pytest.raises(DclsConvertError, match=message):
        convert_(model, dilated_size=9, calibration=[images], input_size=INPUT_SIZE)
    assert state_of(model) == before


def test_modes_are_kept_and_hooks_removed():
    model = network(bias=True).train()
    model[1][0][1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    convert_(model, dilated_size=9, calibration=[smooth_noise()], input_size=INPUT_SIZE)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "images",
    [
        smooth_noise(1),
        smooth_noise(5, size=12),
        torch.linspace(-1, 1, 10).reshape(-1, 1, 1, 1).expand(-1, *INPUT_SIZE),
    ],
    ids=["one", "half the size", "constant"],
)
def test_calibration_on_few_or_useless_images_is_not_worse_than_the_fit(images):
    unseen = smooth_noise(16, seed=1)
    before = network(stride=2)(unseen).detach()
    fitted = network(stride=2)
    calibrated = network(stride=2)
    options = {"dilated_size": 9, "budget": 60, "input_size": INPUT_SIZE}
    convert_(fitted, init="fit", **options)
    convert_(calibrated, scope="model", calibration=Calibration(batches=(images,)), **options)
    assert output_error(calibrated, before, unseen) <= 1.05 * output_error(fitted, before, unseen)


def with_convs(conv_class, model):
    for block in model[1]:
        block[0] = conv_class(8, 8, 3, padding=1, bias=False)
    return model


@pytest.mark.parametrize(
    ("change", "options", "solves_weights"),
    [
        (unchanged, {}, True),
        (unchanged, {"interpolation": "gaussian"}, True),
        (unchanged, {"interpolation": "triangle"}, True),
        (partial(with_convs, nn.Conv2d), {"rules": "conv3x3"}, True),
        (partial(with_convs, StdConv2d), {"rules": "conv3x3"}, False),
    ],
    ids=["bilinear", "gaussian", "triangle", "dense", "standardised"],
)
def test_images_bring_outputs_closer_for_all_kinds_of_layers(change, options, solves_weights):
    images = smooth_noise(12)
    unseen = smooth_noise(8, seed=1)
    model = change(network()).eval()
    with torch.no_grad():
        before = model(unseen)
    options = options | {
        "dilated_size": 7,
        "budget": 60,
        "scope": "model",
        "input_size": INPUT_SIZE,
    }
    errors = []
    for calibration in (None, [images]):
        converted = copy.deepcopy(model)
        convert_(converted, init="fit", calibration=calibration, **options)
        errors.append(output_error(converted, before, unseen))
    assert errors[1] <= errors[0]
    assert errors[1] < errors[0] or not solves_weights
