"""Compile every launch that layers make for GPUs that need not be there."""

import contextlib
import importlib
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import dcls_convert
from dcls_convert.depthwise import block_plan, devices, table
from dcls_convert.depthwise.launching import Launch, Pass
from dcls_convert.layers import gpu_construction
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.layers.gpu_construction import construct_windows

PACKAGE = Path(dcls_convert.__file__).parent
NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}  # float16 compiles as bfloat16 does
GPUS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}


class Recorded(NamedTuple):
    """A launch, without what its program does not depend on: values and sizes."""

    kernel: JITFunction
    dtypes: tuple[torch.dtype, ...]
    constants: tuple[tuple[str, object], ...]
    warps: int
    stages: int


class Compiled(NamedTuple):
    """What a compiled kernel needs."""

    shared_bytes: int
    spilled_bytes: int
    code: str  # PTX
    messages: str  # of the assembler


def jit_functions() -> dict[str, JITFunction]:
    """Return all functions of the package that Triton compiles."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if "triton.jit" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, JITFunction):
                    found[value.__name__] = value
    return found


@contextlib.contextmanager
def as_on(target: GPUTarget, *, tf32: bool = False):
    """Let layers on the CPU launch what they launch on this GPU; yields the launches."""
    recorded: dict[Recorded, None] = {}

    def record(launch, tensors):
        constants = [one.name for one in launch.kernel.params if one.is_constexpr]
        recorded[
            Recorded(
                launch.kernel,
                tuple(tensor.dtype for tensor in tensors),
                tuple(zip(constants, launch.constants, strict=True)),
                launch.warps,
                launch.stages,
            )
        ] = None

    def adds_three_taps(device):
        return target.arch // 10 in devices.THREE_TAPS_ON_NVIDIA

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "by_driver", lambda one_pass, tensors: None)
        patch.setattr(Launch, "by_triton", record)
        patch.setattr(devices, "_why_no_blocks", lambda device: None)
        patch.setattr(gpu_construction, "_passes", {})
        patch.setattr(block_plan, "adds_three_taps", adds_three_taps)
        patch.setattr(table, "preference", lambda: "blocks")
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        yield recorded
        torch.set_float32_matmul_precision("highest")


def step(layer: torch.nn.Module, images: torch.Tensor, dtype: torch.dtype) -> None:
    images = images.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        outputs = layer(images)
    outputs.backward(torch.zeros_like(outputs))


def launches_of_layers(target: GPUTarget) -> list[Recorded]:
    """Return what layers of several kinds launch on a GPU."""
    found: dict[Recorded, None] = {}
    for dtype, tf32 in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
        with as_on(target, tf32=tf32) as recorded:
            for options in ({}, {"stride": 2, "bias": False}, {"interpolation": "gaussian"}):
                layer = DclsConv2d(
                    64,
                    64,
                    groups=64,
                    kernel_count=34,
                    dilated_kernel_size=17,
                    padding=8,
                    **options,
                )
                for format in (torch.channels_last, torch.contiguous_format):
                    images = torch.zeros(4, 64, 24, 24).contiguous(memory_format=format)
                    step(layer, images, dtype)
                step(layer, torch.zeros(4, 64, 7, 7), dtype)  # one tap
            weight = torch.zeros(8, 8, 5, requires_grad=True)
            construct_windows(weight, torch.zeros(2, 8, 8, 5), (7, 7)).sum().backward()
        found |= recorded
    return list(found)


def compile_for(target: GPUTarget, launch: Recorded, *, ones: bool = False) -> Compiled:
    """Compile a launch; torch.compile makes sizes of 1 constants."""
    kernel = launch.kernel
    constants = dict(launch.constants)
    signature = {}
    aligned = {}
    for index, parameter in enumerate(kernel.params):
        if index < len(launch.dtypes):
            signature[parameter.name] = TYPES[launch.dtypes[index]]
            if not parameter.do_not_specialize_on_alignment:
                aligned[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
        elif ones:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "i32"
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel, signature, {places[name]: value for name, value in constants.items()}, aligned
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    compiled = triton.compile(source, target=target, options=options)
    messages = assemble(compiled.asm["ptx"], target.arch)
    return Compiled(
        shared_bytes=compiled.metadata.shared,
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", messages))),
        code=compiled.asm["ptx"],
        messages=messages,
    )


def assemble(ptx: str, arch: int) -> str:
    """Return what ptxas says about a program."""
    suffix = "a" if arch >= 90 else ""
    assembler = NVIDIA / "ptxas"
    if arch >= 100 and (NVIDIA / "ptxas-blackwell").exists():
        assembler = NVIDIA / "ptxas-blackwell"
    command = [assembler, "-v", f"--gpu-name=sm_{arch}{suffix}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    if done.returncode:  # a ptxas that does not read from a pipe
        raise RuntimeError(done.stderr)
    return done.stderr
