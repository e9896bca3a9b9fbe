"""A network keeps its outputs for images: each channel's statistics, awkward cases by name, nothing
else changed.
"""

import contextlib
import copy
from functools import partial

import pytest
import torch
from timm.layers import StdConv2d
from torch import nn

from dcls_convert import (
    DclsConvertError,
    apply_plan_,
    calibrate,
    convert_,
    find_convs,
    plan_conversion,
)
from dcls_convert.fitting import calibrate as calibrate_module
from dcls_convert.fitting import warm_start
from dcls_convert.fitting.calibrate import measure_inputs
from dcls_convert.fitting.calibration_settings import CalibrationSettings
from dcls_convert.fitting.groups import make_layers
from dcls_convert.fitting.images import Calibration
from dcls_convert.networks.tensors_hash import tensors_hash
from dcls_convert.progress import silent
from dcls_convert.tables import as_text
from dcls_convert.views.report import report_view

from ..model_state import state_of
from .networks import SMALL, error_of, network, smooth_noise


def means(model, images):
    """Of each channel behind each convolution's BatchNorm, or the identity in its place."""
    seen = []

    def keep(module, inputs, output):
        seen.append(output.transpose(0, 1).flatten(1))

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for part in model[1]:
            hooks.callback(part[1].register_forward_hook(keep).remove)
        model(images)
    return torch.stack([part.mean(1) for part in seen])


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("options", "tie"),
    [
        ({}, "stage"),
        ({}, "none"),
        ({"bias": True}, "stage"),
        ({"bias": True, "norm": False}, "none"),
    ],
)
def test_every_channel_has_its_mean_again(options, tie):
    """Over the places that are sampled; here, all."""
    settings = CalibrationSettings(samples_per_image=10**6)
    model = network(**options)
    images = smooth_noise(12)
    expected = means(model, images)
    old = copy.deepcopy(model)
    plan = plan_conversion(find_convs(model, SMALL), dilated_size=9, budget=60, tie=tie)
    calibration = calibrate(model, plan, [images[:8], images[8:]], held_out=())
    statistics = measure_inputs(model, make_layers(model, plan), calibration, silent, settings)
    apply_plan_(model, plan, calibration=statistics)
    torch.testing.assert_close(means(model, images), expected, rtol=1e-3, atol=1e-4)
    for one, other in zip(old.modules(), model.modules(), strict=True):
        if isinstance(one, nn.BatchNorm2d):
            assert torch.equal(one.running_var, other.running_var)
            assert torch.equal(one.weight, other.weight)


@pytest.mark.usefixtures("quick_fit")
def test_images_in_parts_give_the_same_sums_and_outputs_about_as_close(monkeypatch):
    """The first layer sees the same; later ones see what was made of the parts before."""
    images, others = smooth_noise(24), smooth_noise(16, seed=1)
    old = network()
    before = old(others).detach()
    plan = plan_conversion(find_convs(old, SMALL), dilated_size=9, budget=60, tie="none")
    together = []  # passes in step: one for each batch of 2 images and each network, old and new
    run = calibrate_module.run_in_lockstep

    def counting(convs, passes, step_all):
        together.append(len(passes))
        run(convs, passes, step_all)

    monkeypatch.setattr(calibrate_module, "run_in_lockstep", counting)
    first_weights, errors = [], []
    for in_step in (24, 8):
        model = copy.deepcopy(old)
        calibration = Calibration(batches=images.split(2))
        settings = CalibrationSettings(images_in_step=in_step)
        statistics = measure_inputs(model, make_layers(model, plan), calibration, silent, settings)
        apply_plan_(model, plan, calibration=statistics)
        first_weights.append(model[1][0][0].weight)
        errors.append(error_of(model, before, others))
    assert together == [24, 8, 8, 8]  # 2 networks, each 12 batches; then each 4 batches at a time
    torch.testing.assert_close(first_weights[1], first_weights[0], rtol=1e-4, atol=1e-5)
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def outputs_by_layer(model, plan, images):
    names = {model.get_submodule(layer.name): layer.name for layer in plan.layers}
    outputs = {}

    def keep(module, inputs, output):
        outputs[names[module]] = output

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_hook(keep).remove)
        model(images)
    return outputs


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(("count", "stride"), [(6, 1), (1, 2)], ids=["enough", "too few places"])
def test_the_output_error_of_each_layer_is_what_its_outputs_lost(count, stride):
    """In layers that keep their fit, without a mean shift."""
    model = network(bias=True, norm=False, stride=stride)
    images = smooth_noise(count)
    plan = plan_conversion(find_convs(model, SMALL), dilated_size=9, budget=60)
    old = outputs_by_layer(model, plan, images)
    settings = CalibrationSettings(samples_per_image=10**6)
    groups = make_layers(model, plan)
    calibration = calibrate(model, plan, images, held_out=())
    statistics = measure_inputs(model, groups, calibration, silent, settings)
    errors = apply_plan_(model, plan, calibration=statistics)
    new = outputs_by_layer(model, plan, images)
    assert errors.output.keys() == errors.kernel.keys() == old.keys()
    for name, error in errors.output.items():
        lost = float((new[name] - old[name]).norm() / old[name].norm())
        assert error == pytest.approx(lost, rel=1e-3)


def test_layers_with_nowhere_to_put_their_means_are_named():
    model = network(norm=False)
    notes = []
    plan = plan_conversion(find_convs(model, SMALL), dilated_size=9, budget=60)
    apply_plan_(
        model, plan, calibration=calibrate(model, plan, [smooth_noise()]), note=notes.append
    )
    assert len(notes) == 1
    assert all(layer.name in notes[0] for layer in plan.layers)


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("calibrated", [False, True])
def test_autocast_tf32_and_the_global_generator_leave_no_trace(calibrated, monkeypatch):
    seen = set()
    fit_lines = warm_start.fit_lines

    def watched(*args, **kwargs):
        seen.add(torch.backends.cuda.matmul.allow_tf32)
        return fit_lines(*args, **kwargs)

    monkeypatch.setattr(warm_start, "fit_lines", watched)
    plain = network(channels=24)
    other = network(channels=24)
    images = smooth_noise(3, size=48)
    options = {"dilated_size": 9, "budget": 60, "input_size": (3, 48, 48)}
    options["calibration"] = (
        Calibration(batches=(images[:2],), held_out=(images[2:],)) if calibrated else None
    )
    report = convert_(plain, **options)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert convert_(other, **options) == report
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.get_rng_state(), before)
    assert seen == {False}
    assert tensors_hash(plain.state_dict().items()) == tensors_hash(other.state_dict().items())


def test_with_an_element_for_every_cell_nothing_changes():
    model = network()
    images = smooth_noise()
    with torch.no_grad():
        before = model(images)
    convert_(model, dilated_size=9, kernel_count=25, calibration=[images], input_size=SMALL)
    assert error_of(model, before, images) < 1e-4


def unchanged(model):
    return model


def zero_kernels(model):
    for part in model[1]:
        part[0].weight.data[::2] = 0


def dead_channels(model):
    model[0].weight.data[:3] = 0
    model[0].bias.data[:3] = 0


AWKWARD = {
    "zero kernels": (zero_kernels, smooth_noise()),
    "dead channels": (dead_channels, smooth_noise()),
    "constant": (unchanged, torch.full((4, *SMALL), 0.5)),
    "zero": (unchanged, torch.zeros(2, *SMALL)),
    "one image": (unchanged, smooth_noise(1)),
    "small images": (unchanged, smooth_noise(4, size=3)),
    "bfloat16": (nn.Module.bfloat16, smooth_noise()),
    "float16": (nn.Module.half, smooth_noise()),
    "float64": (nn.Module.double, smooth_noise()),
}


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_cases_give_finite_tensors_of_the_same_dtype_and_outputs_not_far_off(case):
    model = network()
    (change, images) = AWKWARD[case]
    change(model)
    dtype = model[0].weight.dtype
    with torch.no_grad():
        before = model(images.to(dtype)).float()
    convert_(model, dilated_size=9, budget=80, calibration=[images], input_size=SMALL)
    state = model.state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert {tensor.dtype for name, tensor in state.items() if "num_batches" not in name} == {dtype}
    with torch.no_grad():
        after = model(images.to(dtype)).float()
    assert float((after - before).norm()) <= 0.6 * float(before.norm())


@pytest.mark.parametrize(
    ("scale", "images", "message"),
    [
        (60000, smooth_noise(), r"1\.\d\.0 sees or gives values that are not finite"),
        (1, torch.randn(2, 1, 24, 24), "does not take the images"),
    ],
    ids=["overflow", "channels"],
)
def test_what_cannot_be_calibrated_is_refused_by_name_and_the_model_left_as_it_was(
    scale, images, message
):
    model = network().half()
    model[1][1][0].weight.data *= scale
    before = state_of(model)
    with pytest.raises(DclsConvertError, match=message):
        convert_(model, dilated_size=9, calibration=[images], input_size=SMALL)
    assert state_of(model) == before


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("fails_at", "raised"),
    [
        (None, contextlib.nullcontext()),
        (0, pytest.raises(DclsConvertError, match="out of memory")),
        (3, pytest.raises(DclsConvertError, match="out of memory")),
        (5, pytest.raises(MemoryError)),
    ],
    ids=["not", "first pass", "in step", "at the end"],
)
def test_modules_keep_their_modes_and_no_hooks_and_a_failure_leaves_the_model_unchanged(
    fails_at, raised
):
    model = network(bias=True)
    calls = []
    model.train()
    model[1][0][1].eval()

    class Failing(nn.Module):
        def forward(self, input):
            calls.append(self)
            if fails_at is not None and len(calls) > fails_at:
                raise MemoryError
            return input

    model[1][1][2] = Failing()
    modes = {name: module.training for name, module in model.named_modules()}
    before = state_of(model)
    with raised:
        convert_(model, dilated_size=9, calibration=[smooth_noise()], input_size=SMALL)
    if fails_at is not None:
        assert state_of(model) == before
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Shared(nn.Module):
    """One convolution called twice in a pass, and one that no pass calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 5, padding=2, groups=3)
        self.idle = nn.Conv2d(3, 3, 5, padding=2, groups=3)

    def forward(self, input):
        return self.conv(self.conv(input).relu())


def test_a_convolution_called_twice_is_calibrated_for_both_and_an_idle_one_fitted():
    model = Shared()
    images = smooth_noise(16)
    before = model(images).detach()
    plain = copy.deepcopy(model)
    convert_(plain, dilated_size=9, budget=60, input_size=SMALL, tie="none")
    options = {"scope": "model", "tie": "none", "calibration": [images]}
    report = convert_(model, dilated_size=9, budget=60, input_size=SMALL, **options)
    assert error_of(model, before, images) < 0.7 * error_of(plain, before, images)
    assert torch.equal(model.idle.kernel(), plain.idle.kernel())
    assert all(layer.fit_error < 1 for layer in report.layers)


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    "images",
    [
        smooth_noise(1),
        smooth_noise(2),
        smooth_noise(5, size=6),
        torch.full((1, *SMALL), -1.0),
        torch.linspace(-1, 1, 10).reshape(-1, 1, 1, 1).expand(-1, *SMALL),
    ],
    ids=["one", "two", "tiny", "black", "constant"],
)
def test_calibration_on_few_or_useless_images_is_not_worse_than_the_fit(images):
    unseen = smooth_noise(16, seed=1)
    before = network(stride=2)(unseen).detach()
    fit, calibrated = network(stride=2), network(stride=2)
    convert_(fit, dilated_size=9, budget=60, init="fit", input_size=SMALL)
    options = {"dilated_size": 9, "budget": 60, "scope": "model", "input_size": SMALL}
    convert_(calibrated, calibration=Calibration(batches=(images,)), **options)
    assert error_of(calibrated, before, unseen) <= 1.05 * error_of(fit, before, unseen)


@pytest.mark.usefixtures("quick_fit")
def test_layers_of_which_too_few_places_are_seen_keep_their_fit_and_are_counted():
    model = network(stride=2)  # one image has 144, 36 and 9 places
    plan = plan_conversion(find_convs(model, SMALL), dilated_size=9, budget=60, tie="none")
    fit = copy.deepcopy(model)
    apply_plan_(fit, plan, init="fit")
    notes = []
    apply_plan_(model, plan, calibration=Calibration(batches=(smooth_noise(1),)), note=notes.append)
    (note,) = notes
    assert note.startswith("1 of 3 layers keep")
    same = []
    for one, other in zip(fit[1], model[1], strict=True):
        same.append(torch.equal(one[0].weight, other[0].weight))
    assert same == [False, False, True]


def statistics_of(model, images):
    plan = plan_conversion(find_convs(model, SMALL), dilated_size=9, tie="none")
    calibration = calibrate(model, plan, images)
    return measure_inputs(model.eval(), make_layers(model, plan), calibration, silent)


def test_statistics_of_a_convolution_called_twice_are_of_both_calls():
    model = Shared()
    images = smooth_noise(4)
    statistics = statistics_of(model, images)
    assert statistics.calls == {model.conv: 2}
    alone = nn.Sequential(model.conv)
    once = statistics_of(alone, images)
    samples = [of.separate_moments[model.conv].sample_count for of in (statistics, once)]
    assert samples[0] == 2 * samples[1] == statistics.joint_moments[model.conv].sample_count
    assert not once.joint_moments


class Norms(nn.Module):
    """Convolutions before BatchNorms, wired as `forward` says."""

    def __init__(self, forward):
        super().__init__()
        self.one, self.other = (nn.Conv2d(3, 3, 5, padding=2, groups=3) for _ in range(2))
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.BatchNorm2d(3)
        self.wiring = forward

    def forward(self, input):
        return self.wiring(self, input)


def two_norms(self, x):
    y = self.one(x)
    return self.norm(y) + self.second(y) + self.other(x)


WIRINGS = {
    "one each": (lambda self, x: self.norm(self.one(x)) + self.second(self.other(x)), 2),
    "two norms behind one": (two_norms, 0),
    "one norm behind two": (lambda self, x: self.norm(self.one(x)) + self.norm(self.other(x)), 0),
    "one norm behind a sum": (lambda self, x: self.norm(self.one(x) + self.other(x)), 0),
}


@pytest.mark.parametrize("case", WIRINGS)
def test_only_a_norm_that_one_convolution_alone_feeds_takes_its_mean_shift(case):
    wiring, expected = WIRINGS[case]
    assert len(statistics_of(Norms(wiring), smooth_noise(2)).running_means) == expected


REASONS = {
    "few places": (network, smooth_noise(1, size=3), "few sampled places (9 for 9 weights)"),
    "two calls": (Shared, smooth_noise(4), "called 2 times in a pass"),
    "fixed weights": (
        lambda: with_convs(StdConv2d, network()),
        smooth_noise(4),
        "weights fixed by weight standardisation",
    ),
    "no home for the means": (
        partial(network, norm=False),
        smooth_noise(4),
        "no bias or single BatchNorm takes the mean shift",
    ),
    "none": (network, smooth_noise(4), None),
}


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("case", REASONS)
def test_the_report_says_what_kept_a_layers_outputs_from_being_closer(case):
    make, images, expected = REASONS[case]
    options = {"calibration": [images], "dilated_size": 9, "scope": "model", "budget": 60}
    options["init"] = "fit"
    if case == "fixed weights":
        options["rules"] = "conv3x3"
    report = convert_(make(), input_size=tuple(images.shape[1:]), **options)
    layer = report.layers[0]
    if expected is None:
        assert layer.error_reasons == ()
    else:
        (reason,) = layer.error_reasons
        assert reason.startswith(expected)
    shown = report.to_dict()["layers"][0]
    assert shown.get("error_reasons", []) == list(layer.error_reasons)
    lines = as_text(report_view(report, verbose=1))
    assert f"{layer.name}: {layer.output_error:.3f}" in lines
    assert expected is None or expected in " ".join(lines.split())


def with_convs(conv_class, model):
    for part in model[1]:
        part[0] = conv_class(8, 8, 3, padding=1, bias=False)
    return model


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("change", "options", "share"),
    [
        (unchanged, {}, 0.5),
        (unchanged, {"interpolation": "gaussian"}, 0.7),
        (unchanged, {"interpolation": "triangle"}, 0.7),
        (partial(with_convs, nn.Conv2d), {"rules": "conv3x3"}, 0.5),
        (partial(with_convs, StdConv2d), {"rules": "conv3x3"}, 1.0),
    ],
    ids=["bilinear", "gaussian", "triangle", "dense", "standardised"],
)
def test_all_kinds_of_layers_keep_outputs_closer_with_images(change, options, share):
    images = smooth_noise(12)
    others = smooth_noise(8, seed=1)
    model = change(network()).eval()
    with torch.no_grad():
        before = model(others)
    errors = []
    for calibration in (None, [images]):
        converted = copy.deepcopy(model)
        convert_(
            converted,
            init="fit",
            dilated_size=7,
            budget=60,
            scope="model",
            input_size=SMALL,
            calibration=calibration,
            **options,
        )
        errors.append(error_of(converted, before, others))
    assert errors[1] < share * errors[0]
