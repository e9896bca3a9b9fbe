"""Compare networks on a task that needs a long range, with examples/compare.py.

    # Write the images.
    python benchmarks/long_range.py FOLDER [--seed 0]
    cd benchmarks && python ../examples/compare.py long_range:convnext --data FOLDER \
        --input-size 1 32 32 --augmentation none --hflip 0 --batch-size 32 --epochs 8 --lr 0.003 \
        --smoothing 0 --seeds 3 \
        --sizes 13,13-frozen,13-uniform,13-uniform-frozen,13-dense
    # Print the results of 2026-11-21.
    python benchmarks/long_range.py --table

This is a small version of the paper's Table 2, from random initialisation. An image of 32 x 32
pixels, 16 x 16 cells for the network, has a patch with horizontal stripes, a patch with vertical
stripes 6 to 10 cells away, two chequered patches that mean nothing and may cover them, and noise.
The class is the direction from the first patch to the second, one of 8. All patches are in all
classes, so nothing local tells the class. Two ConvNeXt blocks work on the cells; a dense 7x7 kernel
reaches 3 cells to each side.

The networks of the stored results are dense 7x7, 7x7 with dilation 2 (`long_range:dilated`), dense
13x13, and DCLS with a window of 13 and as many parameters as dense 7x7: tied, untied, with frozen
positions, and without the larger learning rate of positions. (The paper's window of 17 is larger
than this image.) Positions start uniformly over the window, since they cannot move far in so few
steps: AdamW moves a position by about its learning rate per step. In one more network they start
from N(0, 0.5 cells), as in the paper, which trains for 300 epochs. Each seed had new data.

Some choices were made by looking at results, all on data seeds that are not used here: the number
of directions, depth, initialisation and learning rate, so that dense 7x7 learns the task without
reaching 100%, and the uniform start, since networks that start from N(0, 0.5) stayed at chance in
short trainings.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import RESULTS, markdown_table, script_parser, stored

if TYPE_CHECKING:  # --table does not need torch
    import torch
    from torch import nn

CELLS = 16  # per side of the image
PIXELS = 2  # per side of a cell
PATCH = 3  # cells per side of a patch
DIRECTIONS = 8
DISTANCES = (6.0, 10.0)  # cells
DISTRACTORS = 2
FIRST_DATA_SEED = 2000  # seeds from 1000 on were used while the task was designed
NOISE = 0.4  # standard deviation; stripes are -1 and 1
TEXTURES = (  # pixels of a cell; the last is for distractors
    ((1, 1), (-1, -1)),
    ((1, -1), (1, -1)),
    ((1, -1), (-1, 1)),
)
LARGEST = 3.0  # values from -LARGEST to LARGEST become the 256 levels of a pixel
IMAGES = {"train": 4096, "val": 2000}
STORED = RESULTS / "long_range.jsonl"
DENSE = "dense 7x7"
FROZEN = "DCLS 13, positions frozen"
DENSE_ELEMENTS = {DENSE: 49, "dilated 7x7, rate 2": 49, "dense 13x13": 169}


def make_images(count: int, generator: "torch.Generator") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return images (count, rows, columns) and their directions (count,)."""
    import torch

    classes = torch.randint(DIRECTIONS, (count,), generator=generator)
    angle = (classes + torch.rand(count, generator=generator) - 0.5) * 2 * math.pi / DIRECTIONS
    distance = DISTANCES[0] + (DISTANCES[1] - DISTANCES[0]) * torch.rand(count, generator=generator)
    # (2, N): rows, columns
    offset = (distance * torch.stack([angle.sin(), angle.cos()])).round().long()
    room = CELLS - PATCH - offset.abs()
    first = (torch.rand(2, count, generator=generator) * (room + 1)).long() + (-offset).clamp(min=0)
    others = [
        torch.randint(CELLS - PATCH + 1, (2, count), generator=generator)
        for _ in range(DISTRACTORS)
    ]
    images = NOISE * torch.randn(count, CELLS * PIXELS, CELLS * PIXELS, generator=generator)
    image = torch.arange(count)[:, None, None]
    pixels = torch.arange(PATCH * PIXELS)
    for index, corner in enumerate([first, first + offset, *others]):
        texture = torch.tensor(TEXTURES[min(index, 2)]).repeat(PATCH, PATCH)
        rows, columns = (PIXELS * corner)[:, :, None, None]
        images[image, rows + pixels[:, None], columns + pixels] += texture
    return images, classes


def prepare(folder: Path, seed: int) -> None:
    """Write the images as files, in a folder for each direction."""
    import torch
    from PIL import Image

    generator = torch.Generator().manual_seed(FIRST_DATA_SEED + seed)
    for part, count in IMAGES.items():
        images, classes = make_images(count, generator)
        levels = ((images / LARGEST + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        for number, (pixels, direction) in enumerate(zip(levels, classes.tolist(), strict=True)):
            path = folder / part / str(direction) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(path)


def convnext(num_classes: int = DIRECTIONS, dilation: int = 1) -> "nn.Module":
    """Two ConvNeXt blocks with 7x7 kernels on 16 x 16 cells."""
    import small

    return small.small_convnext(
        in_channels=1,
        classes=num_classes,
        depths=[2],
        dims=[24],
        kernel_size=7,
        dilation=dilation,
        layer_scale=1.0,
        init_std=None,
    )


def dilated(num_classes: int = DIRECTIONS) -> "nn.Module":
    """The same network with dilated kernels, as wide as 13x13."""
    return convnext(num_classes, dilation=2)


def table() -> str:
    """Return Markdown with a line for each network; gains are between networks of the same seed."""
    from small import mean_and_spread

    rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in stored(STORED)["rows"]:
        rows[row["network"]].append(row)
    header = [
        "network",
        "parameters",
        "elements",
        "test accuracy, %",
        "over dense 7x7, by seed",
        "over frozen positions, by seed",
        "training accuracy, %",
        "cells moved",
    ]
    lines = []
    for name, members in rows.items():
        moved = ""
        if "moved" in members[0]:
            moved = mean_and_spread([row["moved"] for row in members], 2)
        lines.append(
            [
                name,
                f"{members[0]['params']:,}",
                str(members[0].get("elements", DENSE_ELEMENTS.get(name))),
                mean_and_spread([row["test"] for row in members]),
                "" if name == DENSE else gains(members, rows[DENSE]),
                "" if name == FROZEN else gains(members, rows[FROZEN]),
                mean_and_spread([row["train"] for row in members]),
                moved,
            ]
        )
    return markdown_table(header, lines, align_right=False)


def gains(rows: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> str:
    """Return the gains over the baseline in points of test accuracy, seed by seed."""
    pairs = zip(rows, baseline, strict=True)
    return ", ".join(f"{row['test'] - base['test']:+.1f}" for row, base in pairs)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seed", type=int, default=0, help="of the images")
    parser.add_argument("--table", action="store_true", help="print the stored results")
    options = parser.parse_args()
    if options.folder is not None:
        prepare(options.folder, options.seed)
    if options.table:
        print(table())


if __name__ == "__main__":
    main()
