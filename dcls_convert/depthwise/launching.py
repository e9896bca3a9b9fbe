"""Launch all Triton kernels of a pass by one call, with little work on the host.

Triton's own launch inspects all arguments in every call, to find the program that was compiled for
them. A `Pass` finds its programs once. On NVIDIA's GPUs, a function in C (`launch.c`) then launches
them all. Triton launches each kernel on other devices, if this function cannot be built, under
`torch.compile`, where launches become parts of the graph, and in Triton's interpreter.
"""

import functools
import math
import operator
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..geometry import ceil_div
from ..progress import logger
from ..text import one_line, shortened

LOAD_BYTES = 16  # kernels load and store this many bytes at once
PART_ALIGNMENT = 256  # bytes, of a part of a workspace
WARP = 32  # threads of NVIDIA's GPUs


class NewTensor(NamedTuple):
    """The description of a tensor that each run makes anew, with uninitialised values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # it is dense
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def contiguous(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> "NewTensor":
        strides = [1]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        return cls(shape, tuple(strides), dtype, device)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def maker(self) -> Callable[[], Tensor]:
        """Return the function that makes the tensor."""
        shape, strides, dtype, device = self
        return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


class Workspace:
    """Several tensors (parts) in the memory of one tensor (the whole), which has the given dtype.

    The parts of a group are never needed at the same time, and share memory.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *groups: dict[str, NewTensor]
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.parts: dict[str, NewTensor] = {}
        self.groups = groups
        for group in groups:
            self.parts |= group

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Where each part begins, in bytes; the whole ends at ""."""
        offsets: dict[str, int] = {}
        end = 0
        for group in self.groups:
            offsets |= dict.fromkeys(group, end)
            most = max(part.bytes for part in group.values())
            end += ceil_div(most, PART_ALIGNMENT) * PART_ALIGNMENT
        return {**offsets, "": end}

    def maker(self) -> Callable[[], Tensor]:
        """Return the function that makes the whole."""
        numbers = self.offsets[""] // self.dtype.itemsize
        return functools.partial(torch.empty, numbers, dtype=self.dtype, device=self.device)

    def part_of(self, whole: Tensor, name: str) -> Tensor:
        """Return a part as a view."""
        part = self.parts[name]
        start = self.offsets[name] // self.dtype.itemsize
        numbers = whole.narrow(0, start, part.bytes // self.dtype.itemsize)
        if part.dtype != self.dtype:
            numbers = numbers.view(part.dtype)
        return numbers.view(part.shape)


class Launch(NamedTuple):
    """A kernel with everything but its tensors.

    Args:
        kernel: A function of tensors, then sizes, then constants. It must exclude the sizes from
            specialisation, and the tensors that may begin at any address; the others begin at
            multiples of LOAD_BYTES, as torch allocates them.
        grid: Programs along each axis.
        sizes: Integers that the compiled program takes.
        constants: What the program is compiled for.
        warps, stages: Options of the compiler.
    """

    kernel: Any
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: tuple[object, ...]
    warps: int = 4
    stages: int = 1

    def by_triton(self, tensors: Sequence[Tensor]) -> None:
        """Launch by Triton, for any tensors."""
        self.kernel[self.grid](
            *tensors,
            *self.sizes,
            *self.constants,
            num_warps=self.warps,
            num_stages=self.stages,
        )


class Pass:
    """Launches, one after the other, on tensors whose dtypes and device never change.

    `run` takes the given tensors, and returns the results.

    Args:
        given: Names of the tensors that `run` takes, or workspaces. All tensors except maps are
            contiguous.
        results: Tensors and workspaces that the pass makes.
        launches: The launches, each with the names of its kernel's tensors.
        scratch: Memory that is needed only during the pass.
    """

    __slots__ = ("given", "launches", "results", "run", "scratch")

    def __init__(
        self,
        given: Sequence[str | Workspace],
        results: dict[str, NewTensor | Workspace],
        launches: Sequence[tuple[Launch, Sequence[str]]],
        scratch: Workspace | None = None,
    ) -> None:
        self.given = given
        self.results = results
        self.launches = launches
        self.scratch = scratch
        self.run: Callable[..., list[Tensor]] = self._first_run

    def _first_run(self, *given: Tensor) -> list[Tensor]:
        if torch.compiler.is_compiling():
            return self.by_triton(*given)
        self.run = self.by_driver(given) or self.by_triton
        return self.run(*given)

    def by_triton(self, *given: Tensor) -> list[Tensor]:
        """Run by Triton, with a tensor for each name."""
        tensors: dict[str, Tensor] = {}
        results: list[Tensor] = []

        def add(name: str | Workspace, tensor: Tensor) -> None:
            if isinstance(name, str):
                tensors[name] = tensor
            else:
                for part in name.parts:
                    tensors[part] = name.part_of(tensor, part)

        for given_name, tensor in zip(self.given, given, strict=True):
            add(given_name, tensor)
        for name, new in self.results.items():
            results.append(new.maker()())
            add(new if isinstance(new, Workspace) else name, results[-1])
        if self.scratch is not None:
            for name, part in self.scratch.parts.items():
                tensors[name] = part.maker()()
        for launch, names in self.launches:
            launch.by_triton([tensors[name] for name in names])
        return results

    def by_driver(self, given: Sequence[Tensor]) -> Callable[..., list[Tensor]] | None:
        """Return the function that runs by one call of CUDA's driver; None if there is none."""
        if not all(isinstance(launch.kernel, JITFunction) for launch, _ in self.launches):
            return None  # interpreted
        launch_all = launch_function()
        if launch_all is None:
            return None
        device = given[0].device
        dtypes: dict[str, torch.dtype] = {}
        places: dict[str, tuple[int, int]] = {}  # number of a tensor, and bytes from its address

        def add(name: str | Workspace, number: int, dtype: torch.dtype) -> None:
            if isinstance(name, str):
                places[name] = (number, 0)
                dtypes[name] = dtype
            else:
                for part, new in name.parts.items():
                    places[part] = (number, name.offsets[part])
                    dtypes[part] = new.dtype

        for number, (given_name, tensor) in enumerate(zip(self.given, given, strict=True)):
            add(given_name, number, tensor.dtype)
        makers: list[Callable[[], Tensor]] = []
        for number, (name, new) in enumerate(self.results.items(), start=len(given)):
            makers.append(new.maker())
            add(new if isinstance(new, Workspace) else name, number, new.dtype)
        scratch_makers: list[Callable[[], Tensor]] = []
        if self.scratch is not None:
            scratch_makers.append(self.scratch.maker())
            add(self.scratch, len(given) + len(makers), self.scratch.dtype)
        launches = b""
        for launch, names in self.launches:
            program = compiled_program(launch, tuple(dtypes[name] for name in names), device)
            launches += packed(launch, program, [places[name] for name in names])
        index = driver.active.get_current_device()
        current_stream = driver.active.get_current_stream

        def run(*given: Tensor) -> list[Tensor]:
            results = list(map(operator.call, makers))
            scratch = map(operator.call, scratch_makers)
            launch_all(launches, index, current_stream(index), *given, *results, *scratch)
            return results

        return run


def packed(launch: Launch, program: Any, places: Sequence[tuple[int, int]]) -> bytes:
    """Return a launch as `launch.c` reads it.

    `places` has a pair for each tensor: the number of an address, and bytes from this address.
    """
    pointers = [number for place in places for number in place]
    return struct.pack(
        f"=Q8I{len(pointers) + len(launch.sizes)}q",
        program.function,
        *launch.grid,
        program.metadata.num_warps * WARP,
        program.metadata.shared,
        len(places),
        len(launch.sizes),
        0,
        *pointers,
        *launch.sizes,
    )


# The programs that were compiled, and loaded on a GPU, by all that they depend on.
_programs: dict[tuple[object, ...], Any] = {}


def compiled_program(launch: Launch, dtypes: tuple[torch.dtype, ...], device: torch.device) -> Any:
    """Return the program of a launch, compiled and loaded on the current GPU.

    The program serves all sizes: no size is specialised, and all are below 2**31.
    """
    key = (launch.kernel, dtypes, launch.constants, launch.warps, launch.stages, device)
    program = _programs.get(key)
    if program is None:
        program = launch.kernel.warmup(
            *dtypes,
            *launch.sizes,
            *launch.constants,
            grid=launch.grid,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
        program[launch.grid]  # loads the program
        _programs[key] = program
    return program


@functools.cache
def launch_function() -> Callable[..., None] | None:
    """Build the function of `launch.c`, as Triton builds its own; None if that is impossible."""
    source = Path(__file__).with_name("launch.c").read_text(encoding="utf-8")
    try:
        from triton.runtime.build import compile_module_from_src  # no public API

        module: Any = compile_module_from_src(src=source, name="dcls_convert_launch")
    except Exception as error:
        logger.warning(
            "launching kernels takes more of the host's time, because a function in C cannot be "
            "built: %s",
            shortened(one_line(error), 200),
        )
        return None
    run: Callable[..., None] = module.run
    return run
