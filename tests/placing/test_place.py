"""Carrying out a plan: only the layers that it names change, and only in the model it is for."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dcls_convert.conversion.apply_plan import apply_plan_
from dcls_convert.conversion.in_memory import convert_
from dcls_convert.errors import DclsConvertError, PlanError
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.placing.fold import fold_to_dense_

from ..model_state import state_of
from ..planning.nets import IMAGE, Net, Shared, depthwise, plan_of


def assert_refused(model, plan, error, match=None, **options):
    """Check that the plan is refused, and that the model is unchanged."""
    before = state_of(model)
    with pytest.raises(error, match=match):
        apply_plan_(model, plan, **options)
    assert state_of(model) == before


def with_placed_layers(model):
    apply_plan_(model, plan_of(model), init="random")
    return model


WRONG_MODELS = {
    "a layer is missing": lambda: Net(lambda: [depthwise(), depthwise()]),
    "a multiplier": lambda: Net(
        lambda: [depthwise(), depthwise(), nn.Conv2d(4, 8, 5, groups=4, padding=2)]
    ),
    "no bias": lambda: Net(lambda: [depthwise(), depthwise(), depthwise(5, bias=False)]),
    "parametrised": lambda: Net(
        lambda: [depthwise(), depthwise(), parametrizations.weight_norm(depthwise(5))]
    ),
    "converted": lambda: with_placed_layers(Net()),
}


@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_a_plan_for_another_model_is_refused_and_the_model_unchanged(wrong):
    match = r"^\w+.2: |^\w+.0: is a DclsConv2d, where the plan has a convolution$"
    assert_refused(WRONG_MODELS[wrong](), plan_of(Net()), PlanError, match=match)


def test_all_names_of_a_shared_convolution_must_be_the_same_object():
    """Otherwise, two convolutions would become one layer."""
    assert_refused(Shared(shared=False), plan_of(Shared()), PlanError)


def test_a_model_that_is_itself_the_layer_is_refused():
    """It cannot be replaced in place."""
    with pytest.raises(DclsConvertError):
        convert_(depthwise())
    with pytest.raises(DclsConvertError):
        fold_to_dense_(DclsConv2d(4, 4, kernel_count=3, dilated_kernel_size=7))


@pytest.mark.parametrize("init", ["fit", "random"])
def test_only_random_starts_depend_on_the_seed_and_none_on_the_global_generator(init):
    unconverted = Net()

    def positions(seed):
        model = copy.deepcopy(unconverted)
        global_state = torch.get_rng_state()
        convert_(model, dilated_size=7, input_size=IMAGE, init=init, seed=seed)
        assert torch.equal(torch.get_rng_state(), global_state)
        torch.rand(5)  # changes the state of the global generator, which must not matter
        return model.layer1[0].positions

    first = positions(0)
    assert torch.equal(first, positions(0))
    assert torch.equal(first, positions(1)) == (init == "fit")


@pytest.mark.parametrize(("positions", "reach"), [("normal", 2.5), ("kernel", 2), ("uniform", 6)])
def test_random_positions_are_near_the_centre_or_over_the_old_kernel_or_over_the_window(
    positions, reach
):
    model = nn.Sequential(depthwise(5, 32))
    convert_(model, dilated_size=13, input_size=(32, 16, 16), init="random", positions=positions)
    drawn = model[0].positions.detach().abs()
    assert drawn.max() <= reach
    if positions != "normal":  # uniform: the mean distance from the centre is half the reach
        assert drawn.max() > 0.95 * reach
        assert drawn.mean() == pytest.approx(reach / 2, rel=0.1)
