"""A plan that is made elsewhere is carried out on the network of a request."""

from dataclasses import replace

import pytest
import torchvision

from dcls_convert import (
    PlanError,
    convert_,
    find_convs,
    plan_conversion,
)
from dcls_convert.conversion.plan_network import adopted_plan
from dcls_convert.networks.source import ModelSource, resolve_model

from ..command_line import NET, net


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
