"""Launch Triton kernels with little work on the host.

Triton's own launch inspects all arguments in every call, to find the program that was compiled for
them. Here, whoever launches knows beforehand what matters: a `Launch` looks up its program once,
and keeps it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

ALIGNMENT = 16  # bytes; kernels load and store so many at once
# Compiled programs, by all that they depend on.
_programs: dict[tuple[object, ...], Any] = {}


class Launch:
    """A kernel with its grid and constants, for arguments of the same dtypes in each call.

    Tensors must begin at multiples of ALIGNMENT, as torch allocates them, unless the kernel
    excludes them from specialisation. Numbers must be excluded from it. Under `torch.compile`, the
    launch becomes a part of the graph; in Triton's interpreter, the kernel is interpreted.
    """

    __slots__ = ("_run", "constants", "grid", "kernel", "stages", "warps")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        constants: tuple[object, ...],
        *,
        warps: int = 4,
        stages: int = 1,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        self.warps = warps
        self.stages = stages
        self._run: Callable[..., None] | None = None

    def __call__(self, *arguments: Tensor | int) -> None:
        if torch.compiler.is_compiling():
            self.kernel[self.grid](
                *arguments, *self.constants, num_warps=self.warps, num_stages=self.stages
            )
            return
        if self._run is None:
            self._run = self._find_program(arguments)
        self._run(*arguments, *self.constants)

    def _find_program(self, arguments: tuple[Tensor | int, ...]) -> Callable[..., None]:
        """Return the launch of the compiled kernel on this grid; compile it if it is new."""
        run: Callable[..., None]
        if not isinstance(self.kernel, JITFunction):  # in Triton's interpreter
            run = self.kernel[self.grid]
            return run
        dtypes = tuple(value.dtype for value in arguments if isinstance(value, Tensor))
        device = torch.cuda.current_device()
        key = (self.kernel, self.constants, self.warps, self.stages, dtypes, device)
        program = _programs.get(key)
        if program is None:
            program = self.kernel.warmup(
                *arguments,
                *self.constants,
                grid=self.grid,
                num_warps=self.warps,
                num_stages=self.stages,
            )
            _programs[key] = program
        run = program[self.grid]
        return run


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it does not begin at a multiple of ALIGNMENT."""
    if torch.compiler.is_compiling() or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone()
