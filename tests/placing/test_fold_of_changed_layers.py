"""Fold layers whose weight, bias or positions torch computes from other tensors: pruned, with a
weight norm, parametrised.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from dcls_convert import fold_to_dense_
from dcls_convert.layers.dcls_conv import DclsConv2d

ATOL = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # from torch's older norms


CHANGES = {
    "pruned weight": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned positions": lambda layer: prune.random_unstructured(layer, "positions", 0.5),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "older weight norm": weight_norm,
    "older spectral norm": spectral_norm,
    "parametrised bias": lambda layer: parametrize.register_parametrization(
        layer, "bias", nn.Tanh()
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_folded_layer_is_a_plain_convolution_with_the_same_outputs(change):
    torch.manual_seed(0)
    layer = DclsConv2d(
        4, 6, kernel_count=5, dilated_kernel_size=7, padding=3, groups=2, dtype=torch.float64
    )
    CHANGES[change](layer)
    model = nn.Sequential(layer).eval()
    images = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with torch.no_grad():
        model(images)
        for parameter in layer.parameters():
            parameter.mul_(1.1)  # folding must compute weights anew
        fold_to_dense_(model)
        expected = layer(images)
    assert type(model[0]) is nn.Conv2d
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert not list(model.buffers())
    for training in (False, True):
        torch.testing.assert_close(model.train(training)(images), expected, rtol=0, atol=ATOL)
    copy.deepcopy(model).load_state_dict(model.state_dict())
