"""The algorithm of a convolution is chosen by a rule on its shapes, or by the environment."""

import itertools
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dcls_convert.depthwise import choice, choices, matmul, onednn
from dcls_convert.depthwise.choice import VARIABLE, choose_algorithm, fastest_conv2d
from dcls_convert.errors import DclsConvertError

from ..recorded_calls import recording

CASE = {
    "device": "cuda",
    "dtype": torch.bfloat16,
    "input_shape": (128, 96, 56, 56),
    "kernel_shape": (96, 1, 17, 17),
    "stride": (1, 1),
    "padding": (8, 8),
    "dilation": (1, 1),
    "groups": 96,
    "gradients": True,
}


def chosen(**changes):
    return choose_algorithm(**{**CASE, **changes})[0]


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(onednn, "max_padding_columns", lambda: 6)
    monkeypatch.setattr(choice, "_chosen", {})


def test_the_rule_compares_patches_times_taps_with_inputs():
    """The numbers of patches, and of inputs that a patch needs, are counted independently."""
    bounds = {True: (81, 8), False: (169, 32)}
    cases = set()
    for side in (56, 28, 14, 7, 64, 32, 16, 8):
        for window in (7, 9, 11, 13, 17, 31):
            for images in (1, 4, 8, 32, 128):
                for gradients, (min_taps, ratio) in bounds.items():
                    patches = math.ceil(side / 14)
                    starts = range(0, side, math.ceil(side / patches))
                    input_side = side  # a single patch needs no padding
                    if len(starts) > 1:
                        input_side = min(side, starts[1]) + window - 1
                    inputs = input_side**2
                    pays = images * len(starts) ** 2 * window**2 >= ratio * inputs
                    expected = "matmul" if pays and window**2 >= min_taps else "torch"
                    assert expected == chosen(
                        input_shape=(images, 96, side, side),
                        kernel_shape=(96, 1, window, window),
                        padding=(window // 2, window // 2),
                        gradients=gradients,
                    )
                    cases.add((expected, gradients))
    assert len(cases) == 4


def smallest_batch(window, side, gradients):
    """Return the smallest batch that is computed as products, as written in docs/speed.md."""
    if chosen(kernel_shape=(96, 1, window, window), gradients=gradients) == "torch":
        return "-"
    for images in itertools.count(1):
        algorithm = chosen(
            input_shape=(images, 96, side, side),
            kernel_shape=(96, 1, window, window),
            padding=(window // 2, window // 2),
            gradients=gradients,
        )
        if algorithm == "matmul":
            return str(images)


def test_the_documented_table_is_the_rule():
    text = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| window |")
    sides = list(map(int, re.findall(r"map (\d+)", table)))
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)
    assert rows
    for window, cells in rows:
        for side, cell in zip(sides, cells.split(" | "), strict=True):
            expected = [smallest_batch(int(window), side, gradients) for gradients in (True, False)]
            assert cell == " / ".join(expected), (window, side)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_where_nothing_is_known_products_are_used_only_on_demand(monkeypatch, device):
    assert chosen(device=device) == "torch"
    monkeypatch.setenv(VARIABLE, "matmul")
    assert chosen(device=device) == "matmul"


def test_the_environment_overrides_the_rule_where_products_are_possible(monkeypatch):
    assert chosen(device="cpu", dtype=torch.float32) == "onednn"
    monkeypatch.setenv(VARIABLE, "torch")
    assert chosen() == chosen(device="cpu") == "torch"
    monkeypatch.setenv(VARIABLE, "matmul")
    small = {"input_shape": (1, 96, 3, 4), "kernel_shape": (96, 1, 2, 3), "padding": (1, 1)}
    assert chosen(**small) == chosen(device="cpu") == "matmul"
    assert chosen(device="cpu", stride=(2, 1)) == "onednn"
    monkeypatch.setenv(VARIABLE, "cudnn")
    with pytest.raises(DclsConvertError, match=f"{VARIABLE}='cudnn' must be auto, torch or matmul"):
        fastest_conv2d(
            torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 1
        )


@pytest.mark.parametrize(
    ("changes", "on_cpu"),
    [
        ({"stride": (2, 1)}, "onednn"),
        ({"kernel_shape": (192, 1, 17, 17)}, "onednn"),
        ({"kernel_shape": (96, 1, 53, 17), "padding": (26, 8)}, "onednn"),
        # torch reports the error.
        ({"padding": (0, 0), "input_shape": (128, 96, 16, 56)}, "onednn"),
        ({"dilation": (1, 2)}, "torch"),
        ({"kernel_shape": (96, 1, 16, 16), "padding": "same"}, "torch"),
        # An empty map, although its padding is large enough for the window.
        ({"padding": (9, 8), "input_shape": (128, 96, 0, 56)}, "torch"),
        ({"input_shape": (0, 96, 56, 56)}, "torch"),
        ({"dtype": torch.int32}, "torch"),
        ({"device": "meta"}, "torch"),
    ],
)
def test_what_products_cannot_compute_is_computed_by_other_algorithms(monkeypatch, changes, on_cpu):
    monkeypatch.setenv(VARIABLE, "matmul")
    assert chosen() == "matmul"
    assert chosen(**changes) == "torch"
    assert chosen(**{"device": "cpu", "dtype": torch.float32, **changes}) == on_cpu


# The CPU stands in for a GPU.


@pytest.fixture
def _cpu_as_a_gpu(monkeypatch):
    monkeypatch.setattr(choice, "ESTIMATED_DEVICES", frozenset({"cpu"}))


MAPS = torch.ones(64, 3, 9, 9)
KERNEL = torch.ones(3, 1, 9, 9)


def convolve(maps=MAPS, kernel=KERNEL):
    return fastest_conv2d(maps, kernel, None, (1, 1), (4, 4), (1, 1), 3)


@pytest.mark.usefixtures("_cpu_as_a_gpu")
def test_each_choice_is_reported_once_with_its_reason(caplog):
    caplog.set_level(logging.DEBUG, "dcls_convert")
    learnt = KERNEL.clone().requires_grad_()
    for _ in range(2):
        convolve()
        convolve(kernel=learnt)
        convolve(MAPS[:1], learnt)
    reported = [str(choice) for choice in choices()]
    assert reported == [
        "cpu, torch.float32, window 9x9 on 64 x 3 maps of 9x9, forward only: torch "
        "(fewer than 169 taps)",
        "cpu, torch.float32, window 9x9 on 64 x 3 maps of 9x9, training: matmul "
        "(estimate: enough patches for matrix products)",
        "cpu, torch.float32, window 9x9 on 1 x 3 maps of 9x9, training: torch "
        "(estimate: too few patches for matrix products)",
    ]
    assert [record.getMessage() for record in caplog.records] == reported


@pytest.mark.usefixtures("_cpu_as_a_gpu")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_is_for_batches_on_both_sides_of_the_bound(dynamic):
    """A program for any batch size has no guard on it; products are used if there are gradients."""
    graphs = []

    def count(graph, _):
        graphs.append(str(graph.graph))
        return graph

    torch.compiler.reset()
    learnt = KERNEL.clone().requires_grad_()
    compiled = torch.compile(
        lambda maps: convolve(maps, learnt), backend=count, dynamic=dynamic, fullgraph=True
    )
    for images in (8, 9, 64, 128):  # products are used from 8 images on
        maps = MAPS[:1].expand(images, -1, -1, -1).contiguous()
        if dynamic:
            torch._dynamo.mark_dynamic(maps, 0)
        torch.testing.assert_close(compiled(maps), convolve(maps, learnt))
    assert len(graphs) == (1 if dynamic else 4)
    torch.compiler.reset()


@pytest.mark.usefixtures("_cpu_as_a_gpu")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_is_recomputed_gives_the_gradients_of_torch(monkeypatch, reentrant):
    calls = []
    monkeypatch.setattr(matmul, "depthwise", recording(matmul.depthwise, calls))
    maps = MAPS.clone().requires_grad_()
    kernel = KERNEL.clone().requires_grad_()
    checkpoint(convolve, maps, kernel, use_reentrant=reentrant).sum().backward()
    # A reentrant checkpoint runs its block without gradients first.
    assert len(calls) == (1 if reentrant else 2)
    expected = torch.autograd.grad(
        torch.nn.functional.conv2d(maps, kernel, padding=4, groups=3).sum(), (maps, kernel)
    )
    torch.testing.assert_close((maps.grad, kernel.grad), expected)


@pytest.mark.parametrize("max_patches", [1, 5])
def test_batches_in_parts_give_the_same_sums(monkeypatch, max_patches):
    """Batches are split on MPS, where products of many rows are wrong."""
    maps = torch.randn(7, 3, 20, 9, dtype=torch.float64)
    kernel = torch.randn(3, 1, 9, 9, dtype=torch.float64)
    grad = torch.randn(7, 3, 20, 9, dtype=torch.float64)
    whole = matmul.convolve(maps, kernel, (4, 4))
    whole_gradient = matmul.weight_gradient(maps, grad, (9, 9), (4, 4))
    monkeypatch.setitem(matmul.MAX_PATCHES, "cpu", max_patches)
    torch.testing.assert_close(matmul.convolve(maps, kernel, (4, 4)), whole)
    torch.testing.assert_close(matmul.weight_gradient(maps, grad, (9, 9), (4, 4)), whole_gradient)


@pytest.mark.parametrize("images", [1, 64, 1024])
@pytest.mark.parametrize("side", [7, 56, 200])
def test_channels_are_split_into_the_fewest_parts_that_memory_allows(images, side):
    """Parts have equally many channels, or differ by one."""
    maps = torch.empty(images, 4096, side, side, dtype=torch.float16, device="meta")
    vertical, horizontal = matmul.tile_map((side, side), (17, 17), (8, 8))
    parts = matmul._channel_part_count(maps, vertical, horizontal)

    def bytes_of(channels):
        patches = images * vertical.patches * horizontal.patches
        inputs = vertical.inputs_per_patch * horizontal.inputs_per_patch
        outputs = vertical.outputs_per_patch * horizontal.outputs_per_patch
        if side > 14:  # several patches, whose rows are padded
            inputs += -inputs % 8
            outputs += -outputs % 8
        numbers = [patches * inputs, patches * outputs, inputs * outputs]  # inputs, outputs, bank
        return 2 * channels * sum(numbers)

    channels = math.ceil(4096 / parts)
    assert bytes_of(channels) <= matmul.MAX_BYTES or channels == 1
    if parts > 1:
        assert bytes_of(math.ceil(4096 / (parts - 1))) > matmul.MAX_BYTES


def test_parts_of_channels_are_balanced(monkeypatch):
    pairs = []
    monkeypatch.setattr(torch, "bmm", recording(torch.bmm, pairs))
    monkeypatch.setattr(matmul, "_channel_part_count", lambda *_: 3)
    maps = torch.randn(1, 7, 9, 9)
    matmul.convolve(maps, torch.randn(7, 1, 9, 9), (4, 4))
    matmul.weight_gradient(maps, maps, (9, 9), (4, 4))
    channels = [len(left) for left, _ in pairs]
    assert channels == [3, 2, 2] * 2
