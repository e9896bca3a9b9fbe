"""A conversion is complete or undone, whatever else the process does."""

import copy
import json
import threading

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcls_convert import (
    convert_,
    find_convs,
    load_converted,
    plan_conversion,
    save_converted,
)
from dcls_convert.conversion.convert import carry_out
from dcls_convert.planning.plan_options import PlanOptions

from ..conftest import TINY
from ..image_folder import write_images
from ..model_state import state_of
from ..requests import request_of
from .networks import NOISE, small_model

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
