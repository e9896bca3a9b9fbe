"""Launch Triton kernels with little work on the host.

Triton's own launch inspects all arguments in every call, to find the program that was compiled for
them. Here, the caller knows beforehand what the program depends on: a `Launch` looks up its program
once, and keeps it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from .block_kernels import bank_of_window

LOAD_BYTES = 16  # bytes; kernels load and store so many at once
MAX_SMALL_BYTES = 2**31 - 1  # for AMD, Triton compiles offsets of 32 bits up to here
# Compiled programs, by all that they depend on.
_programs: dict[tuple[object, ...], Any] = {}


class Launch:
    """A kernel with everything but its tensors, which have the same dtypes in each call.

    Tensors must begin at multiples of LOAD_BYTES, as torch allocates them, unless the kernel
    excludes them from specialisation. It must exclude the sizes. Under `torch.compile`, the launch
    becomes a part of the graph; in Triton's interpreter, the kernel is interpreted.

    Args:
        kernel: A function of tensors, then sizes, then constants.
        grid: Programs along each axis.
        sizes: Integers that the compiled program takes.
        constants: What the program is compiled for.
        warps, stages: Options of the compiler.
    """

    __slots__ = ("_run", "arguments", "constants", "grid", "kernel", "stages", "warps")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        sizes: tuple[int, ...],
        constants: tuple[object, ...],
        *,
        warps: int = 4,
        stages: int = 1,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        self.arguments = (*sizes, *constants)
        self.warps = warps
        self.stages = stages
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if torch.compiler.is_compiling():
            self.kernel[self.grid](
                *tensors, *self.arguments, num_warps=self.warps, num_stages=self.stages
            )
            return
        if self._run is None:
            self._run = self._find_program(tensors)
        self._run(*tensors, *self.arguments)

    def _find_program(self, tensors: tuple[Tensor, ...]) -> Callable[..., None]:
        """Return the launch of the compiled kernel on this grid; compile it if it is new."""
        run: Callable[..., None]
        if not isinstance(self.kernel, JITFunction):  # in Triton's interpreter
            run = self.kernel[self.grid]
            return run
        dtypes = tuple(tensor.dtype for tensor in tensors)
        device = torch.cuda.current_device()
        are_small = tuple(
            tensor.untyped_storage().nbytes() <= MAX_SMALL_BYTES for tensor in tensors
        )
        key = (self.kernel, self.constants, self.warps, self.stages, dtypes, are_small, device)
        program = _programs.get(key)
        if program is None:
            program = self.kernel.warmup(
                *tensors,
                *self.arguments,
                grid=self.grid,
                num_warps=self.warps,
                num_stages=self.stages,
            )
            _programs[key] = program
        run = program[self.grid]
        return run


class Launches:
    """Launches that are kept, by all that they depend on; none under `torch.compile`."""

    __slots__ = ("_by_key",)

    def __init__(self) -> None:
        self._by_key: dict[tuple[object, ...], Launch] = {}

    def find(self, key: tuple[object, ...]) -> Launch | None:
        """Return the launch that was kept."""
        if torch.compiler.is_compiling():
            return None
        return self._by_key.get(key)

    def keep(self, key: tuple[object, ...], launch: Launch) -> Launch:
        """Keep a launch, and return it."""
        if not torch.compiler.is_compiling():
            self._by_key[key] = launch
        return launch


def compile_smallest_kernel(device: torch.device) -> None:
    """Compile and load a kernel, as a check of Triton; any exception says what is missing."""
    with torch.cuda.device(device):
        program = bank_of_window.warmup(
            torch.float32, torch.float32, 1, 1, R=3, S=3, grid=(1, 1, 1)
        )
        program[1, 1, 1]  # loads the program and its launcher


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it does not begin at a multiple of LOAD_BYTES."""
    if torch.compiler.is_compiling() or tensor.data_ptr() % LOAD_BYTES == 0:
        return tensor
    return tensor.clone()
