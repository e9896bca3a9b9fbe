"""Launch Triton kernels with little work on the host.

Triton's own launch inspects all arguments in every call, to find the program that was compiled for
them. A `Launch` finds its program once, and then calls Triton's launcher itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

LOAD_BYTES = 16  # bytes; kernels load and store so many at once


class Launch:
    """A kernel with everything but its tensors, whose dtypes and device never change.

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

    __slots__ = ("arguments", "grid", "kernel", "options", "run")

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
        self.arguments = (*sizes, *constants)
        self.options = {"num_warps": warps, "num_stages": stages}
        self.run: Callable[..., None] = self._first_run  # launches with these tensors

    def _first_run(self, *tensors: Tensor) -> None:
        if torch.compiler.is_compiling() or not isinstance(self.kernel, JITFunction):
            self.kernel[self.grid](*tensors, *self.arguments, **self.options)
            return
        # Compile the kernel, or find it in Triton's cache.
        program = self.kernel.warmup(*tensors, *self.arguments, grid=self.grid, **self.options)
        program[self.grid]  # loads it on the current device
        launcher = program.run
        function = program.function
        metadata = program.packed_metadata
        device = driver.active.get_current_device()
        current_stream = driver.active.get_current_stream
        x, y, z = self.grid
        arguments = self.arguments

        def run(*tensors: Tensor) -> None:
            # As torch's inductor launches; without launch metadata and hooks, which are for
            # Triton's own profiler.
            stream = current_stream(device)
            launcher(x, y, z, stream, function, metadata, None, None, None, *tensors, *arguments)

        self.run = run
        run(*tensors)
