"""Run code of libraries quietly and seeded, and leave the process as it was."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings and nothing printed from inside the block. Errors go through."""
    with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """The generators of the CPU and of all CUDA devices in use start at `seed`, and get their old states back after it.

    None leaves them alone. `torch.manual_seed` will not do: it also reseeds devices whose state nobody keeps.
    """
    if seed is None:
        yield
        return
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices=devices):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
            generator.manual_seed(seed)
        yield
