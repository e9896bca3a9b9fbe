"""Run or change the user's network, and restore its state.

- `eval_mode` restores the mode of each module, training or eval.
- `restored_values` restores the values of parameters.
- `run_batch` and `without_values` restore the containers of the modules: their attributes,
  parameters, buffers, children and hooks, and the network's own lists, sets and dictionaries.
- `without_small_parameters` restores parameters to which it gave larger values.
- `unchanged_on_failure` restores containers and the values of given tensors, if its block fails.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DclsConvNd

SMALL = 1e-2  # a parameter below it, such as a new layer scale, hides what is behind it


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


def run_batch(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Any:
    """Return the outputs for tensors, by position and by keyword.

    The tensors are moved to the model's device, and those of floating point to its `image_dtype`.
    What `forward` changes in the model is undone: buffers, counters and caches in attributes.
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

    The containers are each module's attributes, and the dictionaries, lists and sets among them:
    parameters, buffers, children, hooks, and the network's own.
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
    """Refill each container with its contents.

    The containers themselves stay, because hook handles refer to some of them.
    """
    for container, contents in saved:
        container.clear()
        if isinstance(container, list | deque):
            container.extend(contents)
        else:
            container.update(contents)


def _copy_tensors_(model: nn.Module, *, on_meta: bool = False) -> None:
    """Replace buffers, and tensors in attributes, by copies, which `forward` may change in place.

    With `on_meta`, parameters are replaced, too, and the copies have no values.

    `functional_call` would not do: it does not undo that `forward` sets a buffer that was None.
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
    """Restore the values of all parameters after the block.

    They are also restored each time the yielded function is called. Autograd does not notice, so
    that a graph of the user's keeps its saved tensors.
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


@contextlib.contextmanager
def without_small_parameters(model: nn.Module) -> Iterator[bool]:
    """Give parameters that are (nearly) zero larger values inside the block.

    A small parameter, such as a new layer scale, hides from the outputs what is behind it. Yields
    whether there are any.
    """
    generator = torch.Generator().manual_seed(1)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            with contextlib.suppress(RuntimeError):  # torch cannot change some kinds in place
                if parameter.detach().abs().max() >= SMALL:
                    continue
                old = parameter.detach().clone()
                parameter.data.copy_(old)  # if torch cannot change it, it is not kept
                scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
                values = torch.rand(parameter.shape, generator=generator, device="cpu") / 2 + 0.5
                kept.append((parameter, old))
                parameter.data.copy_(values * scale)
        yield bool(kept)
    finally:
        for changed, values in kept:
            changed.data.copy_(values)


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
