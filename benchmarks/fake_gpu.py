"""Let Triton believe in one H100 on this CPU: its compiler and its launcher are real, launches do
nothing, and tensors are on the CPU. Needs a C compiler.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("fake_libcuda.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


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
        replace_functions_of_torch()
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime.driver import driver

        CudaDriver.is_active = staticmethod(lambda: True)
        driver.set_active(CudaDriver())

    def launches(self) -> int:
        """Return how many kernels have been launched."""
        return int(self._library.fake_launches())

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
