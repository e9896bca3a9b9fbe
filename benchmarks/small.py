"""Shared by the experiments with small networks: a ConvNeXt of few stages, digits, training."""

import math
import statistics
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from timm.layers import LayerNorm2d, NormMlpClassifierHead
from timm.models.convnext import ConvNeXtStage
from torch import Tensor, nn

from dcls_convert.tuning import param_groups

CLIPPED_NORM = 1.0  # of the gradient
WEIGHT_DECAY = 0.05  # as in ConvNeXt; none for positions (as in the paper), biases and norms
WARM_UP = 50  # steps
PREDICT_BATCH = 250  # images

Data = tuple[Tensor, Tensor]  # images (N, C, H, W), classes (N,)


def small_convnext(
    *,
    in_channels: int,
    classes: int,
    depths: Sequence[int] = (2, 2),
    dims: Sequence[int] = (32, 64),
    kernel_size: int = 7,
    dilation: int = 1,
    patch: int = 2,
    layer_scale: float = 0.1,
    init_std: float | None = 0.02,
) -> nn.Module:
    """Build stem, stages and head of timm's ConvNeXt, with one stage for each depth.

    timm's own class always has 4 stages.

    Args:
        layer_scale: Initial layer scale. These trainings are too short to grow it from ConvNeXt's
            1e-6.
        init_std: Standard deviation of the initial weights, by default ConvNeXt's. None keeps the
            initialisation of `torch.nn`.
    """
    stages = []
    for index, (depth, channels) in enumerate(zip(depths, dims, strict=True)):
        stages.append(
            ConvNeXtStage(
                dims[max(index - 1, 0)],
                channels,
                kernel_size=kernel_size,
                stride=1 if index == 0 else 2,
                depth=depth,
                ls_init_value=layer_scale,
                norm_layer=LayerNorm2d,
                norm_layer_cl=nn.LayerNorm,
            )
        )
    model = nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(
                nn.Conv2d(in_channels, dims[0], patch, stride=patch), LayerNorm2d(dims[0])
            ),
            stages=nn.Sequential(*stages),
            head=NormMlpClassifierHead(dims[-1], classes, norm_layer=LayerNorm2d),
        )
    )
    for module in model.modules():
        if init_std is not None and isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=init_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if dilation > 1 and isinstance(module, nn.Conv2d) and module.groups > 1:
            module.dilation = (dilation, dilation)
            module.padding = (dilation * (kernel_size // 2),) * 2
    return model.to(memory_format=torch.channels_last)


def digits(side: int) -> Data:
    """Return scikit-learn's digits, (1797, 1, side, side) from -1 to 1, and their classes."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    pixels = torch.tensor(dataset.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = nn.functional.interpolate(pixels, (side, side), mode="bilinear")
    return images, torch.tensor(dataset.target)


def train_(model: nn.Module, batches: Iterator[Data], *, steps: int, lr: float) -> None:
    """Train with AdamW, a linear warm-up and a cosine to 0."""
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=WEIGHT_DECAY), lr=lr)
    model.train()
    for step in range(steps):
        factor = min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr * factor * group.get("lr_scale", 1.0)
        images, classes = next(batches)
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_NORM)
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the accuracy in percent; the model stays in its mode."""
    was_training = model.training
    model.eval()
    images, classes = data
    parts = zip(images.split(PREDICT_BATCH), classes.split(PREDICT_BATCH), strict=True)
    right = 0
    for part, part_classes in parts:
        right += int((model(part).argmax(1) == part_classes).sum())
    model.train(was_training)
    return 100 * right / len(classes)


def mean_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """Format mean ± standard deviation over seeds."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
