"""Calibration keeps a network's outputs for images, even in awkward cases."""

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
from dcls_convert.checkpoints.folder import tensors_hash
from dcls_convert.errors import ModelError
from dcls_convert.placing.place import make_layers
from dcls_convert.progress import ignore_messages
from dcls_convert.reports.report import report_view
from dcls_convert.starts import calibrate as calibrate_module
from dcls_convert.starts import warm_start
from dcls_convert.starts.calibrate import measure_inputs
from dcls_convert.starts.calibration_settings import CalibrationSettings
from dcls_convert.starts.images import Calibration
from dcls_convert.tables import as_text

from ..model_state import state_of
from .networks import INPUT_SIZE, network, output_error, smooth_noise


def channel_means(model, images):
    """Return each channel's mean after each BatchNorm, or after the identity in its place."""
    outputs = []

    def keep(module, inputs, output):
        outputs.append(output.transpose(0, 1).flatten(1))

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for block in model[1]:
            hooks.callback(block[1].register_forward_hook(keep).remove)
        model(images)
    return torch.stack([output.mean(1) for output in outputs])


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
def test_every_channel_keeps_its_mean(options, tie):
    """Means are kept over the sampled places, which are all places here."""
    settings = CalibrationSettings(samples_per_image=10**6)
    model = network(**options)
    images = smooth_noise(12)
    expected = channel_means(model, images)
    old = copy.deepcopy(model)
    plan = plan_conversion(find_convs(model, INPUT_SIZE), dilated_size=9, budget=60, tie=tie)
    calibration = calibrate(model, plan, [images[:8], images[8:]], held_out=())
    statistics = measure_inputs(
        model, make_layers(model, plan), calibration, ignore_messages, settings
    )
    apply_plan_(model, plan, calibration=statistics)
    torch.testing.assert_close(channel_means(model, images), expected, rtol=1e-3, atol=1e-4)
    for old_module, module in zip(old.modules(), model.modules(), strict=True):
        if isinstance(old_module, nn.BatchNorm2d):
            assert torch.equal(old_module.running_var, module.running_var)
            assert torch.equal(old_module.weight, module.weight)


@pytest.mark.usefixtures("quick_fit")
def test_images_in_parts_give_about_the_same_result_as_all_at_once(monkeypatch):
    """The first layer gets the same weights; later layers see the solutions of earlier parts."""
    images = smooth_noise(24)
    unseen = smooth_noise(16, seed=1)
    old = network()
    before = old(unseen).detach()
    plan = plan_conversion(find_convs(old, INPUT_SIZE), dilated_size=9, budget=60, tie="none")
    batch_sizes = []
    forward = calibrate_module._forward

    def record_size(model, batch):
        batch_sizes.append(len(batch))
        forward(model, batch)

    monkeypatch.setattr(calibrate_module, "_forward", record_size)
    first_weights = []
    errors = []
    for images_per_pass in (24, 8):
        model = copy.deepcopy(old)
        calibration = Calibration(batches=images.split(2))
        settings = CalibrationSettings(images_per_pass=images_per_pass)
        statistics = measure_inputs(
            model, make_layers(model, plan), calibration, ignore_messages, settings
        )
        apply_plan_(model, plan, calibration=statistics)
        first_weights.append(model[1][0][0].weight)
        errors.append(output_error(model, before, unseen))
    measuring = [1] + [2] * 12
    assert batch_sizes == [*measuring, 48, *measuring, 16, 16, 16]  # each image twice
    torch.testing.assert_close(first_weights[1], first_weights[0], rtol=1e-4, atol=1e-5)
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


class WithContext(nn.Module):
    def __init__(self, module, context):
        super().__init__()
        self.module = module
        self.context = context

    def forward(self, input):
        with self.context():
            return self.module(input).float()


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.filterwarnings("ignore:what the network does .* in training mode was not measured")
@pytest.mark.parametrize(
    "context", [torch.inference_mode, partial(torch.autocast, "cpu", enabled=False)]
)
def test_modes_that_a_module_enters_do_not_matter(context):
    states = []
    for wrapped in (False, True):
        model = network()
        if wrapped:
            model[1][1] = WithContext(model[1][1], context)
        convert_(model, dilated_size=9, calibration=[smooth_noise()], input_size=INPUT_SIZE)
        states.append(tensors_hash(enumerate(model.state_dict().values())))
    assert states[0] == states[1]


@pytest.mark.usefixtures("quick_fit")
def test_images_of_several_sizes_bring_outputs_of_each_size_closer():
    images = [*smooth_noise(12), *smooth_noise(12, size=16)]
    fitted = network()
    calibrated = network()
    options = {"dilated_size": 9, "budget": 60, "scope": "model", "input_size": INPUT_SIZE}
    convert_(fitted, init="fit", **options)
    convert_(calibrated, calibration=images, held_out=(), **options)
    for size in (24, 16):
        unseen = smooth_noise(8, size, seed=1)
        before = network()(unseen).detach()
        fit_error = output_error(fitted, before, unseen)
        assert output_error(calibrated, before, unseen) < 0.7 * fit_error


class Mixing(nn.Module):
    """Runs a network on two views of each image, or on the images one by one."""

    def __init__(self, run):
        super().__init__()
        self.body = network()
        self.run = run

    def forward(self, images):
        return self.run(self.body, images)


@pytest.mark.parametrize(
    "run",
    [
        lambda body, images: body(torch.stack([images, images.flip(3)]).flatten(0, 1)),
        lambda body, images: torch.cat([body(image[None]) for image in images]),
    ],
    ids=["two views, one behind the other", "one by one"],
)
def test_a_network_that_does_not_keep_images_in_their_order_is_refused(run):
    model = Mixing(run)
    before = state_of(model)
    with pytest.raises(ModelError, match=r"body\.1\.0\.0 does not get the images"):
        convert_(model, dilated_size=9, calibration=[smooth_noise()], input_size=INPUT_SIZE)
    assert state_of(model) == before


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
def test_the_output_error_of_each_layer_is_that_of_its_outputs(count, stride):
    """With too few places, layers keep their fit, without a mean shift."""
    model = network(bias=True, norm=False, stride=stride)
    images = smooth_noise(count)
    plan = plan_conversion(find_convs(model, INPUT_SIZE), dilated_size=9, budget=60)
    old = outputs_by_layer(model, plan, images)
    settings = CalibrationSettings(samples_per_image=10**6)
    groups = make_layers(model, plan)
    calibration = calibrate(model, plan, images, held_out=())
    statistics = measure_inputs(model, groups, calibration, ignore_messages, settings)
    report = apply_plan_(model, plan, calibration=statistics)
    new = outputs_by_layer(model, plan, images)
    assert [layer.name for layer in report.layers] == list(old)
    for layer in report.layers:
        assert layer.fit_error is not None
        expected = float((new[layer.name] - old[layer.name]).norm() / old[layer.name].norm())
        assert layer.output_error == pytest.approx(expected, rel=1e-3)


def test_layers_whose_means_cannot_be_corrected_are_named():
    model = network(norm=False)
    notes = []
    plan = plan_conversion(find_convs(model, INPUT_SIZE), dilated_size=9, budget=60)
    apply_plan_(
        model, plan, calibration=calibrate(model, plan, [smooth_noise()]), note=notes.append
    )
    assert len(notes) == 1
    assert all(layer.name in notes[0] for layer in plan.layers)


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("calibrated", [False, True])
def test_autocast_tf32_and_the_global_generator_do_not_matter(calibrated, monkeypatch):
    tf32_in_fits = set()
    fit_lines = warm_start.fit_lines

    def record_tf32(*args, **kwargs):
        tf32_in_fits.add(torch.backends.cuda.matmul.allow_tf32)
        return fit_lines(*args, **kwargs)

    monkeypatch.setattr(warm_start, "fit_lines", record_tf32)
    model = network(channels=24)
    model_under_autocast = network(channels=24)
    images = smooth_noise(3, size=48)
    options = {"dilated_size": 9, "budget": 60, "input_size": (3, 48, 48)}
    if calibrated:
        options["calibration"] = Calibration(batches=(images[:2],), held_out=(images[2:],))
    report = convert_(model, **options)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert convert_(model_under_autocast, **options) == report
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.get_rng_state(), before)
    assert tf32_in_fits == {False}
    assert tensors_hash(model.state_dict().items()) == tensors_hash(
        model_under_autocast.state_dict().items()
    )


def test_with_an_element_for_every_cell_nothing_changes():
    model = network()
    images = smooth_noise()
    with torch.no_grad():
        before = model(images)
    convert_(model, dilated_size=9, kernel_count=25, calibration=[images], input_size=INPUT_SIZE)
    assert output_error(model, before, images) < 1e-4


def unchanged(model):
    return model


def zero_some_kernels_(model):
    for block in model[1]:
        block[0].weight.data[::2] = 0


def zero_some_channels_(model):
    model[0].weight.data[:3] = 0
    model[0].bias.data[:3] = 0


AWKWARD = {
    "zero kernels": (zero_some_kernels_, smooth_noise()),
    "dead channels": (zero_some_channels_, smooth_noise()),
    "constant": (unchanged, torch.full((4, *INPUT_SIZE), 0.5)),
    "zero": (unchanged, torch.zeros(2, *INPUT_SIZE)),
    "one image": (unchanged, smooth_noise(1)),
    "small images": (unchanged, smooth_noise(4, size=3)),
    "bfloat16": (nn.Module.bfloat16, smooth_noise()),
    "float16": (nn.Module.half, smooth_noise()),
    "float64": (nn.Module.double, smooth_noise()),
}


@pytest.mark.usefixtures("quick_fit")
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
        (60000, smooth_noise(), r"1\.\d\.0 has inputs or outputs that are not finite"),
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


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("fails_at", "raised"),
    [
        (None, contextlib.nullcontext()),
        # Seven passes find the convolutions and measure them first.
        (7, pytest.raises(DclsConvertError, match="out of memory")),
        (12, pytest.raises(DclsConvertError, match="out of memory")),
        (13, pytest.raises(MemoryError)),
    ],
    ids=["no failure", "first pass", "side by side", "at the end"],
)
def test_modes_are_kept_hooks_removed_and_a_failure_leaves_the_model_unchanged(fails_at, raised):
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
        convert_(model, dilated_size=9, calibration=[smooth_noise()], input_size=INPUT_SIZE)
    if fails_at is not None:
        assert state_of(model) == before
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class CalledTwice(nn.Module):
    """A convolution that a pass calls twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 5, padding=2, groups=3)

    def forward(self, input):
        return self.conv(self.conv(input).relu())


def test_a_convolution_called_twice_is_calibrated_for_both_calls():
    model = CalledTwice()
    images = smooth_noise(16)
    before = model(images).detach()
    fitted = copy.deepcopy(model)
    options = {"dilated_size": 9, "budget": 60, "tie": "none", "input_size": INPUT_SIZE}
    convert_(fitted, **options)
    report = convert_(model, scope="model", calibration=[images], **options)
    assert output_error(model, before, images) < 0.7 * output_error(fitted, before, images)
    assert all(layer.fit_error < 1 for layer in report.layers)


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    "images",
    [
        smooth_noise(1),
        smooth_noise(2),
        smooth_noise(5, size=6),
        torch.full((1, *INPUT_SIZE), -1.0),
        torch.linspace(-1, 1, 10).reshape(-1, 1, 1, 1).expand(-1, *INPUT_SIZE),
    ],
    ids=["one", "two", "tiny", "black", "constant"],
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


@pytest.mark.usefixtures("quick_fit")
def test_layers_with_too_few_samples_keep_their_fit_and_are_counted():
    model = network(stride=2)  # one image has 144, 36 and 9 places
    plan = plan_conversion(find_convs(model, INPUT_SIZE), dilated_size=9, budget=60, tie="none")
    fitted = copy.deepcopy(model)
    apply_plan_(fitted, plan, init="fit")
    notes = []
    apply_plan_(model, plan, calibration=Calibration(batches=(smooth_noise(1),)), note=notes.append)
    (note,) = notes
    assert note.startswith("1 of 3 layers keep")
    keeps_fit = []
    for fitted_block, block in zip(fitted[1], model[1], strict=True):
        keeps_fit.append(torch.equal(fitted_block[0].weight, block[0].weight))
    assert keeps_fit == [False, False, True]


def statistics_of(model, images):
    plan = plan_conversion(find_convs(model, INPUT_SIZE), dilated_size=9, tie="none")
    calibration = calibrate(model, plan, images)
    return measure_inputs(model.eval(), make_layers(model, plan), calibration, ignore_messages)


def test_statistics_of_a_convolution_called_twice_cover_both_calls():
    model = CalledTwice()
    images = smooth_noise(4)
    statistics = statistics_of(model, images)
    assert statistics.calls == {model.conv: 2}
    called_once = statistics_of(nn.Sequential(model.conv), images)
    samples_of_one_call = called_once.separate_moments[model.conv].sample_count
    assert statistics.separate_moments[model.conv].sample_count == 2 * samples_of_one_call
    assert statistics.joint_moments[model.conv].sample_count == 2 * samples_of_one_call
    assert not called_once.joint_moments


class Norms(nn.Module):
    """Two convolutions and two BatchNorms, connected by the function `wiring`."""

    def __init__(self, wiring):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 5, padding=2, groups=3)
        self.conv2 = nn.Conv2d(3, 3, 5, padding=2, groups=3)
        self.norm1 = nn.BatchNorm2d(3)
        self.norm2 = nn.BatchNorm2d(3)
        self.wiring = wiring

    def forward(self, input):
        return self.wiring(self, input)


def two_norms(net, x):
    y = net.conv1(x)
    return net.norm1(y) + net.norm2(y) + net.conv2(x)


def norm_of_a_sum_in_place(net, x):
    y = net.conv1(x)
    y += net.conv2(x)
    return net.norm1(y)


WIRINGS = {
    "one each": (lambda net, x: net.norm1(net.conv1(x)) + net.norm2(net.conv2(x)), 2),
    "two norms behind one": (two_norms, 0),
    "one norm behind two": (lambda net, x: net.norm1(net.conv1(x)) + net.norm1(net.conv2(x)), 0),
    "one norm behind a sum in place": (norm_of_a_sum_in_place, 0),
    "one norm behind a sum": (lambda net, x: net.norm1(net.conv1(x) + net.conv2(x)), 0),
}


@pytest.mark.parametrize("case", WIRINGS)
def test_only_the_norm_of_a_single_convolution_takes_its_mean_shift(case):
    wiring, expected_count = WIRINGS[case]
    assert len(statistics_of(Norms(wiring), smooth_noise(2)).running_means) == expected_count


REASONS = {
    "few places": (network, smooth_noise(1, size=3), "few sampled places (9 for 9 weights)"),
    "two calls": (CalledTwice, smooth_noise(4), "called 2 times in a pass"),
    "fixed weights": (
        lambda: with_convs(StdConv2d, network()),
        smooth_noise(4),
        "weights fixed by weight standardisation",
    ),
    "nothing takes the means": (
        partial(network, norm=False),
        smooth_noise(4),
        "no bias or single BatchNorm takes the mean shift",
    ),
    "none": (network, smooth_noise(4), None),
}


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("case", REASONS)
def test_the_report_gives_reasons_for_the_output_error_of_a_layer(case):
    make, images, expected = REASONS[case]
    options = {"dilated_size": 9, "budget": 60, "scope": "model", "init": "fit"}
    if case == "fixed weights":
        options["rules"] = "conv3x3"
    input_size = tuple(images.shape[1:])
    report = convert_(make(), calibration=[images], input_size=input_size, **options)
    layer = report.layers[0]
    if expected is None:
        assert layer.error_reasons == ()
    else:
        (reason,) = layer.error_reasons
        assert reason.startswith(expected)
    row = report.to_dict()["layers"][0]
    assert row.get("error_reasons", []) == list(layer.error_reasons)
    text = as_text(report_view(report, verbose=1))
    assert f"{layer.name}: {layer.output_error:.3f}" in text
    assert expected is None or expected in " ".join(text.split())


def with_convs(conv_class, model):
    for block in model[1]:
        block[0] = conv_class(8, 8, 3, padding=1, bias=False)
    return model


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("change", "options", "max_ratio"),
    [
        (unchanged, {}, 0.5),
        (unchanged, {"interpolation": "gaussian"}, 0.7),
        (unchanged, {"interpolation": "triangle"}, 0.7),
        (partial(with_convs, nn.Conv2d), {"rules": "conv3x3"}, 0.5),
        (partial(with_convs, StdConv2d), {"rules": "conv3x3"}, 1.0),
    ],
    ids=["bilinear", "gaussian", "triangle", "dense", "standardised"],
)
def test_images_bring_outputs_closer_for_all_kinds_of_layers(change, options, max_ratio):
    images = smooth_noise(12)
    unseen = smooth_noise(8, seed=1)
    model = change(network()).eval()
    with torch.no_grad():
        before = model(unseen)
    errors = []
    for calibration in (None, [images]):
        converted = copy.deepcopy(model)
        convert_(
            converted,
            init="fit",
            dilated_size=7,
            budget=60,
            scope="model",
            input_size=INPUT_SIZE,
            calibration=calibration,
            **options,
        )
        errors.append(output_error(converted, before, unseen))
    assert errors[1] < max_ratio * errors[0]
