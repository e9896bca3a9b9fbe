"""Norms are told from all other modules."""

import timm
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from dcls_convert.starts.start import has_norms


def test_norms_are_told_from_other_classes_with_such_names():
    for module in (nn.BatchNorm2d(3), FrozenBatchNorm2d(3), nn.LayerNorm(3)):
        assert has_norms(nn.Sequential(module))
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    for module in (timm.create_model("nf_regnet_b0"), weight_norm(nn.Conv2d(3, 3, 3))):
        assert not has_norms(nn.Sequential(module))
