"""Where the kernel in Triton was measured to be faster than torch's convolution, and what overrules it.

`measured.json`, beside this file, holds what `benchmarks/gpu.py --write-table` measured on GPUs, by their names:

    {"format": 1, "gpus": {"NVIDIA H200": [
        {"dtype": "bfloat16", "channels_last": false, "window": [17, 17], "batch": 128, "channels": 96, "map": [56, 56],
         "ms": {"torch": 14.2, "triton": 1.1}}, ...]}}

`map` is the output's size, `ms` the milliseconds of one forward pass and both gradients, in each way. For torch's
way they are the least of all its settings. `channels` is there for the reader.

All functions that look outside are constant to torch.compile: a program keeps the way that was chosen as it was traced.
"""

import functools
import importlib.util
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch.compiler import assume_constant_result

from ..errors import DclsConvertError, did_you_mean, shown

Preference = Literal["auto", "torch", "triton"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"
TABLE = Path(__file__).with_name("measured.json")
FORMAT = 1

# Cells of the window, cells of the output's map, images, and whether Triton was faster; the least case first.
Measured = tuple[int, int, int, bool]


def gpu_name(device: torch.device) -> str:
    """The key of a GPU in the table."""
    return torch.cuda.get_device_name(device)


@assume_constant_result  # type: ignore[untyped-decorator]
def preference() -> Preference:
    """What the environment variable DCLS_CONVERT_DEPTHWISE asks for; "auto" where it is not set.

    Raises:
        DclsConvertError: It is set to something else than auto, torch or triton.
    """
    asked = os.environ.get(VARIABLE) or "auto"
    allowed = get_args(Preference)
    if asked not in allowed:
        hint = did_you_mean(asked, allowed)
        raise DclsConvertError(f"environment: {VARIABLE}={shown(asked)!r} must be auto, torch or triton{hint}")
    return cast(Preference, asked)


@assume_constant_result  # type: ignore[untyped-decorator]
def runs_triton(device: torch.device) -> bool:
    """Whether the kernels can run there, where Triton is installed: on GPUs; on the CPU in Triton's interpreter."""
    if device.type != "cuda":
        return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()
    # Triton has no products on tensor cores for NVIDIA's GPUs before Ampere.
    return _has_triton() and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@assume_constant_result  # type: ignore[untyped-decorator]
def allows_tf32() -> bool:
    """Whether torch may convolve float32 on GPUs with 10 bits of mantissa, as Triton's kernels do."""
    conv = getattr(torch.backends.cudnn, "conv", None)  # torch 2.8 has the older setting alone
    return bool(torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32")


@assume_constant_result  # type: ignore[untyped-decorator]
def measurements(device: torch.device, dtype: torch.dtype, channels_last: bool) -> tuple[Measured, ...]:
    """What was measured on this kind of GPU; nothing for CPUs."""
    if device.type != "cuda":
        return ()
    return _read(TABLE).get((gpu_name(device), str(dtype).removeprefix("torch."), channels_last), ())


@functools.cache
def _read(path: Path) -> dict[tuple[str, str, bool], tuple[Measured, ...]]:
    """The table, by GPU, dtype, and whether maps are channels_last."""
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["format"] == FORMAT
    found: dict[tuple[str, str, bool], list[Measured]] = {}
    for gpu, rows in table["gpus"].items():
        for row in rows:
            faster = row["ms"]["triton"] < row["ms"]["torch"]
            case = math.prod(row["window"]), math.prod(row["map"]), row["batch"], faster
            found.setdefault((gpu, row["dtype"], row["channels_last"]), []).append(case)
    return {key: tuple(sorted(cases)) for key, cases in found.items()}


def triton_is_faster(measured: Sequence[Measured], window: int, cells: int, batch: int) -> bool:
    """What the largest measured case says that is in no respect larger than this one; False where there is none.

    The larger window, map and batch are, the more Triton's kernel gains.
    """
    faster = False
    for least_window, least_cells, least_batch, was_faster in measured:
        if window >= least_window and cells >= least_cells and batch >= least_batch:
            faster = was_faster
    return faster
