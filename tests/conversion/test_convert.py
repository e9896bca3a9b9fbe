"""A conversion: what a request loads, and that a conversion is complete or undone."""

import copy
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dcls_convert import (
    PlanError,
    convert_,
    find_convs,
    load_converted,
    plan_conversion,
    save_converted,
)
from dcls_convert.conversion.before_and_after import stated_classes
from dcls_convert.conversion.convert import carry_out
from dcls_convert.conversion.plan_network import adopted_plan
from dcls_convert.networks.source import ModelSource, resolve_model
from dcls_convert.planning.plan_options import PlanOptions

from ..command_line import NET, net
from ..conftest import TINY
from ..image_folder import write_images
from ..model_state import state_of
from ..requests import request_of

FAILURES = 13  # number of operations at which a failure is injected, from the first to the last


class Failing(TorchDispatchMode):
    """Run out of memory at torch operation number `at`, or only count operations if it is None."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


def authors_state(model, plan):
    """Return a state dict of the authors' package for a plan, with other values."""
    state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    for layer in plan.layers:
        state[f"{layer.name}.weight"] = torch.ones(layer.position_shape[1:])
        state[f"{layer.name}.P"] = torch.full(layer.position_shape, 1.5)
    return state


def request_for(model, kind):
    """Return a request to convert the model with this kind of start."""
    options = PlanOptions(dilated_size=9)
    if kind == "authors":
        plan = plan_conversion(find_convs(model), dilated_size=9, kernel_count=4)
        return request_of(model, weights=authors_state(model, plan), options=options)
    return request_of(model, options=options, init=kind)


def small_model():
    """Return a model with a stem, a depthwise stage with BatchNorm in mixed modes, and a head.

    It has few operations, so that failures can be injected at many of them.
    """
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU())
        for _ in range(3)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model[1][0][1].eval()  # frozen
    return model


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("fit", "largest", "exact")]


@pytest.mark.parametrize("kind", ["random", "authors", *SLOW])
def test_whatever_fails_leaves_the_model_as_it_was(kind):
    with torch.random.fork_rng():
        carry_out(request_for(small_model(), kind))  # fills caches, which counts as operations
        request = request_for(small_model(), kind)
        with Failing() as counting:
            carry_out(request)
        total = counting.count
        failing_operations = {1 + (total - 1) * i // (FAILURES - 1) for i in range(FAILURES)}
        for at in sorted(failing_operations):
            request = request_for(small_model(), kind)
            model = request.network.model
            before = state_of(model)
            with pytest.raises(RuntimeError, match="injected"), Failing(at):
                carry_out(request)
            assert state_of(model) == before


def test_a_conversion_beside_a_thread_that_runs_another_model_gives_the_same_report():
    stop = threading.Event()

    def run_other_model():
        other = small_model()
        while not stop.is_set():
            other(torch.zeros(1, 3, 32, 32))

    def convert():  # a model of the other's class, whose modules have the same names
        return convert_(small_model(), init="random", input_size=(3, 16, 16))

    alone = convert()
    thread = threading.Thread(target=run_other_model)
    thread.start()
    try:
        reports = [convert() for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert reports == [alone] * 5


def test_a_plan_from_memory_gets_the_factory_that_the_user_names():
    plan = convert_(net(), dilated_size=9, init="random").plan
    source = ModelSource(name=NET)
    adopted = adopted_plan(plan, net(), source)
    assert adopted == replace(plan, model=NET)


def test_a_plan_holds_for_pretrained_weights_that_want_other_preprocessing():
    model = torchvision.models.googlenet(init_weights=False, aux_logits=True)
    plan = plan_conversion(find_convs(model), dilated_size=5, model="torchvision:googlenet")
    pretrained = resolve_model("torchvision:googlenet", pretrained=True)
    adopted = adopted_plan(plan, model, pretrained)
    assert adopted == replace(plan, model_args={"transform_input": True})
    with pytest.raises(PlanError, match="the plan is for torchvision:googlenet, not for"):
        adopted_plan(plan, model, replace(pretrained, args={"num_classes": 5}))


# --- Requests, and what is loaded for them


NOISE = (torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": TINY, "init": "fit"}, "init 'fit' needs trained weights"),
        ({"model": TINY, "options": PlanOptions(scope="error")}, "scope 'error' needs trained"),
        ({"init": "largest", "options": PlanOptions(scope="error")}, "scope 'error' is for init"),
        ({"model": TINY, "calibration": NOISE}, "calibration needs trained weights"),
        ({"init": "random", "calibration": NOISE}, "calibration is for init 'fit'"),
        ({"calibration": NOISE, "dry_run": True}, "calibration needs kernels and images"),
        ({"model": TINY, "pretrained": True, "weights": {}}, "exclude each other"),
        ({"plan_folder": Path("other"), "options": PlanOptions(budget=80)}, "a plan is applied"),
        ({"init": "exact", "options": PlanOptions(budget=80)}, "omit budget"),
        ({"init": "best"}, "must be one of"),
        ({"seed": 2**63}, "must be from 0 to"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_in_conflict_are_refused_by_the_request(settings, says):
    with pytest.raises(PlanError, match=says):
        request_of(**{"model": small_model(), **settings})


def calibrated(model, folder):
    convert_(model, dilated_size=5, calibration=NOISE, held_out=())


def saved_and_loaded(model, folder):
    other = small_model()
    plan = convert_(other, dilated_size=5, init="random").plan
    save_converted(other, plan, folder)
    load_converted(folder, model=model)


@pytest.mark.parametrize("convert_somehow", [calibrated, saved_and_loaded])
def test_a_network_can_be_converted_in_inference_mode_and_trained_after_it(
    convert_somehow, tmp_path
):
    model = small_model()
    with torch.inference_mode():
        convert_somehow(model, tmp_path / "trained later")
        convert_somehow(small_model(), tmp_path / "for inference")  # and made in that mode
    model.train()(torch.randn(1, 3, 16, 16)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, tensor in model.state_dict().items():
        assert not name.endswith("positions") or not torch.equal(tensor, before[name])


def test_the_normalisation_of_a_calibration_stays_with_the_model(tmp_path):
    write_images(tmp_path / "photos")
    model = timm.create_model(TINY, pretrained_cfg_overlay={"input_size": (3, 32, 32)})
    images = {"calibration": tmp_path / "photos", "mean": (0.25,), "std": (0.1, 0.2, 0.3)}
    report = convert_(model, dilated_size=9, kernel_count=4, input_size=(3, 32, 32), **images)
    save_converted(model, report.plan, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["pretrained_cfg"]
    assert (config["mean"], config["std"]) == ([0.25] * 3, [0.1, 0.2, 0.3])


# --- What is compared


def without_classifier(model):
    model.fc = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("build", "num_classes"),
    [
        (lambda: timm.create_model(TINY, num_classes=4), 4),
        (lambda: timm.create_model(TINY, num_classes=0), 0),
        (lambda: timm.create_model(TINY, features_only=True), 0),
        (lambda: torchvision.models.resnet18(num_classes=4), 4),
        (lambda: without_classifier(torchvision.models.resnet18()), 0),
        (lambda: torchvision.models.squeezenet1_1(num_classes=4), 4),
        (small_model, None),
    ],
)
def test_a_library_says_how_many_classes_its_network_ranks_and_a_user_does_not(build, num_classes):
    with torch.device("meta"):
        assert stated_classes(build()) == num_classes


@pytest.mark.parametrize(
    ("build", "defined"),
    [
        (lambda: timm.create_model(TINY, num_classes=4), {"same_top1", "kl", "output_error"}),
        (lambda: timm.create_model(TINY, num_classes=0), {"output_error"}),
        (small_model, {"same_largest", "output_error"}),
    ],
)
def test_a_report_states_only_what_is_defined_for_the_outputs(build, defined):
    images = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    options = {"dilated_size": 9, "kernel_count": 2, "input_size": (3, 32, 32)}
    report = convert_(build(), **options, calibration=images[3:], held_out=images[:3])
    outcome = report.to_dict()["outcome"]
    for agreement in (outcome, outcome["shifted"]):
        numbers = {key for key, value in agreement.items() if value is not None}
        assert numbers - {"kernel_error", "images", "shifted"} == defined


def test_a_report_states_nothing_on_outputs_if_no_image_is_held_out():
    report = convert_(small_model(), dilated_size=5, calibration=NOISE, held_out=())
    outcome = report.to_dict()["outcome"]
    numbers = {key: value for key, value in outcome.items() if value is not None}
    assert numbers == {"kernel_error": outcome["kernel_error"], "images": 0}
