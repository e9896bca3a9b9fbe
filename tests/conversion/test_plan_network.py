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
from dcls_convert.networks.source import ModelSource

from ..command_line import NET, net


def test_a_plan_from_memory_gets_the_factory_that_the_user_names():
    plan = convert_(net(), dilated_size=9, init="random").plan
    source = ModelSource(name=NET)
    adopted = adopted_plan(plan, net(), source)
    assert adopted == replace(plan, model=NET)


def test_a_plan_is_refused_for_a_network_with_other_arguments():
    model = torchvision.models.squeezenet1_1()
    plan = plan_conversion(find_convs(model), dilated_size=5, model="torchvision:squeezenet1_1")
    other = ModelSource(name="torchvision:squeezenet1_1", args={"num_classes": 5})
    with pytest.raises(PlanError, match="the plan is for torchvision:squeezenet1_1, not for"):
        adopted_plan(plan, model, other)
