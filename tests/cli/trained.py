"""A small network whose depthwise kernels matter, and images for it."""

from pathlib import Path

import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn


def write_trained(base: Path, model: str | nn.Module, images: int) -> Path:
    """Write `weights.safetensors` and a folder `images` of smooth images into `base`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(model) if isinstance(model, str) else model
        for module in model.modules():
            if isinstance(module, nn.Conv2d) and module.groups > 1:
                nn.init.normal_(module.weight, std=0.3)
        save_file(model.state_dict(), base / "weights.safetensors")
        (base / "images").mkdir()
        for index in range(images):
            pixels = torch.randint(256, (6, 6, 3), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).resize((70, 70)).save(
                base / "images" / f"{index:02d}.png"
            )
    return base
