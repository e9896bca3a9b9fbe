"""Run a meta copy of a model to find what its convolutions see, and what it costs.

On the meta device, no values are computed.
"""

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..geometry import size_text
from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..options import DEFAULT_INTERPOLATION
from ..text import one_line, shortened
from .conv_uses import ConvUses
from .copying import copy_network, meta_copy
from .model_outputs import tensors_in
from .running import image_dtype

# torchvision's detectors with all their convolutions in backbone and head.
ONE_STAGE_DETECTORS = ("FCOS", "RetinaNet", "SSD")
# Name of a convolution -> (dilated size, dense axes).
Windows = Mapping[str, tuple[Sequence[int], Sequence[int]]]


@dataclass(slots=True)
class Calls:
    """The calls of one convolution during a trace."""

    output_sizes: list[tuple[int, ...]]  # spatial, of each call
    input_extent: tuple[int, ...]  # smallest spatial input of any call
    output_positions: int = 0  # spatial positions of all calls, for one image
    # True if its input was the image itself, or if it was called before any other convolution.
    takes_image: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The record of one image's forward pass through a model."""

    input_size: tuple[int, ...]  # of the image: channels, *spatial
    calls: dict[str, Calls]  # by the first qualified name of the convolution
    output_shapes: list[tuple[int, ...]]  # of the tensors that the model returned
    macs: int  # of all operators
    # Name of a convolution -> how other code than itself uses its weight or settings.
    other_uses: dict[str, str]
    meta_model: nn.Module  # the meta copy that ran


def trace(model: nn.Module, input_size: Sequence[int]) -> Trace:
    """Run a meta copy of the model, in eval mode, on an image (channels, *spatial).

    Errors of the model's own code are raised unchanged.
    """
    try:
        return _trace(meta_copy(model), input_size)
    except Exception:
        # Some models (YOLO) read the values of tensors in plain attributes.
        with contextlib.suppress(Exception):
            return _trace(meta_copy(model, real_attributes=True), input_size)
        raise


def _trace(meta: nn.Module, input_size: Sequence[int]) -> Trace:
    from torch.utils.flop_counter import FlopCounterMode

    calls: dict[str, Calls] = {}
    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = _WholeModel()
    uses = ConvUses(meta)
    with counter:
        shapes = _run_and_record_(calls, meta, input_size, uses)
    return Trace(
        input_size=tuple(input_size),
        calls=calls,
        output_shapes=shapes,
        macs=int(counter.get_total_flops()) // 2,  # a multiply-accumulate is two operations
        other_uses=uses.reasons,
        meta_model=meta,
    )


class _WholeModel(contextlib.nullcontext[None]):
    """Counts all operations for the model as a whole, in the place of torch's module tracker.

    The module tracker hooks every module of the process, so it is confused by other threads.
    """

    parents = ("Global",)


def check_same_shapes(before: Trace | None, windows: Windows) -> None:
    """Check that the new windows change no output size.

    They do if the model pads outside its convolutions. Without a trace, nothing is checked.

    Raises:
        PlanError: The size of an output changes, or the model does not run.
    """
    if before is None:
        return
    calls: dict[str, Calls] = {}
    shapes: list[tuple[int, ...]] = []
    failure: Exception | None = None
    try:
        converted = _with_windows(before.meta_model, windows)
        shapes = _run_and_record_(calls, converted, before.input_size, contextlib.nullcontext())
    except Exception as error:  # any model code may run here
        failure = error
    # If the model fails, an output size that changed before explains it better.
    for name, old_calls in before.calls.items():
        if name in calls:
            _check_sizes(
                f"{shortened(name)}: its output", old_calls.output_sizes, calls[name].output_sizes
            )
    _check_sizes("the model's output", before.output_shapes, shapes)
    if failure is not None:
        raise PlanError(
            f"with these windows, the model would no longer run: {one_line(failure)[:200]}"
        )


def _with_windows(meta: nn.Module, windows: Windows) -> nn.Module:
    """Copy a meta model and place DCLS layers, whose kernels have the right size but no values."""
    converted = copy_network(meta)
    layers: dict[nn.Module, Any] = {}  # by convolution, which may have several names
    for name, (window, dense_axes) in windows.items():
        conv: Any = meta.get_submodule(name)
        if conv not in layers:
            layer_class = DCLS_LAYERS[len(window)]
            layer: Any = layer_class.from_conv_without_values(
                conv, 1, window, DEFAULT_INTERPOLATION, dense_axes
            )
            kernel_shape = (*conv.weight.shape[:2], *window)
            # Constructing the kernel on meta would take longer, for the same shape.
            layer.kernel = functools.partial(Tensor.new_empty, conv.weight, kernel_shape)
            layers[conv] = layer
        converted.set_submodule(name, layers[conv])
    return converted


def _check_sizes(
    what: str, old_sizes: Sequence[tuple[int, ...]], new_sizes: Sequence[tuple[int, ...]]
) -> None:
    """Raise PlanError if sizes differ; ignore calls that only one of the models made."""
    for old, new in zip(old_sizes, new_sizes, strict=False):
        if old != new:
            raise PlanError(
                f"{what} would be {size_text(new)} instead of {size_text(old)}: "
                "the model pads outside its convolutions by an amount that it takes from their "
                "kernel size, so larger windows do not fit it"
            )


def _run_and_record_(
    calls: dict[str, Calls],
    meta: nn.Module,
    input_size: Sequence[int],
    uses: contextlib.AbstractContextManager[Any],
) -> list[tuple[int, ...]]:
    """Run a meta copy on one image, and return the shapes of its outputs.

    The calls of each convolution are added to `calls`. If the model fails, these are the calls
    before the failure. `uses` is entered while the model runs.
    """
    image = torch.empty(1, *input_size, dtype=image_dtype(meta), device="meta")
    convs: dict[nn.Module, tuple[str, int]] = {}  # name, and number of dimensions
    for name, module in meta.named_modules():
        if isinstance(module, AnyConv | DclsConvNd):
            convs[module] = (name, len(module.kernel_size))

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        input = args[0] if args else kwargs["input"]
        name, dims = convs[module]
        output_size = tuple(output.shape[-dims:])
        input_extent = tuple(input.shape[-dims:])
        is_first = not calls
        conv_calls = calls.setdefault(name, Calls([], input_extent))
        conv_calls.output_sizes.append(output_size)
        conv_calls.input_extent = tuple(map(min, conv_calls.input_extent, input_extent))
        batch = output.shape[0] if output.dim() == dims + 2 else 1
        conv_calls.output_positions += batch * math.prod(output_size)
        if is_first or input is image:
            conv_calls.takes_image = True

    with contextlib.ExitStack() as hooks, torch.no_grad(), torch.device("meta"):
        for conv in convs:
            hooks.enter_context(conv.register_forward_hook(record, with_kwargs=True))
        with uses:
            outputs = tensors_in(_outputs(meta, image))
    return [tuple(tensor.shape) for tensor in outputs]


def _outputs(model: nn.Module, image: Tensor) -> object:
    """Run a model on one image (1, C, *spatial), and return its outputs.

    Some torchvision models do not take a batch of images.
    """
    for base in type(model).__mro__:
        family = base.__module__.partition("torchvision.models.")[2]
        if family == "optical_flow.raft":
            return model(image, image)  # flow is from one image to the next
        if not family.startswith("detection."):
            continue
        if base.__name__ == "GeneralizedRCNN":
            raise ValueError(
                f"what a {type(model).__name__} computes depends on how many regions it finds"
            )
        if base.__name__ in ONE_STAGE_DETECTORS:
            # Stop after the head: what follows has no MACs, and sorts boxes by their values, which
            # a meta copy does not have.
            hook = model.get_submodule("head").register_forward_hook(_stop)
            with hook, contextlib.suppress(_HeadIsDone):
                model([image[0]])
            return None
    return model(image)


class _HeadIsDone(Exception):
    """Ends a forward pass after the head; not an error."""


def _stop(*_: object) -> None:
    raise _HeadIsDone
