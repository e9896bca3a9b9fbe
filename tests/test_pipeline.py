"""The one pipeline: structure apart from values, and a model that is converted as a whole or not at all."""

import itertools
import pkgutil
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dcls_convert import PlanError, apply_plan_, convert_, find_convs, plan_conversion
from dcls_convert.options import PlanOptions
from dcls_convert.pipeline.conversion import Job
from dcls_convert.surgery.place import place_layers_

from .planning.nets import state_of

PLACES = 12  # at which a failure is injected, spread over all operations


class Failing(TorchDispatchMode):
    """Runs out of memory at one of torch's operations; counts them where none is named."""

    def __init__(self, at=None):
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if self.seen == self.at:
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


def theirs(model, plan):
    """A state dict of the authors' package for this plan: random elements, and all else of the model scaled."""
    generator = torch.Generator().manual_seed(0)
    state = {
        name: tensor * 2 if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    for layer in plan.layers:
        shape = layer.position_shape
        state[f"{layer.name}.weight"] = torch.randn(shape[1:], generator=generator)
        state[f"{layer.name}.P"] = (
            torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 4 - 2
        )
    return state


def job_for(model, kind):
    """Convert `model` from this start; the plan is made already."""
    weights = None
    if kind == "authors":
        weights = theirs(model, plan_conversion(find_convs(model), dilated_size=9, kernel_count=4))
    init = "auto" if kind == "authors" else kind
    job = Job(model=model, weights=weights, options=PlanOptions(dilated_size=9), init=init)
    return job, job.plan()


def small():
    """A stem, a depthwise stage with BatchNorm in mixed modes, a head; few operations, so that all can fail."""
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
        job, plan = job_for(small(), kind)
        model = small()
        with Failing() as counting:
            job.convert(plan, model=model)
        total = counting.seen
        for at in sorted({1 + (total - 1) * place // PLACES for place in range(PLACES + 1)}):
            model = small()
            before = state_of(model)
            with pytest.raises(RuntimeError, match="injected"), Failing(at):
                job.convert(plan, model=model)
            assert state_of(model) == before


def test_outputs_are_not_compared_on_images_too_large(monkeypatch):
    job, plan = job_for(small(), "largest")
    plan = replace(plan, input_size=(3, 16, 16))
    assert job.convert(plan).moved is not None
    monkeypatch.setattr("dcls_convert.pipeline.conversion.MOST_PIXELS", 16 * 16 - 1)
    assert job.convert(plan, model=small()).moved is None


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("layers.dcls_conv.DclsConvNd.tie_", 2),  # between two layers
        ("surgery.place.fold_before_timm_fuses_", 1),
        ("surgery.place.spare_from_decay_", 1),
        ("pipeline.conversion.measure_report", 1),
    ],
)
def test_a_failure_after_layers_are_in_place_takes_them_out_again(monkeypatch, place, call):
    model = small()
    job, plan = job_for(model, "authors")
    before, calls = state_of(model), itertools.count(1)
    function = pkgutil.resolve_name(f"dcls_convert.{place}")

    def fail(*arguments, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    monkeypatch.setattr(f"dcls_convert.{place}", fail)
    with pytest.raises(KeyboardInterrupt):
        job.convert(plan)
    assert state_of(model) == before


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_placing_gives_structure_alone(device):
    with torch.device(device):
        model = small()
    plan = plan_conversion(find_convs(model), dilated_size=9)
    state = torch.get_rng_state()
    with Failing() as operations:
        place_layers_(model, plan)
    assert torch.equal(state, torch.get_rng_state())
    assert operations.seen < 40 * len(plan.layers)  # nothing is computed from the kernels
    apply_plan_(full := small(), plan, init="random")
    shapes = [
        {name: (one.shape, one.dtype) for name, one in each.state_dict().items()}
        for each in (model, full)
    ]
    assert shapes[0] == shapes[1]
    assert {tensor.device.type for tensor in model.state_dict().values()} == {device}


# A plan on other weights.


def test_a_plan_of_the_users_own_model_is_held_to_its_layers(tiny):
    plan = convert_(small(), dilated_size=9, init="random").plan
    assert plan.model is None
    assert Job(model=small()).plan_again(replace(plan, folded=True)) == plan
    larger = small().append(nn.Linear(4, 4))
    for model in (larger, nn.Sequential(nn.Conv2d(3, 4, 3)), tiny):
        with pytest.raises(PlanError, match="the plan is for"):
            Job(model=model).plan_again(plan)
