"""Compile the Triton kernels for GPUs that need not be there, and look at the result."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcls_convert.depthwise import block_kernels, block_plan
from dcls_convert.layers import element_kernels

CUDA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WINDOW = {"R": 17, "S": 17}
LAYOUT = {
    "STEP_DOWN": 1,
    "STEP_ACROSS": 1,
    "UNIT": 8,
    "CHANNELS_ADJACENT": True,
    "COLUMNS_ADJACENT": False,
}
FLOAT32_ARGUMENTS = {
    "bias",
    "clamped",
    "grad_positions",
    "grad_weight",
    "partial_sums",
    "positions",
    "weight",
    "window",
}
# Their addresses may be any: parameters may be parts of one tensor.
UNALIGNED = {"bias", "positions", "weight", "window"}
POINTERS = FLOAT32_ARGUMENTS | {
    "bank",
    "blocks",
    "gradient",
    "gradients",
    "maps",
    "outputs",
    "windows",
}


class Kernel(NamedTuple):
    """A kernel with its constants."""

    function: Any
    constants: dict[str, object]
    is_pipelined: bool = False  # whether its loop of products is


KERNELS = {
    "pack": Kernel(block_kernels.pack, {**LAYOUT, "UNPACK": False}),
    "unpack": Kernel(block_kernels.pack, {**LAYOUT, "UNPACK": True}),
    "bank_of_window": Kernel(block_kernels.bank_of_window, WINDOW),
    "convolve": Kernel(block_kernels.convolve_blocks, {"HAS_BIAS": True, "TURNED": False}, True),
    "convolve turned": Kernel(
        block_kernels.convolve_blocks, {"HAS_BIAS": False, "TURNED": True}, True
    ),
    "gradient_of_bank": Kernel(block_kernels.gradient_of_bank, {}, True),
    "diagonals": Kernel(block_kernels.diagonals, {**WINDOW, "S_PADDED": 32}),
    "construct": Kernel(element_kernels.construct, {**WINDOW, "CELLS_PADDED": 512, "KERNELS": 1}),
    "gradients_of_elements": Kernel(element_kernels.gradients_of_elements, WINDOW),
    "bank_of_elements": Kernel(element_kernels.bank_of_elements, WINDOW),
    "gradients_by_bank": Kernel(element_kernels.gradients_by_bank, WINDOW),
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiled kernel needs."""

    shared_bytes: int
    registers: int
    spilled: int  # bytes (NVIDIA) or registers (AMD)
    code: str  # PTX, or AMD's assembly


def compile_for(target: GPUTarget, name: str, dtype: str, precision: str) -> Compiled:
    """Compile a kernel for blocks of this dtype ("bf16", "fp32")."""
    kernel, constants, is_pipelined = KERNELS[name]
    size = {"bf16": 2, "fp32": 4}[dtype]
    if is_pipelined:
        constants = {**constants, "PRECISION": precision, "STEP": block_plan.STEP[size]}
    if kernel is block_kernels.convolve_blocks:
        constants["BLOCKS"] = block_plan.BLOCKS_AT_ONCE[size]
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in POINTERS:
            signature[argument] = "*fp32" if argument in FLOAT32_ARGUMENTS else f"*{dtype}"
        else:
            signature[argument] = "i32"
    places = {argument: (index,) for index, argument in enumerate(kernel.arg_names)}
    aligned = {
        places[argument]: [["tt.divisibility", 16]]
        for argument in signature
        if argument in POINTERS - UNALIGNED
    }
    source = ASTSource(
        kernel, signature, {places[key]: value for key, value in constants.items()}, aligned
    )
    options = {"num_warps": 4, "num_stages": 1}
    if is_pipelined:
        stages = block_plan.STAGES if target.backend == "cuda" else block_plan.STAGES_ON_AMD
        warps = block_plan.WARPS[size]
        if name == "gradient_of_bank":
            warps = block_plan.GRADIENT_WARPS
        options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        code = compiled.asm["amdgcn"]
        spilled = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1])
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1])
    else:
        code = compiled.asm["ptx"]
        registers, spilled = _registers_and_spills(code, target.arch)
    return Compiled(
        shared_bytes=compiled.metadata.shared, registers=registers, spilled=spilled, code=code
    )


def _registers_and_spills(ptx: str, arch: int) -> tuple[int, int]:
    suffix = "a" if arch >= 90 else ""
    assembler = CUDA / "ptxas"
    if arch >= 100 and (CUDA / "ptxas-blackwell").exists():
        assembler = CUDA / "ptxas-blackwell"
    command = [assembler, "-v", f"--gpu-name=sm_{arch}{suffix}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    if done.returncode:  # a ptxas that does not read from a pipe
        raise RuntimeError(done.stderr)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return int(re.search(r"Used (\d+) registers", done.stderr)[1]), spilled
