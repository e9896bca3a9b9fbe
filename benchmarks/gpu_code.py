"""What the compiler makes of the Triton kernels, for GPUs that need not be there: registers, spills, instructions.

Usage: python benchmarks/gpu_code.py [--all]. Needs triton, which brings the assembler and disassembler along; no GPU.
`tests/depthwise/test_depthwise_triton.py` holds the figures to limits. "loop" counts the instructions of the loop with
the products, for each row of the input (convolve) or patch of outputs (correlate); "products" those on tensor cores.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcls_convert.layers import depthwise_triton, triton_kernels

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PRODUCTS = ("HMMA", "HGMMA")  # tensor-core instructions up to Ampere, and from Hopper on
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# name: channels, side of the maps, window, batch, dtype, memory format
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
CASES: dict[str, tuple[int, int, int, int, torch.dtype, torch.memory_format]] = {
    "56^2": (96, 56, 17, 128, torch.bfloat16, CONTIGUOUS),
    "7^2": (768, 7, 17, 128, torch.bfloat16, CONTIGUOUS),
    "56^2 fp32": (96, 56, 17, 128, torch.float32, CONTIGUOUS),
    "1 of all": (1, 1, 1, 1, torch.float16, CONTIGUOUS),  # Triton makes constants of ones
}
MORE_CASES = CASES | {
    "28^2": (192, 28, 17, 128, torch.bfloat16, CONTIGUOUS),
    "14^2": (384, 14, 17, 128, torch.bfloat16, CHANNELS_LAST),
    "56^2, 1 image": (96, 56, 17, 1, torch.bfloat16, CONTIGUOUS),
    "56^2, 51x51": (96, 56, 51, 128, torch.bfloat16, CONTIGUOUS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The machine code of one kernel for one GPU."""

    registers: int
    spills: int  # instructions that access local memory, and bytes of stack
    shared: int  # bytes
    loop: int  # instructions in the loop with the products; 0 where there is none
    products: int  # on tensor cores, in that loop or else in all


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, and what it was called with."""

    kernel: Any
    arguments: Sequence[Any]
    config: dict[str, Any]


def launches(
    channels: int, side: int, window: int, batch: int, dtype: torch.dtype, memory_format: torch.memory_format
) -> list[Launch]:
    """The different launches of a forward and a backward pass, recorded on the meta device."""
    found: list[Launch] = []

    def recorder(kernel: Any) -> mock.MagicMock:
        fake = mock.MagicMock()
        fake.__getitem__.return_value = lambda *arguments, **config: found.append(Launch(kernel, arguments, config))
        return fake

    maps = torch.empty(batch, channels, side, side, dtype=dtype, device="meta").to(memory_format=memory_format)
    kernel = torch.empty(channels, 1, window, window, dtype=dtype, device="meta")
    padding = [window // 2, window // 2]
    names = [name for name, value in vars(triton_kernels).items() if isinstance(value, triton.JITFunction)]
    with mock.patch.multiple(triton_kernels, **{name: recorder(getattr(triton_kernels, name)) for name in names}):
        depthwise_triton.depthwise._init_fn(maps, kernel, kernel[:, 0, 0, 0], padding)
        depthwise_triton.depthwise_kernel_gradient._init_fn(maps, maps, padding)
    return list({(launch.kernel, *launch.config.items()): launch for launch in found}.values())


def code(launch: Launch, capability: int) -> Code:
    """What triton compiles for a launch, specialised as at run time, and ptxas assembles."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    names = launch.kernel.arg_names
    options = {name: value for name, value in launch.config.items() if name not in names}
    values = dict(zip(names, launch.arguments, strict=False)) | launch.config
    for place, name in enumerate(names):
        value = values[name]
        if name in launch.config or (isinstance(value, int) and value == 1):  # as Triton does at a launch
            signature[name], constants[(place,)] = "constexpr", value
            continue
        pointer = isinstance(value, torch.Tensor)
        signature[name] = POINTERS[value.dtype] if pointer else "i32"
        if pointer or value % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(compiled.asm["cubin"], compiled.metadata.shared)


def _read(cubin: bytes, shared: int) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        opcodes = _opcodes(_output("nvdisasm", "-c", file.name))
    registers, stack = (int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    spills = stack + sum(opcode in ("LDL", "STL") for opcode, _ in opcodes)
    loops = [opcodes[start : end + 1] for end, (_, start) in enumerate(opcodes) if start is not None and start <= end]
    counted = [(_products(loop), len(loop)) for loop in loops if _products(loop)]
    products, length = max(counted, key=lambda pair: pair[0] / pair[1], default=(_products(opcodes), 0))
    return Code(registers=registers, spills=spills, shared=shared, loop=length, products=products)


def _products(opcodes: Sequence[tuple[str, int | None]]) -> int:
    return sum(opcode in PRODUCTS for opcode, _ in opcodes)


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _opcodes(text: str) -> list[tuple[str, int | None]]:
    """Every instruction's opcode; of a branch, also the index of the instruction that it goes to."""
    found: list[tuple[str, str | None]] = []
    labels: dict[str, int] = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]+)\b", line):
            target = re.search(r"`\((\.L_x_\d+)\)", line) if instruction[1] == "BRA" else None
            found.append((instruction[1], target[1] if target else None))
    return [(opcode, labels.get(target) if target else None) for opcode, target in found]


def table(cases: dict[str, Any], capabilities: Sequence[int] = (90, 80)) -> Iterator[tuple[str, Code]]:
    """The code of every launch, after the names of GPU, case and kernel."""
    for capability in capabilities:
        for name, case in cases.items():
            for launch in launches(*case):
                yield f"sm_{capability} {name:14} {launch.kernel.__name__:12}", code(launch, capability)


def line(names: str, found: Code) -> str:
    """A row of the table as text."""
    return f"{names} {found.registers:9} {found.spills:7} {found.shared:7} {found.loop:5} {found.products:9}"


HEAD = f"{'GPU':5} {'case':14} {'kernel':12} registers  spills  shared  loop  products"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="more sizes of maps and windows")
    print(HEAD)
    for names, found in table(MORE_CASES if parser.parse_args().all else CASES):
        print(line(names, found), flush=True)


if __name__ == "__main__":
    main()
