"""A convolution goes the way that was measured to be faster, or that the environment asks for, where it can."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.depthwise import choice as depthwise
from dcls_convert.depthwise import measured
from dcls_convert.depthwise.choice import depthwise_way
from dcls_convert.depthwise.measured import VARIABLE, triton_is_faster
from dcls_convert.errors import DclsConvertError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GPU = "Imagined GPU"
FAST = {"device": CUDA, "dtype": torch.bfloat16, "channels_last": False}
LARGE = {"input_size": (128, 96, 56, 56), "kernel_size": (96, 1, 17, 17)}
GEOMETRY = {"stride": (1, 1), "padding": (8, 8), "dilation": (1, 1), "groups": 96}


def way(**changes):
    return depthwise_way(**{**FAST, **LARGE, **GEOMETRY, **changes})


def row(triton, torch, dtype="bfloat16", channels_last=False, window=(17, 17), batch=128, map=(56, 56)):
    case = {
        "dtype": dtype,
        "channels_last": channels_last,
        "window": window,
        "batch": batch,
        "channels": 96,
        "map": map,
    }
    return {**case, "ms": {"torch": torch, "triton": triton}}


@pytest.fixture(autouse=True)
def _a_machine_of_its_own(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(measured, "_has_triton", lambda: True)
    monkeypatch.setattr(depthwise, "_most_columns", lambda: 6)


@pytest.fixture
def write_table(monkeypatch, tmp_path):
    def write(*rows, gpu=GPU):
        path = tmp_path / "measured.json"
        path.write_text(json.dumps({"format": measured.FORMAT, "gpus": {gpu: rows}}))
        monkeypatch.setattr(measured, "TABLE", path)
        measured._read.cache_clear()

    return write


def test_nothing_is_measured_yet_and_so_every_gpu_goes_torchs_way():
    assert measured._read(measured.TABLE) == {}
    assert way() == "torch"


def test_a_measurement_decides_for_its_gpu_dtype_and_memory_format(write_table):
    write_table(row(triton=1.0, torch=2.0))
    assert way() == "triton"
    assert way(dtype=torch.float16) == "torch"
    assert way(channels_last=True) == "torch"
    assert way(device=CPU) == "onednn"
    write_table(row(triton=2.0, torch=1.0), row(triton=1.0, torch=2.0, channels_last=True))
    assert way() == "torch"
    assert way(channels_last=True) == "triton"
    write_table(row(triton=1.0, torch=2.0), row(triton=2.0, torch=1.0, window=(7, 7)))  # in any order
    assert way() == "triton"
    write_table(row(triton=1.0, torch=2.0), gpu="Another GPU")
    assert way() == "torch"


@pytest.mark.parametrize(
    "smaller",
    [
        {"input_size": (64, 96, 56, 56)},
        {"input_size": (128, 96, 55, 56)},
        {"kernel_size": (96, 1, 15, 17), "padding": (7, 8)},
    ],
)
def test_a_smaller_case_than_those_measured_goes_torchs_way(write_table, smaller):
    write_table(row(triton=1.0, torch=2.0))
    assert way(input_size=(129, 96, 60, 60)) == "triton"
    assert way(**smaller) == "torch"


sizes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


@given(st.dictionaries(sizes, st.booleans()), sizes)
def test_what_was_measured_itself_is_decided_by_its_measurement(cases, asked):
    rows = sorted((*size, faster) for size, faster in cases.items())
    for size, faster in cases.items():
        assert triton_is_faster(rows, *size) == faster
    within = [size for size in cases if all(least <= most for least, most in zip(size, asked, strict=True))]
    assert triton_is_faster(rows, *asked) == (bool(within) and cases[max(within)])


def test_the_environment_overrules_where_triton_can(monkeypatch, write_table):
    write_table(row(triton=1.0, torch=2.0))
    monkeypatch.setenv(VARIABLE, "torch")
    assert way() == way(device=CPU) == "torch"
    monkeypatch.setenv(VARIABLE, "triton")
    small = {"input_size": (1, 96, 3, 4), "kernel_size": (96, 1, 2, 51), "padding": (1, 25)}
    assert way(**small) == way(dtype=torch.float16) == "triton"
    assert way(padding="same") == way(padding="valid") == "triton"
    assert way(device=CPU) == "onednn"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert way(device=CPU) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(measured, "_has_triton", lambda: False)
    assert way(device=CPU) == "onednn"
    assert way() == "torch"


def test_gpus_without_products_in_triton_go_torchs_way(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert way() == "torch"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert way() == "triton"


@pytest.mark.parametrize(
    "changes",
    [
        {"stride": (2, 1)},
        {"dilation": (1, 2)},
        {"kernel_size": (192, 1, 17, 17)},
        {"kernel_size": (96, 96, 17, 17), "groups": 1},
        {"kernel_size": (96, 1, 53, 17), "padding": (26, 8)},
        {"kernel_size": (96, 1, 16, 16), "padding": "same"},
        {"padding": (9, 8), "input_size": (128, 96, 0, 56)},  # a cell of padding alone is enough for the window
        {"padding": (0, 0), "input_size": (128, 96, 16, 56)},
        {"input_size": (0, 96, 56, 56)},
        {"dtype": torch.float64},
        {"dtype": None},
        {"device": torch.device("meta")},
    ],
)
def test_what_triton_cannot_goes_torchs_way(monkeypatch, changes):
    monkeypatch.setenv(VARIABLE, "triton")
    assert way() == "triton"
    assert way(**changes) == "torch"


def test_single_precision_goes_there_only_where_tf32_is_allowed(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    with torch.backends.cudnn.flags(allow_tf32=True):
        assert way(dtype=torch.float32) == "triton"
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert way(dtype=torch.float32) == "torch"
        assert way() == "triton"


@pytest.mark.parametrize("asked", ["Triton", "cudnn"])
def test_a_wrong_value_in_the_environment_is_one_line_that_says_what_is_allowed(monkeypatch, asked):
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(DclsConvertError, match=f"{VARIABLE}='{asked}' must be auto, torch or triton"):
        depthwise.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 1)


def test_torchs_way_on_the_cpu_is_torchs_own(monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr(depthwise, "_forward", None)
    maps, kernel = torch.randn(2, 3, 9, 9), torch.randn(3, 1, 17, 17, requires_grad=True)
    found = depthwise.conv2d(maps, kernel, None, (1, 1), (8, 8), (1, 1), 3)
    torch.testing.assert_close(found, torch.nn.functional.conv2d(maps, kernel, padding=8, groups=3), rtol=0, atol=0)
