"""timm's `reparameterize_model` never changes the outputs of a converted network in silence."""

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

from dcls_convert import convert_, fold_to_dense_


def randomised(model):
    """Give BatchNorms statistics that a merge must take into account."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def convert(model):
    convert_(model, dilated_size="+4", init="random", positions="kernel", input_size=(3, 224, 224))


def assert_same(outputs, expected):
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def assert_merges_right_or_fails(network, image, expected):
    try:
        outputs = reparameterize_model(network)(image)
    except (RuntimeError, AssertionError):
        return
    assert_same(outputs, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["lcnetv2_small", pytest.param("repghostnet_050", marks=pytest.mark.slow)]
)
def test_branches_merge_before_a_conversion_and_otherwise_keep_outputs_or_fail(name):
    network = randomised(timm.create_model(name))
    image = torch.randn(1, 3, 224, 224)
    merged_first = reparameterize_model(network)
    convert(merged_first)
    expected = merged_first(image)
    fold_to_dense_(merged_first)
    assert_same(merged_first(image), expected)

    convert(network)
    expected = network(image)
    assert_merges_right_or_fails(network, image, expected)
    fold_to_dense_(network)
    assert_same(network(image), expected)
    assert_merges_right_or_fails(network, image, expected)
