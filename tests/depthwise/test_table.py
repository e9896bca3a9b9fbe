"""The algorithm of a convolution is chosen by one table, or by the environment."""

import dataclasses
import re

import pytest
import torch

from dcls_convert.depthwise import devices, onednn, table
from dcls_convert.depthwise.table import VARIABLE, ConvSpec, choose_algorithm
from dcls_convert.errors import DclsConvertError

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
SPEC = ConvSpec(
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
    return choose_algorithm(dataclasses.replace(SPEC, **changes), preferred).name


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


def images(count):
    return {"input_shape": (count, 96, 56, 56)}


GPU_WITHOUT_BLOCKS = (
    ("auto", images(8) | window(9, 9), "products"),
    ("auto", images(7) | window(9, 9), "torch"),
    ("auto", images(8) | window(7, 7), "torch"),
    ("torch", {}, "torch"),
    ("products", {"stride": (2, 1)}, "torch"),
    ("products", window(16, 16, (0, 0)), "products"),
    # Nothing is known about this device.
    ("auto", {"device": torch.device("xpu")}, "torch"),
    ("products", {"device": torch.device("xpu")}, "products"),
)


@pytest.mark.parametrize(("preferred", "changes", "algorithm"), GPU_WITHOUT_BLOCKS)
def test_gpus_without_blocks_use_products_for_many_images_and_wide_windows(
    monkeypatch, preferred, changes, algorithm
):
    monkeypatch.setattr(table, "why_no_blocks", lambda device: "Triton is not installed")
    assert chosen(preferred, **changes) == algorithm


@pytest.mark.parametrize("count", [1, 128])
def test_gpus_use_blocks_for_more_than_49_cells_whatever_the_batch(count):
    sizes = {(7, 7): "torch", (9, 9): "blocks", (51, 51): "blocks", (3, 17): "blocks"}
    for size, expected in {**sizes, (3, 15): "torch"}.items():
        assert chosen(**images(count), **window(*size)) == expected


def test_cpus_use_onednn_and_blocks_only_in_tritons_interpreter(monkeypatch):
    preferred = {"auto": "onednn", "blocks": "blocks", "products": "products", "torch": "torch"}
    for name, algorithm in preferred.items():
        assert chosen(name, **ON_CPU) == algorithm
    monkeypatch.setattr(table, "why_no_blocks", lambda device: "not for cpu")
    assert chosen("blocks", **ON_CPU) == "onednn"


@pytest.mark.parametrize(
    ("changes", "on_cpu"),
    [
        ({"kernel_shape": (192, 1, 17, 17)}, "onednn"),
        (window(53, 17), "onednn"),
        (window(16, 16, (8, 8)), "onednn"),
        (window(17, 17, (7, 8)), "onednn"),
        (window(16, 16, "same"), "torch"),
        ({"stride": (3, 1)}, "onednn"),
        ({"dilation": (1, 2)}, "torch"),
        ({"input_shape": (0, 96, 56, 56)}, "torch"),
        ({"dtype": torch.float64}, "torch"),
        ({"input_shape": (4_096, 96, 1_024, 512)}, "onednn"),  # 2**31 cells of a channel
    ],
)
def test_what_blocks_cannot_compute_is_computed_by_torch(changes, on_cpu):
    assert chosen() == "blocks"
    assert chosen(**changes) == "torch"
    assert chosen("blocks", **{**ON_CPU, **changes}) == on_cpu


def test_a_gpu_that_could_use_blocks_and_does_not_is_reported_once(monkeypatch, caplog):
    """As in a container without a C compiler."""

    def fail(device):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    monkeypatch.setattr(devices, "_compile_a_kernel", fail)
    devices._why_no_blocks.cache_clear()
    reason = "Triton cannot compile: Failed to find C compiler. Please specify via CC"
    assert [devices.why_no_blocks(GPU) for _ in range(2)] == [reason, reason]
    devices._why_no_blocks.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].getMessage().endswith(reason)


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cudnn")
    expected = f"{VARIABLE}='cudnn' must be auto, torch, blocks or products"
    with pytest.raises(DclsConvertError, match=re.escape(expected)):
        table.preference()
    monkeypatch.setenv(VARIABLE, "products")
    assert table.preference() == "products"
    monkeypatch.setenv(VARIABLE, "torch")
    assert table.preference() == "products"


def test_a_window_that_a_gpu_convolves_slowly_is_reported_once(caplog):
    slow = dataclasses.replace(SPEC, **window(53, 53))
    for spec in (SPEC, slow, slow, dataclasses.replace(SPEC, **window(7, 7))):
        table.find_algorithm(spec, torch.zeros(1), eager=True)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message[:27] for message in messages] == ["a depthwise window of 53x53"]
