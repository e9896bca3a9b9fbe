"""Run a hollow twin of a model on the meta device: what its convolutions see, what it costs, and its sizes.

The model itself is never run, so neither its tensors nor anything that it caches or counts can change.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..depthwise.geometry import size_text
from ..errors import PlanError, one_line, shown
from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..options import INTERPOLATIONS
from .outputs import tensors_in

ONE_STAGE_DETECTORS = ("FCOS", "RetinaNet", "SSD")  # of torchvision: all their convolutions are in backbone and head


# Spatial output sizes of each convolution's calls, by name, in the order of the first calls; "" has the shapes of the
# tensors that the model returns.
Sizes = dict[str, list[tuple[int, ...]]]


@dataclass(slots=True)
class Calls:
    """What one convolution object saw."""

    sizes: list[tuple[int, ...]]  # spatial output size of each call
    input_extent: tuple[int, ...]  # smallest spatial input of any call
    output_positions: int = 0  # spatial positions of all calls, for one image
    takes_image: bool = False  # whether its input was the image itself, or no convolution was called before it

    @property
    def output_size(self) -> tuple[int, ...]:
        """Of the first call."""
        return self.sizes[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One image's way through a model."""

    calls: dict[str, Calls] = field(default_factory=dict)  # by the first qualified name of the convolution
    shapes: list[tuple[int, ...]]  # of the tensors that the model returned
    flops: dict[str, dict[str, int]]  # module name ("" is the model) -> operator -> floating-point operations

    @property
    def macs(self) -> int:
        """Multiply-accumulates; torch's counter takes each for two operations."""
        return sum(self.flops[""].values()) // 2

    @property
    def sizes(self) -> Sizes:
        return {name: call.sizes for name, call in self.calls.items()} | {"": self.shapes}


def trace(model: nn.Module, input_size: Sequence[int]) -> Trace:
    """Send one image through a hollow twin of `model` in eval mode, counted by torch's flop counter.

    Args:
        model: Not run and not changed, whatever device it is on.
        input_size: (channels, *spatial).

    Raises:
        Exception: Whatever the model's own code raises; there are models that do not run on the meta device.
    """
    try:
        return _trace(_hollow_twin(model), input_size)
    except Exception:
        with contextlib.suppress(Exception):
            return _trace(_hollow_twin(model, hollow_attributes=False), input_size)
        raise


def _trace(twin: nn.Module, input_size: Sequence[int]) -> Trace:
    from torch.utils.flop_counter import FlopCounterMode

    image, calls = _watched(twin, input_size)
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        outputs = _way_of(twin)(image)
    prefix = type(twin).__name__ + "."
    counts = counter.get_flop_counts()
    counts[prefix] = counts.pop("Global", {})
    flops = {
        path.removeprefix(prefix): {str(operator).rpartition(".")[2]: int(count) for operator, count in found.items()}
        for path, found in counts.items()
    }
    return Trace(calls=calls, flops=flops, shapes=_shapes(outputs))


def check_same_shapes(
    model: nn.Module,
    windows: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    input_size: Sequence[int] | None,
    before: Sizes,
) -> None:
    """Refuse a conversion that would change the output size of any convolution, or of the model.

    Each layer by itself keeps its output size: its padding grows with its window. The sizes change all the same where
    the model pads outside its convolutions by an amount that it takes from their `kernel_size`.

    Args:
        model: Not run and not changed, whatever device it is on.
        windows: (dilated size, dense axes) of each new layer, under every name of the convolution.
        input_size: (channels, *spatial).
        before: The sizes at present. Where there are none, since the model could not be traced, nothing is compared.

    Raises:
        PlanError: Names the first convolution whose output size would change, or says why the model would not run.
    """
    if input_size is None or not before:
        return
    calls, shapes, failure = _with_windows(_hollow_twin(model), windows, input_size)
    if failure is not None:
        with contextlib.suppress(Exception):
            again = _with_windows(_hollow_twin(model, hollow_attributes=False), windows, input_size)
            calls, shapes, failure = again if again[2] is None else (calls, shapes, failure)
    for name, sizes in before.items():
        after = calls[name].sizes if name in calls else [] if name else shapes
        for old, new in zip(sizes, after, strict=False):
            if old != new:
                what = f"{shown(name)}: its output" if name else "the model's output"
                raise PlanError(
                    f"{what} would be {size_text(new)} instead of {size_text(old)}: the model pads outside its "
                    "convolutions by an amount that it takes from their kernel size, so larger windows do not fit it"
                )
    if failure is not None:
        raise PlanError(f"with these windows, the model would not run any more: {one_line(failure)[:200]}")


def _watched(twin: nn.Module, input_size: Sequence[int]) -> tuple[Tensor, dict[str, Calls]]:
    """A hollow image, and what each convolution of a hollow twin sees, by name; filled while the twin runs."""
    image = torch.empty(1, *input_size, dtype=image_dtype(twin), device="meta")
    calls: dict[str, Calls] = {}
    names = {module: name for name, module in reversed(list(twin.named_modules(remove_duplicate=False)))}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        entering = args[0] if args else kwargs["input"]
        dims = len(module.kernel_size)  # type: ignore[arg-type]
        size, entered = tuple(output.shape[-dims:]), tuple(entering.shape[-dims:])
        first = not calls
        seen = calls.setdefault(names[module], Calls([], entered))
        seen.sizes.append(size)
        seen.input_extent = tuple(map(min, seen.input_extent, entered))
        batch = output.shape[0] if output.dim() == dims + 2 else 1
        seen.output_positions += batch * math.prod(size)
        seen.takes_image = seen.takes_image or first or entering is image

    for module in names:
        if isinstance(module, AnyConv | DclsConvNd):
            module.register_forward_hook(record, with_kwargs=True)
    return image, calls


def _shapes(outputs: object) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_in(outputs)]


def _with_windows(
    twin: nn.Module, windows: Mapping[str, tuple[Sequence[int], Sequence[int]]], input_size: Sequence[int]
) -> tuple[dict[str, Calls], list[tuple[int, ...]], Exception | None]:
    """What the convolutions of a hollow twin would see with these windows, the shapes of its outputs, what stopped it.

    Kernels of the DCLS layers in their places are not constructed.
    """
    layers: dict[nn.Module, nn.Module] = {}  # a shared convolution becomes one layer
    for name, (window, dense_axes) in windows.items():
        conv: Any = twin.get_submodule(name)
        if conv not in layers:
            layer: Any = DCLS_LAYERS[len(window)].like(conv, 1, window, INTERPOLATIONS[0], dense_axes)
            layer.kernel = functools.partial(torch.Tensor.new_empty, conv.weight, (*conv.weight.shape[:2], *window))
            layers[conv] = layer
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, layers[conv])
    image, calls = _watched(twin, input_size)
    try:
        with torch.no_grad(), torch.device("meta"):
            return calls, _shapes(_way_of(twin)(image)), None
    except Exception as error:  # any model code may run here
        return calls, [], error


def _way_of(model: nn.Module) -> Callable[[Tensor], object]:
    """How one image (1, C, *spatial) is sent through; some models of torchvision do not take a batch of images."""
    for base in type(model).__mro__:
        family = base.__module__.partition("torchvision.models.")[2]
        if family == "optical_flow.raft":
            return lambda image: model(image, image)  # flow is from one image to the next
        if family.startswith("detection."):
            if base.__name__ == "GeneralizedRCNN":
                raise ValueError(f"what a {type(model).__name__} computes depends on how many regions it finds")
            if base.__name__ in ONE_STAGE_DETECTORS:
                return functools.partial(_detect, model)
    return model


class _Detected(Exception):
    """The head of a detector is done."""


def _detect(detector: nn.Module, image: Tensor) -> None:
    """Run a one-stage detector up to the end of its head.

    The rest sorts boxes by their values, which hollow tensors do not have. It has no MACs: those up to here are what
    torchvision states for its detectors.
    """

    def stop(*_: object) -> None:
        raise _Detected

    handle = detector.get_submodule("head").register_forward_hook(stop)
    try:
        detector([image[0]])
    except _Detected:
        return
    finally:
        handle.remove()
    raise ValueError(f"{type(detector).__name__} did not ask its head")


def _hollow_twin(model: nn.Module, *, hollow_attributes: bool = True) -> nn.Module:
    """A copy in eval mode whose tensors are on the meta device, without the user's forward hooks.

    Args:
        model: Not changed.
        hollow_attributes: Whether tensors that are plain attributes are hollow too. Those that are computed from
            parameters (weight_norm, pruning) or cached need not be leaves, and copy.deepcopy refuses tensors that are
            not. But a model may read the values of others, such as the strides of YOLO's maps.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        attributes = vars(module).values() if hollow_attributes else ()
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False), *attributes]:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                hollow = torch.empty_like(tensor, device="meta", requires_grad=False)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(hollow, requires_grad=False) if is_parameter else hollow
    twin = copy.deepcopy(model, memo).eval()
    for module in twin.modules():
        vars(module).get("_forward_hooks", {}).clear()
    return twin


def image_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first convolution: in a model of several dtypes, the image meets it first."""
    convs = [m.weight for m in model.modules() if isinstance(m, AnyConv | DclsConvNd)]
    return next((weight.dtype for weight in [*convs, *model.parameters()] if weight.is_floating_point()), torch.float32)
