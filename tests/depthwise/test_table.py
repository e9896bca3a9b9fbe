"""The way of a convolution is chosen by one table, or by the environment."""

import dataclasses
import logging
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dcls_convert.depthwise import devices, onednn, products, table
from dcls_convert.depthwise.table import VARIABLE, Case, choose_way
from dcls_convert.errors import DclsConvertError

from ..recorded_calls import recording
from .by_table import conv2d

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
CASE = Case(
    device=GPU,
    dtype=torch.bfloat16,
    input_shape=(128, 96, 56, 56),
    kernel_shape=(96, 1, 17, 17),
    stride=(1, 1),
    padding=(8, 8),
    dilation=(1, 1),
    groups=96,
)
ON_CPU = {"device": CPU, "dtype": torch.float32}


def chosen(preferred="auto", **changes):
    return choose_way(dataclasses.replace(CASE, **changes), preferred).name


def window(rows, columns, padding=None):
    if padding is None:
        padding = (rows // 2, columns // 2)
    return {"kernel_shape": (96, 1, rows, columns), "padding": padding}


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    table._preference.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(onednn, "max_padding_columns", lambda: 6)
    monkeypatch.setattr(table, "why_no_blocks", lambda device: None)
    yield
    table._preference.cache_clear()


@pytest.fixture
def _no_blocks(monkeypatch):
    monkeypatch.setattr(table, "why_no_blocks", lambda device: "Triton is not installed")


@pytest.mark.parametrize("images", [1, 128])
def test_gpus_use_blocks_for_more_than_49_cells_whatever_the_batch(images):
    shape = (images, 96, 56, 56)
    for size, expected in ((7, "torch"), (9, "blocks"), (17, "blocks"), (51, "blocks")):
        assert chosen(input_shape=shape, **window(size, size)) == expected
    assert chosen(input_shape=shape, **window(3, 17)) == "blocks"
    assert chosen(input_shape=shape, **window(3, 15)) == "torch"


@pytest.mark.usefixtures("_no_blocks")
def test_gpus_without_blocks_use_products_for_8_images_and_81_cells():
    for images, size, expected in ((8, 9, "products"), (7, 9, "torch"), (8, 7, "torch")):
        assert chosen(input_shape=(images, 96, 56, 56), **window(size, size)) == expected


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "Triton is not installed"),
        (
            RuntimeError("Failed to find C compiler.\nPlease specify via CC"),
            "Triton cannot compile: Failed to find C compiler. Please specify via CC",
        ),
    ],
)
def test_a_gpu_that_could_use_blocks_and_does_not_is_reported_once(
    monkeypatch, caplog, error, reason
):
    """As in a container without Triton, or without a C compiler."""

    def fail(device):
        raise error

    monkeypatch.setattr(devices, "_has_enough_registers", lambda device: True)
    monkeypatch.setattr(devices, "find_spec", lambda name: error and name)
    monkeypatch.setattr(devices, "_compile_a_kernel", fail)
    devices._why_no_blocks.cache_clear()
    missing = [devices.why_no_blocks(GPU) for _ in range(2)]
    devices._why_no_blocks.cache_clear()
    assert missing == [reason, reason]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].getMessage().endswith(reason)


@pytest.mark.usefixtures("_no_blocks")
@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_where_nothing_is_known_products_are_used_only_on_demand(name):
    device = torch.device(name)
    assert chosen(device=device) == "torch"
    assert chosen("products", device=device) == "products"
    assert chosen("blocks", device=device) == "torch"


def test_cpus_use_onednn_and_blocks_only_in_tritons_interpreter(monkeypatch):
    assert chosen(**ON_CPU) == "onednn"
    assert chosen("blocks", **ON_CPU) == "blocks"
    assert chosen("products", **ON_CPU) == "products"
    monkeypatch.setattr(table, "why_no_blocks", lambda device: "not for cpu")
    assert chosen("blocks", **ON_CPU) == "onednn"


@pytest.mark.parametrize("device", [GPU, CPU])
def test_torch_can_be_demanded_everywhere(device):
    assert chosen("torch", device=device) == "torch"


@pytest.mark.parametrize(
    ("changes", "on_cpu"),
    [
        ({"kernel_shape": (192, 1, 17, 17)}, "onednn"),
        (window(53, 17), "onednn"),
        (window(16, 16, (8, 8)), "onednn"),
        (window(17, 17, (7, 8)), "onednn"),
        (window(17, 17, (0, 0)), "onednn"),
        (window(16, 16, "same"), "torch"),
        ({"stride": (3, 1)}, "onednn"),
        ({"dilation": (1, 2)}, "torch"),
        ({"input_shape": (128, 96, 0, 56)}, "torch"),  # although the padding is large enough
        ({"input_shape": (0, 96, 56, 56)}, "torch"),
        ({"dtype": torch.int32}, "torch"),
        ({"dtype": torch.float64}, "torch"),
    ],
)
def test_what_blocks_cannot_compute_is_computed_by_torch(changes, on_cpu):
    assert chosen() == "blocks"
    assert chosen(**changes) == "torch"
    assert chosen("blocks", **{**ON_CPU, **changes}) == on_cpu


@pytest.mark.parametrize(
    "shape",
    [
        (1, 65_536, 8, 8),  # more programs than an axis of a grid has
        (1, 4_096, 1_024, 512),  # 2**31 numbers in an image
        (4_096, 8, 1_024, 512),  # 2**31 cells of a channel
        (1, 1, 1, 2**23),  # more columns than `quotient` can divide
    ],
)
def test_maps_that_are_too_large_for_the_kernels_are_computed_by_torch(shape):
    channels = shape[1]
    large = {"input_shape": shape, "kernel_shape": (channels, 1, 17, 17), "groups": channels}
    assert chosen(**large) == "torch"


@pytest.mark.usefixtures("_no_blocks")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stride": (2, 1)}, "torch"),
        ({"input_shape": (128, 96, 16, 56), **window(17, 17, (0, 0))}, "torch"),
        (window(16, 16, (0, 0)), "products"),
    ],
)
def test_products_have_stride_1_and_windows_that_fit(changes, expected):
    assert chosen("products", **changes) == expected


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cudnn")
    expected = f"{VARIABLE}='cudnn' must be auto, torch, blocks or products"
    with pytest.raises(DclsConvertError, match=re.escape(expected)):
        table.preference()
    monkeypatch.setenv(VARIABLE, "products")
    assert table.preference() == "products"
    monkeypatch.setenv(VARIABLE, "torch")
    assert table.preference() == "products"


# The CPU stands in for a GPU.


@pytest.fixture
def _products_preferred(monkeypatch):
    monkeypatch.setattr(table, "preference", lambda: "products")


MAPS = torch.ones(64, 3, 9, 9)
KERNEL = torch.ones(3, 1, 9, 9)


def convolve(maps=MAPS, kernel=KERNEL):
    return conv2d(maps, kernel, None, (1, 1), (4, 4), (1, 1), 3)


def test_a_log_line_says_which_way_was_taken(caplog):
    caplog.set_level(logging.DEBUG, "dcls_convert")
    convolve()
    convolve(MAPS[:1].double(), KERNEL.double())
    assert [record.getMessage() for record in caplog.records] == [
        "cpu, torch.float32, window 9x9 on 64 x 3 maps of 9x9: by onednn",
        "cpu, torch.float64, window 9x9 on 1 x 3 maps of 9x9: by torch",
    ]


@pytest.mark.usefixtures("_products_preferred")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_is_for_batches_of_any_size(dynamic):
    graphs = []

    def count(graph, _):
        graphs.append(str(graph.graph))
        return graph

    torch.compiler.reset()
    learnt = KERNEL.clone().requires_grad_()
    compiled = torch.compile(
        lambda maps: convolve(maps, learnt), backend=count, dynamic=dynamic, fullgraph=True
    )
    for images in (8, 9, 64, 128):
        maps = MAPS[:1].expand(images, -1, -1, -1).contiguous()
        if dynamic:
            torch._dynamo.mark_dynamic(maps, 0)
        torch.testing.assert_close(compiled(maps), convolve(maps, learnt))
    assert len(graphs) == (1 if dynamic else 4)
    torch.compiler.reset()


@pytest.mark.usefixtures("_products_preferred")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_is_recomputed_gives_the_gradients_of_torch(monkeypatch, reentrant):
    calls = []
    monkeypatch.setattr(
        products, "depthwise_by_products", recording(products.depthwise_by_products, calls)
    )
    maps = MAPS.clone().requires_grad_()
    kernel = KERNEL.clone().requires_grad_()
    checkpoint(convolve, maps, kernel, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2
    expected = torch.autograd.grad(
        torch.nn.functional.conv2d(maps, kernel, padding=4, groups=3).sum(), (maps, kernel)
    )
    torch.testing.assert_close((maps.grad, kernel.grad), expected)
