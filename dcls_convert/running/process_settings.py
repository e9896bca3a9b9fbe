"""The process in which a network runs: its device, precision, random numbers and output."""

import contextlib
import io
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from ..depthwise.devices import AUTOCAST_DEVICES
from ..errors import DclsConvertError
from ..text import shortened

# Parts of torch.backends with their own `fp32_precision`.
CPU_FP32_BACKENDS = ("mkldnn.matmul", "mkldnn.conv")
CUDA_FP32_BACKENDS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")

# Held while settings of the process are changed, so that threads take turns. Otherwise, one thread
# would restore settings that another thread had changed.
_process = threading.RLock()


def check_device(name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        DclsConvertError: torch cannot use the device, or it is "meta".
    """
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DclsConvertError(
            f"device {shortened(name)}: torch cannot use it here; give cpu, or cuda for a GPU"
        ) from error
    if device.type == "meta":
        raise DclsConvertError("device meta computes nothing")
    return device


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 at full precision inside the block: no autocast, no TF32, no bfloat16."""
    with _process, without_autocast(), contextlib.ExitStack() as restore:
        _set_full_precision_(restore)
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off inside the block. Autocast is a setting of the thread."""
    with contextlib.ExitStack() as restore:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                restore.enter_context(torch.autocast(device, enabled=False))
        yield


def _set_full_precision_(restore: contextlib.ExitStack) -> None:
    """Change the process's settings; closing `restore` gives them their old values."""
    backends: Any = torch.backends
    backend_names: tuple[str, ...] = ()
    if hasattr(backends.mkldnn, "matmul"):
        backend_names += CPU_FP32_BACKENDS
    older_settings = _older_precision_settings()
    if older_settings is None:
        backend_names += CUDA_FP32_BACKENDS
    for name in backend_names:
        backend = attrgetter(name)(backends)
        restore.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
        backend.fp32_precision = "ieee"
    if older_settings is not None:
        matmul_precision, cudnn_tf32 = older_settings
        if matmul_precision != "highest":
            # Restoring this setting also changes the CPU backends', which are restored afterwards.
            restore.callback(torch.set_float32_matmul_precision, matmul_precision)
            torch.set_float32_matmul_precision("highest")
        if cudnn_tf32:
            restore.callback(setattr, backends.cudnn, "allow_tf32", True)
            backends.cudnn.allow_tf32 = False


def _older_precision_settings() -> tuple[str, bool] | None:
    """Read the float32 matmul precision and cuDNN's TF32 flag from torch's older interface.

    Return None if the newer interface (torch 2.9, `fp32_precision`) is in use. The two interfaces
    must not be mixed: torch.compile would fail, and the newer one would take over settings of the
    older one.
    """
    backends: Any = torch.backends
    for part in (backends, backends.cudnn):
        if getattr(part, "fp32_precision", "none") != "none":
            return None
    try:
        return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # torch refuses to read older settings once newer ones are set
        return None


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    """Show no warnings inside the block."""
    with _process, warnings.catch_warnings(action="ignore"):
        yield


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Show no warnings and print nothing inside the block. Errors are raised as usual."""
    discarded = io.StringIO()
    with (
        ignored_warnings(),
        contextlib.redirect_stdout(discarded),
        contextlib.redirect_stderr(discarded),
    ):
        yield


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python inside the block, and restore them afterwards.

    If `seed` is None, the generators are left alone.
    """
    if seed is None:
        yield
        return
    devices: list[int] = []
    cuda_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if cuda_in_use:
        devices = list(range(torch.cuda.device_count()))
    with _process, torch.random.fork_rng(devices=devices):
        python_state = random.getstate()
        numpy: Any = sys.modules.get("numpy")  # may be missing: this package does not depend on it
        numpy_state = numpy and numpy.random.get_state()
        # torch.manual_seed would also reseed devices whose state is not saved here.
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
