"""A small network, images for it, and the relative change of its outputs."""

import torch
from torch import nn

INPUT_SIZE = (3, 24, 24)


def smooth_noise(count=8, size=24, seed=0):
    """Return smooth noise: neighbouring pixels are alike, as in photographs."""
    noise = torch.randn(count, 3, size + 4, size + 4, generator=torch.Generator().manual_seed(seed))
    return nn.functional.avg_pool2d(noise, 5, stride=1) + 0.3


def conv_block(channels=8, *, bias=False, norm=True, stride=1):
    conv = nn.Conv2d(channels, channels, 5, padding=2, groups=channels, bias=bias, stride=stride)
    return nn.Sequential(conv, nn.BatchNorm2d(channels) if norm else nn.Identity(), nn.ReLU6())


def network(channels=8, **options):
    """Make a network in which every layer changes the outputs noticeably."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*[conv_block(channels, **options) for _ in range(3)])
    model = nn.Sequential(nn.Conv2d(3, channels, 1), blocks, nn.Conv2d(channels, 5, 1))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.4)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def output_error(model, before, images):
    """Return the relative change of the model's outputs since `before`."""
    with torch.no_grad():
        return float((model(images) - before).norm() / before.norm())
