"""What a model's convolutions see, and what it costs: a meta copy of it is run, never the model itself."""

import contextlib
import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..depthwise.geometry import size_text
from ..errors import PlanError, one_line, shown
from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..options import INTERPOLATIONS
from .outputs import tensors_in

ONE_STAGE_DETECTORS = (
    "FCOS",
    "RetinaNet",
    "SSD",
)  # of torchvision: all their convolutions are in backbone and head
Windows = Mapping[
    str, tuple[Sequence[int], Sequence[int]]
]  # name of a convolution -> (dilated size, dense axes)


@dataclass(slots=True)
class Calls:
    """What one convolution object saw."""

    sizes: list[tuple[int, ...]]  # spatial output size of each call
    input_extent: tuple[int, ...]  # smallest spatial input of any call
    output_positions: int = 0  # spatial positions of all calls, for one image
    takes_image: bool = (
        False  # whether its input was the image itself, or no convolution was called before it
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One image's way through a model."""

    input_size: tuple[int, ...]  # of the image: channels, *spatial
    calls: dict[str, Calls]  # by the first qualified name of the convolution
    shapes: list[tuple[int, ...]]  # of the tensors that the model returned
    flops: dict[
        str, dict[str, int]
    ]  # module name ("" is the model) -> operator -> floating-point operations
    meta: nn.Module  # the meta copy that ran


def trace(model: nn.Module, input_size: Sequence[int]) -> Trace:
    """Send an image (channels, *spatial) through a meta copy in eval mode. Raises what the model's own code does."""
    try:
        return _trace(meta_copy(model), input_size)
    except Exception:
        with contextlib.suppress(Exception):
            return _trace(meta_copy(model, real_attributes=True), input_size)
        raise


def _trace(meta: nn.Module, input_size: Sequence[int]) -> Trace:
    from torch.utils.flop_counter import FlopCounterMode

    calls: dict[str, Calls] = {}
    with FlopCounterMode(display=False) as counter:
        shapes = _run(meta, input_size, calls)
    prefix = type(meta).__name__ + "."
    counts = counter.get_flop_counts()
    counts[prefix] = counts.pop("Global", {})
    flops = {
        path.removeprefix(prefix): {
            str(operator).rpartition(".")[2]: int(count) for operator, count in own.items()
        }
        for path, own in counts.items()
    }
    return Trace(input_size=tuple(input_size), calls=calls, shapes=shapes, flops=flops, meta=meta)


def check_same_shapes(before: Trace | None, windows: Windows) -> None:
    """Refuse (PlanError) windows that would change an output size: a model may pad outside its convolutions."""
    if before is None:
        return
    calls: dict[str, Calls] = {}
    shapes: list[tuple[int, ...]] = []
    failure = None
    layers: dict[
        nn.Module, Any
    ] = {}  # one for a convolution of several names; their kernels are not constructed
    try:
        meta = copy.deepcopy(before.meta)
        for name, (window, dense_axes) in windows.items():
            conv: Any = before.meta.get_submodule(name)
            if conv not in layers:
                layers[conv] = DCLS_LAYERS[len(window)].like(
                    conv, 1, window, INTERPOLATIONS[0], dense_axes
                )
                kernel_size = (*conv.weight.shape[:2], *window)
                layers[conv].kernel = functools.partial(Tensor.new_empty, conv.weight, kernel_size)
            meta.set_submodule(name, layers[conv])
        shapes = _run(meta, before.input_size, calls)
    except Exception as error:  # any model code may run here
        failure = error
    sizes = [
        (name, old.sizes, calls[name].sizes) for name, old in before.calls.items() if name in calls
    ]
    for name, olds, news in [*sizes, ("", before.shapes, shapes)]:
        for old, new in zip(olds, news, strict=False):
            if old != new:
                what = f"{shown(name)}: its output" if name else "the model's output"
                raise PlanError(
                    f"{what} would be {size_text(new)} instead of {size_text(old)}: the model pads outside its "
                    "convolutions by an amount that it takes from their kernel size, so larger windows do not fit it"
                )
    if failure is not None:
        raise PlanError(
            f"with these windows, the model would not run any more: {one_line(failure)[:200]}"
        )


def _run(
    meta: nn.Module, input_size: Sequence[int], calls: dict[str, Calls]
) -> list[tuple[int, ...]]:
    """The shapes of a meta copy's outputs for one image; `calls` gets what each convolution sees, up to an error."""
    image = torch.empty(1, *input_size, dtype=image_dtype(meta), device="meta")
    names = {module: name for name, module in meta.named_modules()}

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        entering = args[0] if args else kwargs["input"]
        dims = len(module.kernel_size)  # type: ignore[arg-type]
        size, extent = tuple(output.shape[-dims:]), tuple(entering.shape[-dims:])
        first = not calls
        seen = calls.setdefault(names[module], Calls([], extent))
        seen.sizes.append(size)
        seen.input_extent = tuple(map(min, seen.input_extent, extent))
        batch = output.shape[0] if output.dim() == dims + 2 else 1
        seen.output_positions += batch * math.prod(size)
        seen.takes_image = seen.takes_image or first or entering is image

    with contextlib.ExitStack() as hooks, torch.no_grad(), torch.device("meta"):
        for module in names:
            if isinstance(module, AnyConv | DclsConvNd):
                hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
        return [tuple(tensor.shape) for tensor in tensors_in(_outputs(meta, image))]


def _outputs(model: nn.Module, image: Tensor) -> object:
    """What a model gives for one image (1, C, *spatial); some models of torchvision do not take a batch of images."""
    for base in type(model).__mro__:
        family = base.__module__.partition("torchvision.models.")[2]
        if family == "optical_flow.raft":
            return model(image, image)  # flow is from one image to the next
        if family.startswith("detection."):
            if base.__name__ == "GeneralizedRCNN":
                raise ValueError(
                    f"what a {type(model).__name__} computes depends on how many regions it finds"
                )
            if base.__name__ in ONE_STAGE_DETECTORS:
                # Up to the end of its head: the rest, without MACs, sorts boxes by their values.
                with (
                    model.get_submodule("head").register_forward_hook(_stop),
                    contextlib.suppress(_HeadIsDone),
                ):
                    model([image[0]])
                return None
    return model(image)


class _HeadIsDone(Exception):
    """Not an error: nothing behind the head is looked at."""


def _stop(*_: object) -> None:
    raise _HeadIsDone


def meta_copy(model: nn.Module, *, real_attributes: bool = False) -> nn.Module:
    """A copy in eval mode on meta, without hooks; `real_attributes` keeps plain tensors, which YOLO's models read."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        # copy.deepcopy refuses those that are computed from parameters (weight_norm, pruning).
        attributes = () if real_attributes else vars(module).values()
        for tensor in [
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
            *attributes,
        ]:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta", requires_grad=False)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = (
                    nn.Parameter(empty, requires_grad=False) if is_parameter else empty
                )
    meta: nn.Module = copy.deepcopy(model, memo).eval()
    for module in meta.modules():
        vars(module).get("_forward_hooks", {}).clear()
    return meta


def image_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first convolution: in a model of several dtypes, the image meets it first."""
    convs = [m.weight for m in model.modules() if isinstance(m, AnyConv | DclsConvNd)]
    return next(
        (weight.dtype for weight in [*convs, *model.parameters()] if weight.is_floating_point()),
        torch.float32,
    )
