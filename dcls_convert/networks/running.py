"""Run or change a network that belongs to somebody else, and restore the process's settings."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DclsConvNd

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")  # types of device for which torch has autocast
# Parts of torch.backends that have an `fp32_precision` of their own.
CPU_FP32_BACKENDS = ("mkldnn.matmul", "mkldnn.conv")
CUDA_FP32_BACKENDS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode and no gradients are recorded.

    Afterwards each module has its own mode again.
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
    """Inside, float32 is computed in float32: no autocast, no products in TF32 or bfloat16."""
    backends: Any = torch.backends
    with contextlib.ExitStack() as restore:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                restore.enter_context(torch.autocast(device, enabled=False))
        product_names: tuple[str, ...] = ()
        if hasattr(backends.mkldnn, "matmul"):
            product_names += CPU_FP32_BACKENDS
        older_settings = _older_precision_settings()
        if older_settings is None:
            product_names += CUDA_FP32_BACKENDS
        for name in product_names:
            product = attrgetter(name)(backends)
            restore.callback(setattr, product, "fp32_precision", product.fp32_precision)
            product.fp32_precision = "ieee"
        if older_settings is not None:
            matmul_precision, cudnn_tf32 = older_settings
            if matmul_precision != "highest":
                # Restoring it also changes the settings of the CPU's products, which are restored
                # after it.
                restore.callback(torch.set_float32_matmul_precision, matmul_precision)
                torch.set_float32_matmul_precision("highest")
            if cudnn_tf32:
                restore.callback(setattr, backends.cudnn, "allow_tf32", True)
                backends.cudnn.allow_tf32 = False
        yield


def _older_precision_settings() -> tuple[str, bool] | None:
    """Precision of float32 matrix products and TF32 in cuDNN, by torch's older interface.

    None where its newer interface (torch 2.9, `fp32_precision`) is in use. The two must not be
    mixed: torch.compile fails then, and settings of the older would be taken over by the newer.
    """
    backends: Any = torch.backends
    for part in (backends, backends.cudnn):
        if getattr(part, "fp32_precision", "none") != "none":
            return None
    try:
        return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # torch refuses to read older settings after newer ones were made
        return None


def run(model: nn.Module, batch: Tensor) -> Any:
    """The outputs for a batch, which is moved to the model's device and `image_dtype`."""
    device = next(model.parameters(), batch).device
    return model(batch.to(device, image_dtype(model)))


def image_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of images for a model: that of its first convolution, or of its first parameter.

    In a model of several dtypes, the image meets the first convolution first.
    """
    convs = [module for module in model.modules() if isinstance(module, AnyConv | DclsConvNd)]
    for weight in [*(conv.weight for conv in convs), *model.parameters()]:
        if weight.is_floating_point():
            return weight.dtype
    return torch.float32


@contextlib.contextmanager
def unchanged_on_failure(model: nn.Module, *, values: Sequence[Tensor] = ()) -> Iterator[None]:
    """If the block fails, the model is restored, and so are the `values`.

    Every module gets back its parameters, children, hooks and attributes. The contents of tensors
    are restored only for `values`.
    """
    # Each dictionary is refilled, never replaced: handles of hooks refer to the dictionaries.
    saved: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # a dictionary, and its contents
    for module in model.modules():
        attributes = vars(module)
        saved.append((attributes, dict(attributes)))
        for registry in attributes.values():  # of parameters, children, hooks
            if isinstance(registry, dict):
                saved.append((registry, dict(registry)))
    copies = [tensor.detach().clone() for tensor in values]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, copy in zip(values, copies, strict=True):
                tensor.copy_(copy)
        for dictionary, contents in saved:
            dictionary.clear()
            dictionary.update(contents)
        raise


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside, no warning is shown and nothing is printed. Errors go through."""
    unread = io.StringIO()
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(unread),
        contextlib.redirect_stderr(unread),
    ):
        yield


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Inside, torch's generators start at `seed`; afterwards they have their old states again.

    With None, they are left alone.
    """
    devices: list[int] = []
    cuda_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if cuda_in_use:
        devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices, enabled=seed is not None):
        if seed is not None:
            # torch.manual_seed would also reseed devices whose state is not saved here.
            torch.default_generator.manual_seed(seed)
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(seed)
        yield
