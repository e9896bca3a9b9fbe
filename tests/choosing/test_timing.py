"""Timed models share the tensors that are not converted, and timing does not change them."""

import timm
import torch

from dcls_convert import find_convs, plan_conversion
from dcls_convert.choosing.results import Timing
from dcls_convert.choosing.timing import converted_copy, forward_and_step_ms, quartiles
from dcls_convert.layers.dcls_conv import DclsConvNd


def test_models_share_unconverted_parameters_and_no_parameter_changes():
    model = timm.create_model("test_efficientnet").eval()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    plan = plan_conversion(find_convs(model, (3, 32, 32)), dilated_size=5)
    converted = converted_copy(model, plan)
    images = torch.randn(2, 3, 32, 32)
    original_ids = {id(parameter) for parameter in model.parameters()}
    for name, parameter in converted.named_parameters():
        is_converted = name.rpartition(".")[0] in {layer.name for layer in plan.layers}
        assert id(parameter) in original_ids or is_converted or "positions" in name
    assert sum(isinstance(module, DclsConvNd) for module in converted.modules()) == len(plan.layers)
    for network in (model, converted):
        state = {name: tensor.clone() for name, tensor in network.named_parameters()}
        assert min(forward_and_step_ms(network, images, amp=False)) > 0
        assert all(torch.equal(state[name], tensor) for name, tensor in network.named_parameters())
        assert all(tensor.grad is None for tensor in network.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert not any(isinstance(module, DclsConvNd) for module in model.modules())


def test_times_are_medians_and_quartiles():
    assert quartiles([3.0]) == Timing(median=3.0, first_quartile=3.0, third_quartile=3.0, runs=1)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(
        median=3.0, first_quartile=2.0, third_quartile=4.0, runs=5
    )
