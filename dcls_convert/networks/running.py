"""Run or change the user's network, and restore its state and the process's settings."""

import contextlib
import io
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..depthwise.devices import AUTOCAST_DEVICES
from ..errors import DclsConvertError
from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DclsConvNd
from ..text import shortened

# Parts of torch.backends with their own `fp32_precision`.
CPU_FP32_BACKENDS = ("mkldnn.matmul", "mkldnn.conv")
CUDA_FP32_BACKENDS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")


def check_device(name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        DclsConvertError: torch cannot use the device, or it is "meta".
    """
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DclsConvertError(f"device {shortened(name)}: torch cannot use it here") from error
    if device.type == "meta":
        raise DclsConvertError("device meta computes nothing")
    return device


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode inside the block, and record no gradients.

    Afterwards each module has its previous mode again.
    """
    training_modes = {module: module.training for module in model.modules()}
    try:
        for module in training_modes:
            module.training = False  # not `eval()`, which the model's class may override
        with torch.no_grad():
            yield
    finally:
        for module, training in training_modes.items():
            module.training = training


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 at full precision inside the block: no autocast, no TF32, no bfloat16."""
    with contextlib.ExitStack() as restore:
        for device in AUTOCAST_DEVICES:  # autocast is a setting of the thread
            if torch.is_autocast_enabled(device):
                restore.enter_context(torch.autocast(device, enabled=False))
        restore.enter_context(_full_process_precision)
        yield


class _ProcessSetting:
    """Settings of the process that are changed while any thread needs them so.

    The first of these threads changes them, and the last one restores them. If each did both for
    itself, the second one would restore what the first one had changed.
    """

    def __init__(self, change_: Callable[[contextlib.ExitStack], None]) -> None:
        """Take the function that changes the settings, and adds what restores them to a stack."""
        self._change_ = change_
        self._lock = threading.Lock()
        self._users = 0
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._change_(self._restore)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._restore.close()


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
            # Restoring it also changes the CPU backends' settings, which are restored after it.
            restore.callback(torch.set_float32_matmul_precision, matmul_precision)
            torch.set_float32_matmul_precision("highest")
        if cudnn_tf32:
            restore.callback(setattr, backends.cudnn, "allow_tf32", True)
            backends.cudnn.allow_tf32 = False


def _older_precision_settings() -> tuple[str, bool] | None:
    """Read the float32 matmul precision and cuDNN's TF32 flag from torch's older interface.

    Return None if the newer interface (torch 2.9, `fp32_precision`) is in use. The two must not be
    mixed: torch.compile would fail, and the newer would take over settings of the older.
    """
    backends: Any = torch.backends
    for part in (backends, backends.cudnn):
        if getattr(part, "fp32_precision", "none") != "none":
            return None
    try:
        return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # torch refuses to read older settings once newer ones are set
        return None


def run_batch(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Any:
    """Return the outputs for tensors, by position and by keyword.

    They are moved to the model's device, and those of floating point to its `image_dtype`. What
    `forward` changes in the model is undone: buffers, counters and caches in attributes.
    """
    tensors = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    device = tensors[0].device
    dtype = image_dtype(model)

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(device, dtype)
        return tensor.to(device)

    moved_args = map(moved, args)
    moved_kwargs = {name: moved(tensor) for name, tensor in kwargs.items()}
    saved = _saved_state(model)
    try:
        _copy_tensors_(model)
        return model(*moved_args, **moved_kwargs)
    finally:
        _restore_(saved)


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules, but not those that initialise themselves later or refuse new buffers."""
    modules = []
    for module in model.modules():
        if not isinstance(module, LazyModuleMixin | torch.jit.ScriptModule):
            modules.append(module)
    return modules


def _saved_state(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return each container of the modules, and its contents.

    They are the attributes, and dictionaries, lists and sets in them: parameters, buffers,
    children, hooks, and the network's own.
    """
    saved: list[tuple[Any, Any]] = []
    for module in _plain_modules(model):
        attributes = vars(module)
        for container in (attributes, *attributes.values()):
            if isinstance(container, dict):
                saved.append((container, dict(container)))
            elif isinstance(container, list | set | deque):
                saved.append((container, list(container)))
    return saved


def _restore_(saved: Iterable[tuple[Any, Any]]) -> None:
    """Refill each container with its contents. None is replaced: hook handles refer to some."""
    for container, contents in saved:
        container.clear()
        if isinstance(container, list | deque):
            container.extend(contents)
        else:
            container.update(contents)


def _copy_tensors_(model: nn.Module, *, on_meta: bool = False) -> None:
    """Replace buffers, and tensors in attributes, by copies, which `forward` may change in place.

    With `on_meta`, replace parameters, too, and all by copies without values.

    Not `functional_call`, which would not undo it if `forward` sets a buffer that was None.
    """
    copies: dict[int, Tensor] = {}  # by the id of the original, as modules can share it
    for module in _plain_modules(model):
        places: list[dict[str, Any]] = [vars(module), module._buffers]
        if on_meta:
            places.append(module._parameters)
        for tensors in places:
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    if id(tensor) not in copies:
                        copies[id(tensor)] = (
                            tensor.detach().to("meta") if on_meta else tensor.clone()
                        )
                    tensors[name] = copies[id(tensor)]


@contextlib.contextmanager
def without_values(model: nn.Module) -> Iterator[None]:
    """Let the model's tensors, and new ones, be on the meta device inside the block."""
    saved = _saved_state(model)
    try:
        _copy_tensors_(model, on_meta=True)
        with torch.device("meta"):
            yield
    finally:
        _restore_(saved)


@contextlib.contextmanager
def restored_values(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give all parameters their values back after the block, and whenever what it yields is called.

    Autograd does not notice, so that a graph of the user's keeps its saved tensors.
    """
    kept: list[tuple[nn.Parameter, Tensor, bool]] = []
    for parameter in model.parameters():
        values = parameter.detach().clone()
        with contextlib.suppress(RuntimeError):  # torch cannot change some kinds in place
            parameter.data.copy_(values)
            parameter.requires_grad_(parameter.requires_grad)
            kept.append((parameter, values, parameter.requires_grad))

    def restore() -> None:
        for parameter, values, requires_grad in kept:
            parameter.data.copy_(values)
            parameter.requires_grad_(requires_grad)

    try:
        yield restore
    finally:
        restore()


def image_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of images for a model: the first convolution's, or the first parameter's.

    In a model of several dtypes, the image enters through the first convolution.
    """
    for module in model.modules():
        if isinstance(module, AnyConv | DclsConvNd) and module.weight.is_floating_point():
            return module.weight.dtype
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


@contextlib.contextmanager
def unchanged_on_failure(model: nn.Module, *, values: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore the model and the `values` if the block fails.

    Every module gets back its parameters, children, hooks and attributes, with the contents of
    lists, dictionaries and sets. The contents of tensors are restored only for `values`.
    """
    saved = _saved_state(model)
    copies = [tensor.detach().clone() for tensor in values]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, copy in zip(values, copies, strict=True):
                tensor.copy_(copy)
        _restore_(saved)
        raise


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Show no warnings and print nothing inside the block. Errors are raised as usual."""
    with ignored_warnings, _discarded_output:
        yield


def _ignore_warnings_(restore: contextlib.ExitStack) -> None:
    restore.enter_context(warnings.catch_warnings(action="ignore"))


def _discard_output_(restore: contextlib.ExitStack) -> None:
    discarded = io.StringIO()
    restore.enter_context(contextlib.redirect_stdout(discarded))
    restore.enter_context(contextlib.redirect_stderr(discarded))


_full_process_precision = _ProcessSetting(_set_full_precision_)
ignored_warnings = _ProcessSetting(_ignore_warnings_)  # a context manager
_discarded_output = _ProcessSetting(_discard_output_)
# Held while the global generators are seeded. Otherwise, a thread would restore what another one
# had put there.
_generators = threading.RLock()


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python inside the block, and restore them afterwards.

    If `seed` is None, they are left alone.
    """
    if seed is None:
        yield
        return
    devices: list[int] = []
    cuda_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if cuda_in_use:
        devices = list(range(torch.cuda.device_count()))
    with _generators, torch.random.fork_rng(devices=devices):
        of_python = random.getstate()
        numpy: Any = sys.modules.get("numpy")  # no dependency of this package
        of_numpy = numpy and numpy.random.get_state()
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
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)
