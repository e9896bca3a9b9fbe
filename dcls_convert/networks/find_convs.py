"""Find a model's convolutions, their stages and MACs, and why some cannot be replaced."""

from collections.abc import Mapping, Sequence

from torch import nn

from ..errors import PlanError, check_argument
from ..geometry import size_text
from ..layers.conv_classes import AnyConv, padding_of
from ..layers.dcls_conv import DclsConvNd
from ..layers.replaceable import why_not_replaceable
from ..text import one_line
from .input_tensors import (
    Inputs,
    as_image_size,
    checked_input_size,
    image_inputs,
    inputs_text,
    sides_of_image,
)
from .inputs import ExampleInputs, describe_inputs
from .references import find_references
from .sites import ConvSite, ModelConvs, Skipped
from .stages import OutputStride, find_stages, output_stride
from .tracing import Calls, Trace, trace
from .wrappers import check_not_wrapped, other_forms, why_inside_wrapper

UNCHECKED = "output sizes, shifts of maps, and uses of convolutions by other code, are not checked"
NOT_CHECKED = f" (so {UNCHECKED})"
NOT_COMPARED = "; save, verify and fold cannot compare outputs"
OTHER_INPUTS = "for inputs other than one image, give example_inputs in Python"
OR_NO_SIZE = f" (without an input size, {UNCHECKED})"
IMAGE_CHANNELS = 3  # assumed where the input size does not state them


def find_convs(
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    *,
    example_inputs: ExampleInputs | None = None,
) -> ModelConvs:
    """Return every convolution object of `model` once, under all its names.

    Args:
        model: Not changed. Its weights may be on any device, meta included.
        input_size: Size of one image, (channels, *spatial); in 2-D and 3-D, the spatial sizes
            alone mean 3 channels. Without it, the size that a timm model states is used. Output
            sizes and MACs come from one forward pass on the meta device; they are None if the
            model does not run there.
        example_inputs: For any other input: what forward is called with, of any dtype, with the
            batch axis. A tensor, a tuple of tensors, or a dict of keyword arguments. Only shapes,
            dtypes and the range of integers are used.

    Raises:
        DclsConvertError: `model` is not a module.
        PlanError: `input_size` is not made of positive integers, or does not fit the number of
            dimensions of the convolutions; it is given beside `example_inputs`; or the model is
            compiled or has DCLS layers already.
    """
    check_argument("model", model, nn.Module)
    return find_convs_for(model, inputs_of(model, input_size, example_inputs))


def inputs_of(
    model: nn.Module, input_size: Sequence[int] | None, example_inputs: ExampleInputs | None
) -> Inputs | None:
    """Return what forward takes, as the user or a timm model states it; None if neither does.

    Raises:
        PlanError: See `find_convs`.
    """
    if example_inputs is not None:
        if input_size is not None:
            raise PlanError("input_size is for one image; give it or example_inputs, not both")
        inputs = describe_inputs(example_inputs)
        size = as_image_size(inputs, _dims(model))
        if size is None:
            return inputs
        return image_inputs(size)  # whatever the batch
    size = _stated_input_size(model)
    if input_size is not None:
        size = _with_channels(model, checked_input_size(input_size))
    if size is None:
        return None
    return image_inputs(size)


def _with_channels(model: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return (channels, *spatial); raise PlanError if it does not fit the model's dimensions."""
    dims = max(_dims(model))
    if len(size) == dims:
        return (IMAGE_CHANNELS, *size)
    if len(size) != dims + 1:
        raise PlanError(
            f"input size {size_text(size)} must be channels and {dims} sides, the model is {dims}-D"
        )
    return size


def _dims(model: nn.Module) -> set[int]:
    """Return the numbers of spatial axes that the model's convolutions have; 2 without any."""
    return {len(conv.kernel_size) for conv in _convs_with_names(model)} or {2}


def find_convs_for(model: nn.Module, inputs: Inputs | None) -> ModelConvs:
    """Return every convolution object of `model`, as `find_convs`, for described inputs."""
    _check_not_wrapped_or_converted(model)
    names_of = _convs_with_names(model)
    input_size = as_image_size(inputs, _dims(model))
    traced, macs_note = _try_trace(model, inputs, input_size)
    spatial = {names[0] for conv, names in names_of.items() if max(conv.kernel_size) > 1}
    stages = find_stages(model, _output_strides(traced), spatial)
    holders = _modules_by_parameter(model)
    references = find_references(model)
    first_conv = next(iter(names_of), None)
    sites: list[ConvSite] = []
    skipped = list(other_forms(model))
    for conv, names in names_of.items():
        name = names[0]
        calls: Calls | None = None
        reason = why_inside_wrapper(model, name) or _why_skipped(conv, holders, references)
        if reason is None and traced is not None:
            calls, reason = _calls_or_reason(model, name, traced)
        if reason is not None:
            skipped.append(Skipped(name=name, type=type(conv).__name__, reason=reason))
            continue
        if calls is None:
            sees_image = conv is first_conv  # an assumption: there is no trace
        else:
            sees_image = calls.takes_image
        takes_image = sees_image and _may_take_inputs(conv, inputs)
        site = _site(
            conv,
            names,
            calls,
            stage=stages.stage_of(name),
            stem=stages.is_in_stem(name) or takes_image,
        )
        sites.append(site)
    return ModelConvs(
        sites=tuple(sites),
        skipped=tuple(skipped),
        params=_parameter_count(model),
        macs=None if traced is None else traced.macs,
        inputs=inputs,
        input_size=input_size,
        macs_note=macs_note,
        stages_from=stages.found_by,
    )


def _may_take_inputs(conv: AnyConv, inputs: Inputs | None) -> bool:
    """True if a convolution has the channels of an input, or of all inputs put together."""
    channels = [tensor.shape[1] for tensor in inputs or () if len(tensor.shape) > 2]
    return not channels or conv.in_channels in (*channels, sum(channels))


def _why_skipped(
    conv: AnyConv, holders: Mapping[int, Sequence[str]], references: Mapping[nn.Module, str]
) -> str | None:
    """Return why a convolution cannot be replaced, or None if it can.

    Args:
        conv: The convolution.
        holders: Names of the modules that hold a parameter, by its id.
        references: For each convolution to which other objects refer, why it must stay.
    """
    reason = why_not_replaceable(conv)
    if reason is not None:
        return reason
    holders_of_weight = holders[id(conv.weight)]
    if len(holders_of_weight) > 1:
        return f"{' and '.join(holders_of_weight)} share its weight"
    return references.get(conv)


def _calls_or_reason(
    model: nn.Module, name: str, traced: Trace
) -> tuple[Calls, None] | tuple[None, str]:
    """Return the calls of a convolution and None; or None and why it cannot be replaced.

    It can be replaced only if nothing but its own forward uses it.
    """
    if name not in traced.calls:
        outer = _outer_with_own_forward(model, name)
        if outer is not None:
            reason = f"{outer} has a forward of its own, set on this very object"
            return None, f"whether it is called is not known: {reason}"
    if name in traced.other_uses:
        return None, traced.other_uses[name]
    if name not in traced.calls:
        return None, "the forward pass of the network in eval mode does not call it"
    return traced.calls[name], None


def _outer_with_own_forward(model: nn.Module, name: str) -> str | None:
    """Return the name of the module around `name` whose forward was set on the object; or None.

    Such a function may refer to the modules themselves, which a trace of a copy does not see.
    """
    while name:
        name = name.rpartition(".")[0]
        if "forward" in vars(model.get_submodule(name)):
            return name or "the model"
    return None


def _check_not_wrapped_or_converted(model: nn.Module) -> None:
    """Raise PlanError if the model is a wrapper, not made of modules, or has DCLS layers."""
    check_not_wrapped(model)
    converted = sum(isinstance(module, DclsConvNd) for module in model.modules())
    if converted:
        raise PlanError(f"the model is converted already: it has {converted} DCLS layers")


def _convs_with_names(model: nn.Module) -> dict[AnyConv, list[str]]:
    """Return every convolution object of the model, with all its qualified names."""
    names_of: dict[AnyConv, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AnyConv):
            names_of.setdefault(module, []).append(name)
    return names_of


def _modules_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Map the id of each parameter to the names of the modules that hold it."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append(name or "the model")
    return holders


def _try_trace(
    model: nn.Module, inputs: Inputs | None, input_size: tuple[int, ...] | None
) -> tuple[Trace, None] | tuple[None, str]:
    """Trace the model; return the trace and None, or None and the reason why it failed."""
    if inputs is None:
        reason = f"no input size is known; state one ({OTHER_INPUTS})"
        return None, f"{reason}{NOT_CHECKED}{NOT_COMPARED}"
    try:
        return trace(model, inputs), None
    except Exception as error:  # any model code may run here; the model can still be converted
        message = one_line(error)[:200]
        where = "the model does not run on the meta device at"
        reason = f"{where} {inputs_text(inputs)}: {message}"
        if input_size is not None:
            reason = f"{where} {size_text(input_size)}: {message}; {OTHER_INPUTS}"
        return None, f"{reason}{NOT_CHECKED}"


def _output_strides(traced: Trace | None) -> dict[str, OutputStride]:
    """Return, by name, the output stride of each convolution whose output has all image axes."""
    if traced is None:
        return {}
    strides: dict[str, OutputStride] = {}
    for name, calls in traced.calls.items():
        first_size = calls.output_size
        image_sides = sides_of_image(traced.inputs, len(first_size))
        if image_sides is not None and min(first_size) > 0:
            strides[name] = output_stride(image_sides, first_size)
    return strides


def _parameter_count(model: nn.Module) -> int:
    """Count the parameters, except those of lazy layers, which have no size yet."""
    count = 0
    for parameter in model.parameters():
        if not isinstance(parameter, nn.parameter.UninitializedParameter):
            count += parameter.numel()
    return count


def _site(
    conv: AnyConv,
    names: Sequence[str],
    calls: Calls | None,
    *,
    stage: str | None,
    stem: bool,
) -> ConvSite:
    """Make the record of one convolution; `calls` is None without a trace."""
    output_size: tuple[int, ...] | None = None
    input_extent: tuple[int, ...] | None = None
    output_positions: int | None = None
    shifted_axes: tuple[int, ...] = ()
    if calls is not None:
        output_size = calls.output_size
        input_extent = calls.input_extent
        output_positions = calls.output_positions
        shifted_axes = calls.shifted_axes
    return ConvSite(
        names=tuple(names),
        type=type(conv).__name__,
        kind=_kind(conv),
        stage=stage,
        stem=stem,
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        groups=conv.groups,
        bias=conv.bias is not None,
        kernel_size=tuple(conv.kernel_size),
        stride=tuple(conv.stride),
        dilation=tuple(conv.dilation),
        padding=padding_of(conv),
        padding_mode=conv.padding_mode,
        output_size=output_size,
        shifted_axes=shifted_axes,
        input_extent=input_extent,
        output_positions=output_positions,
    )


def _kind(conv: AnyConv) -> str:
    if conv.groups == 1:
        return "dense"
    if conv.groups == conv.in_channels:
        return "depthwise"
    return "grouped"


def _stated_input_size(model: nn.Module) -> tuple[int, ...] | None:
    """Return (channels, *spatial) from timm's config of the model, or None if it has none."""
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or not config.get("input_size"):
        return None
    channels, *sides = config["input_size"]
    # With these arguments, timm builds another model, but its config still states the usual size.
    arguments = getattr(model, "_model_args", {})
    channels = arguments.get("in_chans") or channels
    image_size = arguments.get("img_size")
    if isinstance(image_size, int):
        sides = [image_size, image_size]
    elif isinstance(image_size, Sequence):
        sides = list(image_size)
    return (channels, *sides)
