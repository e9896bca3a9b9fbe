"""Kernels with torch's default initialisation are told from all others."""

import timm
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from dcls_convert.networks.untrained import has_norms, have_torch_default_init


def kernels_of(model):
    return [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 7, groups=32)
    )


def test_norms_are_told_from_other_classes_with_such_names():
    for module in (nn.BatchNorm2d(3), FrozenBatchNorm2d(3), nn.LayerNorm(3)):
        assert has_norms(nn.Sequential(module))
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    for module in (timm.create_model("nf_regnet_b0"), weight_norm(nn.Conv2d(3, 3, 3))):
        assert not has_norms(nn.Sequential(module))


def test_a_new_network_is_recognised_whatever_its_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert have_torch_default_init(kernels_of(network().to(dtype)))


def test_smaller_weights_and_other_initialisations_are_not_taken_for_the_default():
    model = network()
    scaled = [kernel.detach() * 0.9 for kernel in kernels_of(model)]
    assert not have_torch_default_init(scaled)
    assert not have_torch_default_init(kernels_of(timm.create_model("test_resnet")))
    assert not have_torch_default_init(kernels_of(model)[:1])  # too few weights to tell
    assert not have_torch_default_init(kernels_of(network().to("meta")))
