"""Train on the emoji of three vendors and test on the fourth's, with examples/compare.py.

    # Write the images.
    python benchmarks/emoji.py FOLDER [--test VENDOR]
    cd benchmarks && python ../examples/compare.py emoji:small_convnext --data FOLDER \\
        --input-size 3 64 64 --batch-size 32 --lr 0.002 \\
        --sizes 17,17-kernel,17-uniform --epochs 19 --seeds 3 --output COMPARISON
    # Print the results of 2026-11-23, or draw where elements went.
    python benchmarks/emoji.py --table
    python benchmarks/emoji.py --picture COMPARISON FILE

Other rows of the table used `emoji:small_convmixer --sizes 9`, `--test google`,
`--position-lr-scale 1` or 20, Gaussian elements, or windows by stage, and as many seeds as they
list differences.

FOLDER gets `train` and `val`, each with a folder for every emoji of a thing (an animal, a
dish, a place ...): in `train` as three vendors draw it, in `val` as the fourth does, in
64 x 64 pixels on white. The pictures come from the npm packages emoji-datasource-VENDOR, which npm
downloads unless --packages names a folder that has them.
"""

import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import RESULTS, markdown_table, script_parser, stored

if TYPE_CHECKING:  # --table does not need torch
    from torch import Tensor, nn

VENDORS = ("apple", "facebook", "google", "twitter")
VERSION = "16.0.0"
SIDE = 64  # pixels
THINGS = (  # categories; not faces, flags, signs
    "Animals & Nature",
    "Food & Drink",
    "Travel & Places",
    "Activities",
    "Objects",
)
STORED = RESULTS / "emoji.jsonl"


def small_convnext(num_classes: int = 1000, **options: object) -> "nn.Module":
    """A ConvNeXt for small images: maps of 32, 16, 8 and 4 cells; 0.8 million parameters for 849
    classes.

    Layer scales start at 0.1, not at the usual 1e-6, from which a short training hardly grows them.
    """
    import timm

    return timm.create_model(
        "convnext_atto",
        num_classes=num_classes,
        depths=(1, 1, 3, 1),
        dims=(24, 48, 96, 192),
        patch_size=2,
        ls_init_value=0.1,
        **options,
    )


def small_convmixer(num_classes: int = 1000) -> "nn.Module":
    """A ConvMixer with a small receptive field: four layers of 5x5 kernels, on maps of 16 cells."""
    from timm.models.convmixer import ConvMixer

    return ConvMixer(128, 4, kernel_size=5, patch_size=4, num_classes=num_classes)


def prepare(folder: Path, test_vendor: str, packages: Path) -> int:
    """Write the images of all emoji; return how many emoji there are."""
    from PIL import Image

    archives = {}
    for vendor in VENDORS:
        archives[vendor] = tarfile.open(packages / f"emoji-datasource-{vendor}-{VERSION}.tgz")
    emoji_list = json.load(archives[VENDORS[0]].extractfile("package/emoji.json"))
    shared = []
    for emoji in emoji_list:
        has_images = all(emoji[f"has_img_{vendor}"] for vendor in VENDORS)
        if emoji["category"] in THINGS and has_images:
            shared.append(emoji["image"])
    for vendor, archive in archives.items():
        part = folder / ("val" if vendor == test_vendor else "train")
        members = {member.name: member for member in archive}
        for image in shared:
            member = members[f"package/img/{vendor}/{SIDE}/{image}"]
            picture = Image.open(archive.extractfile(member)).convert("RGBA").resize((SIDE, SIDE))
            path = part / Path(image).stem / f"{vendor}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            white = Image.new("RGBA", picture.size, "white")
            Image.alpha_composite(white, picture).convert("RGB").save(path)
    return len(shared)


def fetch_packages(folder: Path) -> None:
    for vendor in VENDORS:
        name = f"emoji-datasource-{vendor}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True)


def table() -> str:
    """Return Markdown: a row for each network, and sentences about those with over two pairs."""
    rows: list[dict[str, Any]] = stored(STORED)["rows"]
    header = [
        "network, tested on",
        "converted",
        "parameters",
        "MACs, M",
        "ms a step",
        "top-1, %",
        "by seed",
        "over seeds",
        "over images",
        "cells moved",
        "outside, %",
    ]
    sentences = []
    kernel_differences = []
    for row in rows:
        if len(row["differences"]) > 2:
            sentences.append(f"- {row['network']}, {row['sentence']}")
        if row["label"] in ("17x17 kernel", "9x9 kernel"):
            kernel_differences += row["differences"]
    better = sum(difference > 0 for difference in kernel_differences)
    mean = sum(kernel_differences) / len(kernel_differences)
    sentences.append(
        f"- over the old kernel, all: better in {better} of {len(kernel_differences)} pairs, "
        f"{mean:+.1f} points in the mean"
    )
    lines = [table_line(row) for row in rows]
    return "\n\n".join([markdown_table(header, lines), "\n".join(sentences)])


def table_line(row: dict[str, Any]) -> list[str]:
    moved = ["", ""]
    if row["distance"] is not None:
        moved = [f"{row['distance']:.2f}", f"{100 * row['outside']:.0f}"]
    return [
        f"{row['network']}, {row['test']}",
        row["label"],
        f"{row['params']:,}",
        f"{row['macs'] / 1e6:.1f}",
        f"{row['step_ms']:.0f}",
        f"{row['top1']:.1f}",
        ", ".join(f"{difference:+.1f}" for difference in row["differences"]),
        interval(row["over_seeds"]),
        interval(row["over_images"]),
        *moved,
    ]


def interval(bounds: dict[str, float] | None) -> str:
    return "" if bounds is None else f"{bounds['low']:+.1f} to {bounds['high']:+.1f}"


def draw(comparison: Path, target: Path) -> None:
    """Draw where 64 elements of each stage began and ended, for each start.

    The ends are those of the runs with seed 0.
    """
    import torch
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    import dcls_convert

    starts = {
        "normal": ("N(0, 0.5 cells)", "17-0"),
        "kernel": ("over 7x7", "17-kernel-0"),
        "uniform": ("over 17x17", "17-uniform-0"),
    }
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    panels = figure.subplots(len(starts), 4, sharex=True, sharey=True)
    for stage, panel in enumerate(panels[0]):
        panel.set_title(f"stage {stage}, maps of {SIDE >> (stage + 1)} cells", fontsize=9)
    for row, (start, (label, run)) in zip(panels, starts.items(), strict=True):
        network = small_convnext()
        dcls_convert.convert_(
            network, dilated_size=17, init="random", positions=start, input_size=(3, SIDE, SIDE)
        )
        state = torch.load(comparison / run / "state.pt", weights_only=True)
        names = sorted(dcls_convert.tuning.no_weight_decay(network))
        for panel, name in zip(row, names, strict=True):
            before = some_positions(network.get_parameter(name).detach())
            after = some_positions(state["model"][name])
            panel.plot([before[1], after[1]], [before[0], after[0]], "C0", lw=0.8)
            panel.plot(after[1], after[0], "C0.", ms=4)
            panel.add_patch(Rectangle((-3.5, -3.5), 7, 7, fill=False, ls="--", lw=0.8, ec="0.5"))
            panel.set(
                xlim=(-8.5, 8.5),
                ylim=(8.5, -8.5),
                aspect="equal",
                xticks=(-8, 0, 8),
                yticks=(-8, 0, 8),
            )
        row[0].set_ylabel(label)
    figure.savefig(target, dpi=110, metadata={"Software": None})


def some_positions(positions: "Tensor") -> "Tensor":
    """Return the rows and columns of 64 evenly chosen elements: (2, 64)."""
    elements = positions.flatten(1)
    return elements[:, :: elements.shape[1] // 64][:, :64]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--test", choices=VENDORS, default="apple", help="vendor to test with")
    parser.add_argument(
        "--packages", type=Path, help="folder of emoji-datasource-VENDOR-VERSION.tgz"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        nargs=2,
        metavar=("COMPARISON", "FILE"),
        help="draw where elements went",
    )
    parser.add_argument("--table", action="store_true", help="print the stored results")
    options = parser.parse_args()
    if options.folder is not None:
        with tempfile.TemporaryDirectory() as fetched:
            if options.packages is None:
                fetch_packages(Path(fetched))
            count = prepare(options.folder, options.test, options.packages or Path(fetched))
        print(f"{count} emoji, {len(VENDORS) - 1} vendors to learn from, {options.test} to test")
    if options.picture is not None:
        draw(*options.picture)
    if options.table:
        print(table())


if __name__ == "__main__":
    main()
