"""Shared by the experiments with small networks.

There are a ConvNeXt of few stages, its training, statistics over seeds, and the command line of the
experiments that are measured seed by seed: `warm_start.py`, `starts.py`.
"""

import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, Results, add_results_options_, script_parser, stored
from timm.layers import LayerNorm2d, NormMlpClassifierHead
from timm.models.convnext import ConvNeXtStage
from torch import Tensor, nn

from dcls_convert.tuning.param_groups import POSITION_LR_SCALE, param_groups

CLIPPED_NORM = 1.0  # of the gradient
WEIGHT_DECAY = 0.05  # as in ConvNeXt; none for positions (as in the paper), biases and norms
PREDICT_BATCH = 250  # images

Data = tuple[Tensor, Tensor]  # images (N, C, H, W), classes (N,)
Settings = dict[str, Any]  # of an experiment, by name


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


def train_(
    model: nn.Module,
    batches: Iterator[Data],
    *,
    steps: int,
    lr: float,
    warm_up: int = 50,
    position_lr_scale: float = POSITION_LR_SCALE,
    after_step: Callable[[int], None] = lambda step: None,
) -> float:
    """Train with AdamW, a linear warm-up and a cosine to 0.

    `after_step` is called with the number of each step, from 1.

    Returns:
        The mean loss of the last tenth of the steps.
    """
    optimizer = torch.optim.AdamW(param_groups(model, None, WEIGHT_DECAY, position_lr_scale), lr=lr)
    losses = []
    model.train()
    for step in range(steps):
        factor = min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr * factor * group.get("lr_scale", 1.0)
        images, classes = next(batches)
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_NORM)
        optimizer.step()
        losses.append(loss.item())
        after_step(step + 1)
    return statistics.fmean(losses[-max(1, steps // 10) :])


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


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def mean_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """Format mean ± standard deviation over seeds."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def main(
    doc: str | None,
    name: str,
    measure: Callable[[int, Settings], Iterable[dict[str, Any]]],
    settings: Settings,
    table: Callable[[dict[str, Any]], Iterator[str]],
) -> None:
    """Run an experiment from the command line: measure, store, and print the table.

    With --table, only print the table of the stored results.

    Args:
        doc: Docstring of the script.
        name: File of the results, called as the script.
        measure: Takes a seed and the settings, and yields rows of measurements.
        settings: Stored beside the rows. "steps" is the default of --steps.
        table: Turns the stored results into lines of Markdown.
    """
    parser = script_parser(doc)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=settings["steps"], help="training steps before fine-tuning"
    )
    add_results_options_(parser, RESULTS / name)
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        settings = settings | {"steps": options.steps}
        results = Results(
            path=options.output,
            command=f"python benchmarks/{Path(name).stem}.py "
            f"--seeds {options.seeds} --steps {options.steps}",
            settings=settings,
            rows=[],
        )
        for seed in range(options.seeds):
            for row in measure(seed, settings):
                results.add_({"seed": seed, **row})
    print("\n".join(table(stored(options.output))))
