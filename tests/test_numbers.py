"""Numbers in README and the pages are those that plans and stored results give.

A test lists pieces of a page with the computed numbers in them, and the page must have each. Where
a page is worded anew, its pieces change with it.
"""

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from dcls_convert import plan_conversion, predict_report

from .planning.nets import convs_of

ROOT = Path(__file__).parent.parent
GPU = ROOT / "benchmarks" / "results" / "gpu"
RESULTS = (ROOT / "benchmarks" / "results.md").read_text(encoding="utf-8")


def missing(pieces):
    """Return the pieces that their files do not have; line breaks and bold type do not count."""
    found = []
    for path, piece in pieces:
        text = (ROOT / path).read_text(encoding="utf-8").replace("**", "").replace("\n#", "\n")
        if piece not in " ".join(text.split()):
            found.append(f"{path}: {piece}")
    return found


def cells(start):
    """Return the cells of the row of results.md that begins so, without what is in brackets."""
    (row,) = [line for line in RESULTS.splitlines() if line.startswith(f"| {start} |")]
    return [re.sub(r" \(.*\)", "", cell.strip()) for cell in row.split("|")[1:-1]]


def percent(share):
    """Round a printed share to percent: "0.945" -> 95."""
    return int((100 * Decimal(share)).quantize(Decimal(1), ROUND_HALF_UP))


def test_costs_are_those_of_the_plans():
    tiny, small, base, b0, resnet50 = (
        predict_report(plan_conversion(convs_of(name), dilated_size=size))
        for name, size in [
            ("convnext_tiny", "auto"),
            ("convnext_small", "auto"),
            ("convnext_base", "auto"),
            ("efficientnet_b0", "auto"),
            ("resnet50", 7),
        ]
    )
    for report in (tiny, small, base):
        assert {layer.dilated_size for layer in report.layers} == {(17, 17)}
    sizes = {(layer.kernel_size, layer.dilated_size) for layer in b0.layers}
    assert sizes == {((3, 3), (5, 5)), ((5, 5), (7, 7))}
    (count,) = {layer.kernel_count for layer in tiny.layers}
    t, s, b, e = (f"{report.macs.percent:.1f}" for report in (tiny, small, base, b0))
    times = resnet50.macs.after / resnet50.macs.before
    assert not missing(
        [
            ("README.md", f"ConvNeXt-T needs {t} % more"),
            ("docs/index.md", f"what the conversion costs: {t} % more MACs"),
            ("docs/index.md", f"{count} elements of a kernel of ConvNeXt-T may lie anywhere in"),
            ("docs/index.md", f"17x17 = {17 * 17} cells"),
            ("docs/index.md", f"{count} elements and their positions cost about as much as the 49"),
            ("docs/index.md", f"needs {times:.1f} times as many with 7x7 windows"),
            ("docs/convert.md", f"paper's 17x17, for {t}, {s} and {b} % more MACs"),
            ("docs/convert.md", f"gets 5x5 for 3x3 and 7x7 for 5x5 (+{e} %)"),
            ("dcls_convert/options.py", f"ConvNeXts add {b} to {t}"),
        ]
    )


def test_times_on_a_cpu_are_those_of_the_stored_results():
    over = {}
    for line in (GPU.parent / "models.jsonl").read_text(encoding="utf-8").splitlines()[1:]:
        row = json.loads(line)
        if "over_ours" in row:
            name = (row["model"], row["mode"], row["implementation"])
            over[name] = row["over_ours"]["median"]

    def times(model, mode, other="dense original"):
        return 1 / over[model, mode, other]

    one = "inference, batch 1"
    eight = "inference, batch 8"
    training = "training step, batch 8"
    tiny = "convnext_tiny"
    resnet50 = "resnet50"
    resnet18 = "resnet18"
    authors = "authors' package"

    def row(model, mode, *cells):
        folded = over[model, mode, "ours folded"] * times(model, mode)
        return f"| {' | '.join(cells)} | {times(model, mode):.2f} | {folded:.2f} |"

    construction = cells("geometric mean")
    memory = [cells(f"`{name}` | davit_giant")[5] for name in ("load_converted", "verify")]
    networks = {
        tiny: "ConvNeXt-T, 17x17",
        resnet50: "ResNet-50, 7x7",
        resnet18: "ResNet-18, 7x7",
    }
    speed = [
        f"1/{construction[1]} of the time of the authors' v0 and 1/{construction[2]} of their v1",
        f"ConvNeXt-T is {over[tiny, one, authors]:.0f} times as fast (one image), and a training "
        f"step {over[tiny, training, authors]:.1f} times as fast (batch of 8)",
        *(
            row(model, eight, "8", network, f"{times(model, training):.2f}")
            for model, network in networks.items()
        ),
        *(row(model, one, "1", f"{network} |") for model, network in networks.items()),
        f"is {memory[0]} to {memory[1]} times the size of the weights",
    ]
    readme = (
        f"ResNet-50 takes {times(resnet50, one):.1f} times as long, ResNet-18 "
        f"{times(resnet18, one):.1f} times"
    )
    assert not missing([("README.md", readme), *(("docs/speed.md", piece) for piece in speed)])


def test_times_on_a_gpu_are_those_of_the_stored_results():
    text = (GPU / "h200-networks.json").read_text(encoding="utf-8")
    rows_of_networks = json.loads(text)["rows"]
    networks = {row["row"]: row for row in rows_of_networks}
    pieces = []
    rows_of_the_page = [
        *(("training", batch) for batch in (256, 128, 32, 8)),
        *(("inference", batch) for batch in (128, 8, 1)),
    ]
    for mode, batch in rows_of_the_page:
        name = f"ConvNeXt-T, {mode}, {batch}"
        original, converted = (
            f"{networks[name][which]['images_per_second']:,.0f} "
            f"({networks[f'kernels: {name}'][which]['gpu_ms']:.1f})"
            for which in ("original", "converted")
        )
        ratio = f"{networks[name]['ratio']:.2f}"
        pieces.append(f"| {mode}, batch {batch} | {original} | {converted} | {ratio} |")
    rows = json.loads((GPU / "h200-layers.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if row["row"].startswith("layer: ") and "7x7, 7x7" not in row["row"]:
            times = (f"{row[key]:.2f}".removeprefix("0") for key in ("forward_ms", "step_ms"))
            pieces.append(f"| {' / '.join(times)} |")
    log = (GPU / "torch-layers.log").read_text(encoding="utf-8")
    pattern = r"C=(\d+) .* N=128 R=([79]) way=torch forward=([\d.]+) step=([\d.]+)"
    wide = {(c, r): (float(f), float(s)) for c, r, f, s in re.findall(pattern, log)}
    ratios = [
        [wide[c, "9"][index] / wide[c, "7"][index] for c, r in wide if r == "9"] for index in (0, 1)
    ]
    forward, step = (f"{min(some):.0f} to {max(some):.0f} times" for some in ratios)
    speed = [f"9x9 takes {forward} as long as its 7x7 (with both gradients, {step})"]
    log = (GPU / "torch-networks.log").read_text(encoding="utf-8")
    pattern = r"N=(\d+) way=(\w+) training=False ms=([\d.]+)"
    milliseconds = {(int(n), way): float(ms) for n, way, ms in re.findall(pattern, log)}
    for batch in (256, 128, 32, 8, 1):
        row_of_batch = f"| H200 | {batch} | ConvNeXt-T, 17x17 |"
        for mode in ("training", "inference"):
            measured = networks.get(f"ConvNeXt-T, {mode}, {batch}")
            row_of_batch += f" {1 / measured['ratio']:.2f} |" if measured else " |"
        if measured:
            folded = milliseconds[batch, "torch"] / milliseconds[batch, "original"]
            row_of_batch += f" {folded:.2g} |"
        speed.append(row_of_batch)
    small = json.loads((GPU / "h200-small-batches.json").read_text(encoding="utf-8"))["rows"]
    for device, batch, name in [
        ("H200, `torch.compile`", 128, "compiled (default)"),
        ('H200, `mode="reduce-overhead"`', 8, "compiled (reduce-overhead)"),
    ]:
        row_name = f"ConvNeXt-T, training, {name}, {batch}"
        (ratio,) = [row["ratio"] for row in [*rows_of_networks, *small] if row["row"] == row_name]
        speed.append(f"| {device} | {batch} | ConvNeXt-T, 17x17 | {1 / ratio:.2f} | | |")
    host = [
        networks[f"host: {layer}"]["microseconds"]
        for layer in ("converted layer", "nn.Conv2d, 7x7")
    ]
    more = 18 * (host[0] - host[1]) / 1000
    pieces.append(
        f"host of that machine {host[0] / 1000:.2f} ms, and {host[1] / 1000:.2f} ms for a plain "
        f"convolution: {more:.1f} ms more for the 18 layers"
    )
    at_128, at_32 = (1 / networks[f"ConvNeXt-T, training, {n}"]["ratio"] for n in (128, 32))
    readme = (
        f"takes {at_128:.2f} times as long as the original's at a batch of 128, and {at_32:.2f}"
    )
    assert not missing(
        [
            ("README.md", readme),
            *(("docs/speed.md", piece) for piece in speed),
            *(("benchmarks/results.md", piece) for piece in pieces),
        ]
    )


def test_what_networks_keep_and_gain_is_as_in_the_stored_results():
    evidence = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for gain in re.findall(r"[\d.]+ ± [\d.]*\d", evidence.partition("## On your images")[0]):
        assert gain in RESULTS, gain

    lite0 = "tf_efficientnet_lite0 | 64"
    top1 = {}
    for row in (
        "largest-100 | before",
        *(f"{name} | now" for name in ("fit-100", "calibrated-100")),
    ):
        top1[row.split()[0]] = percent(cells(f"{lite0} | {row}")[8])
    best = cells(f"{lite0} | calibrated-100-error | now")
    at_80 = cells(f"{lite0} | calibrated-80-error | now")
    kl = best[9], cells(f"{lite0} | calibrated-100 | now")[9]
    fit, kept = top1["fit-100"], percent(best[8])
    gain, of_3x3 = (
        cells(name)[4].split()[0].removeprefix("+")
        for name in ("13x13 frozen normal | 748,384", "3x3 dense")
    )
    dense, learnt = cells("dense: original"), cells("dense: converted")
    fewer = 100 - 100 * int(learnt[3]) / int(dense[3])
    delays = cells("learnt delays, Gaussian")
    sweep = (ROOT / "benchmarks" / "deep_sweep.md").read_text(encoding="utf-8")
    tried, larger = re.findall(r"\*\*(\d+) models tried.*, (\d+) with more parameters", sweep)[0]
    pieces = {
        "README.md": [
            f"for {kept} % of the crops of other photographs; without images, for {fit} %",
            f"{of_3x3} there without learnt positions",
        ],
        "docs/starts.md": [
            f"| largest | {top1['largest-100']} % | | fit | {fit} % |",
            f"`--scope model` | {top1['calibrated-100']} % | | fit and `--calibrate` | {kept} %",
            f"the same at 80 % of the parameters | {percent(at_80[8])} %",
            f"than with `--scope model`: {kl[0]} and {kl[1]}",
        ],
        "docs/evidence.md": [
            f"with frozen positions | +{gain} ±",
            f"chance is 12.5 % | causal, sees 7 steps | {dense[1]} %",
            f"{fewer:.0f} % fewer parameters, {int(learnt[4]) / int(dense[4]):.1f} times the MACs "
            f"| {learnt[1]} %",
            f"frozen positions | {cells('dense: converted, positions frozen')[1]} %",
            f"| no delays | {cells('no delays')[5]} %",
            f"| random delays, as many trained parameters | {cells('random delays')[5]} %",
            f"before rounding, all are right | {delays[4]} %",
            f"weights trained further after rounding | {delays[5]} %",
            f"all {tried} models of timm and torchvision",
            f"The {larger} larger ones were not tried",
        ],
    }
    assert not missing((f"{path}", piece) for path, some in pieces.items() for piece in some)
