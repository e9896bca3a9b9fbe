"""Carrying out a plan: only the layers that it names change, and only in the model it is for."""

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from dcls_convert.conversion.apply_plan import apply_plan_
from dcls_convert.conversion.in_memory import convert_
from dcls_convert.errors import DclsConvertError, PlanError
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.placing.fold import fold_to_dense_

from ..model_state import state_of
from ..planning.nets import Net, Shared, depthwise, plan_of


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
