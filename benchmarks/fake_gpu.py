"""Let Triton believe in one H100 on this CPU: its compiler and its launcher are real, launches do
nothing, and tensors are on the CPU. Needs a C compiler.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("fake_libcuda.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


class _Arguments(ctypes.Structure):
    """How many arguments a compiled kernel takes; as in fake_libcuda.c."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("pointers", ctypes.c_int),
        ("sizes", ctypes.c_int),
    )


class FakeGpu:
    """The fake GPU of this process; `folder` keeps what is compiled."""

    def __init__(self, folder: Path) -> None:
        library = folder / "libcuda.so.1"
        if not library.exists():
            compile_library(library)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_launches.restype = ctypes.c_long
        self._library.fake_noted.restype = ctypes.c_char_p
        self._arguments: dict[str, _Arguments] = {}  # of kernels
        replace_functions_of_torch()
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime.driver import driver

        CudaDriver.is_active = staticmethod(lambda: True)
        driver.set_active(CudaDriver())

    def launches(self) -> int:
        """Return how many kernels have been launched, but for those that were noted."""
        return int(self._library.fake_launches())

    def note(self, kernels: Iterable[tuple[Any, int]], run: Callable[[], object]) -> list[str]:
        """Run, and return a line for each launch: the kernel's name, all numbers and addresses.

        `kernels` are those that may be launched, with the number of their tensors.
        """
        for kernel, tensors in kernels:
            sizes = sum(not one.is_constexpr for one in kernel.params) - tensors
            name = kernel.__name__
            self._arguments[name] = _Arguments(name.encode(), tensors, sizes)
        known = (_Arguments * len(self._arguments))(*self._arguments.values())
        self._library.fake_know(known, len(known))
        self._library.fake_note()
        try:
            run()
        finally:
            lines = self._library.fake_noted().decode().splitlines()
        return lines

    def take_blocks_on_cpu(self) -> None:
        """Assert that the GPU takes blocks, and let layers on the CPU launch them."""
        from dcls_convert.depthwise import devices, table, why_no_blocks

        gpu = torch.device("cuda", 0)
        reason = why_no_blocks(gpu)
        assert reason is None, reason
        devices._why_no_blocks = lambda device: None
        table.preference = lambda: "blocks"


def compile_library(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    triton = Path(find_spec("triton").origin).parent
    command = [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-w"]
    command += [f"-I{triton / 'backends' / 'nvidia' / 'include'}", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)


def replace_functions_of_torch() -> None:
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.set_device = lambda device: None
    torch._C._cuda_getCurrentRawStream = lambda device: 0
