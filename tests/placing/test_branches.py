"""timm's `reparameterize_model` never changes the outputs of a converted network in silence."""

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

from dcls_convert import convert_, fold_to_dense_

# By family of timm: whether branches can still be merged after a fold.
MERGES_AFTER_A_FOLD = {
    "lcnetv2_small": True,
    "repghostnet_050": False,
    "fastvit_t8": False,
    "fastvit_mci0": False,
    "ghostnetv3_050": False,
    "iformer_t": True,
    "mobileone_s0": True,
    "nextvit_small": True,
    "repvgg_a0": True,
    "repvit_m0_9": False,
    "shvit_s1": False,
}
QUICK = ["lcnetv2_small", "repghostnet_050"]


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


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in MERGES_AFTER_A_FOLD
    ],
)
def test_every_family_merges_before_a_conversion_and_otherwise_keeps_outputs_or_fails(name):
    network = randomised(timm.create_model(name))
    image = torch.randn(1, 3, 224, 224)
    merged_first = reparameterize_model(network)
    convert(merged_first)
    expected = merged_first(image)
    fold_to_dense_(merged_first)
    assert_same(merged_first(image), expected)

    convert(network)
    expected = network(image)
    try:
        merged_unfolded = reparameterize_model(network)(image)
    except (RuntimeError, AssertionError):
        pass
    else:
        assert_same(merged_unfolded, expected)
    fold_to_dense_(network)
    assert_same(network(image), expected)
    if MERGES_AFTER_A_FOLD[name]:
        assert_same(reparameterize_model(network)(image), expected)
    else:
        with pytest.raises((RuntimeError, AssertionError)):
            reparameterize_model(network)
