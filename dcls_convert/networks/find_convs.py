"""Find a model's convolutions, their stages and MACs, and why some cannot be replaced."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import cast

from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import PlanError, check_argument
from ..geometry import on_every_axis, size_text
from ..layers.conv_classes import AnyConv, Conv, settings_of, why_not_replaceable
from ..layers.conv_settings import ConvSettings, dims_of
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..options import MAX_PIXELS
from ..running.arguments import ExampleInputs, describe_inputs
from ..running.input_spec import (
    InputSpec,
    as_image_size,
    checked_input_size,
    image_inputs,
    in_unit_range,
    inputs_text,
    one_image,
    pixel_count,
    sides_of_image,
)
from ..running.library_code import LIBRARIES, is_library_code
from ..text import one_line, short_list
from .sites import NOT_CALLED, ConvSite, Measured, ModelConvs, Skipped
from .stages import ConvPlace, OutputStride, Stages, find_stages, output_stride
from .timm_notes import stated_input_size
from .tracing import Calls, Trace, trace
from .whole_networks import whole_networks_by_definition
from .wrappers import check_not_wrapped, other_forms, why_inside_wrapper

NOT_COMPARED = "; save, verify and fold cannot compare outputs"
OTHER_INPUTS = "for inputs other than one image, give example_inputs in Python"
IMAGE_CHANNELS = 3  # assumed where the input size does not state them


def find_convs(
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    *,
    example_inputs: ExampleInputs | None = None,
) -> ModelConvs:
    """Return every convolution object of `model` once, under all its names.

    Args:
        model: Not changed. Its weights may be on any device. On the meta device, the network
            cannot be measured.
        input_size: Size of one image, (channels, *spatial); in 2-D and 3-D, the spatial sizes
            alone mean 3 channels. None takes the size that a timm model states. Output sizes and
            MACs come from one forward pass; they are None if the model does not run. Networks of
            timm and torchvision that nothing has changed need no more. Any other network runs a few
            times more, to measure what it does with its convolutions. Afterwards, it is as before.
        example_inputs: For a network that takes anything but one image: what forward is called
            with, of any dtype, with the batch axis. A tensor, a tuple of tensors, or a dict of
            keyword arguments. Only shapes, dtypes and the range of values are used. A batch of
            images is reduced to one image, if the network takes one image.

    Raises:
        DclsConvertError: `model` is not a module.
        PlanError: `input_size` is not made of positive integers, or does not fit the number of
            dimensions of the convolutions; both `input_size` and `example_inputs` are given; or the
            model is compiled or has DCLS layers already.
    """
    check_argument("model", model, nn.Module)
    return find_convs_for(model, inputs_of(model, input_size, example_inputs))


def inputs_of(
    model: nn.Module, input_size: Sequence[int] | None, example_inputs: ExampleInputs | None
) -> InputSpec | None:
    """Return the inputs of forward that the user or a timm model states; None if neither does.

    Raises:
        PlanError: See `find_convs`.
    """
    if example_inputs is not None:
        if input_size is not None:
            raise PlanError("input_size is for one image; give it or example_inputs, not both")
        return describe_inputs(example_inputs)
    size = stated_input_size(model)
    if input_size is not None:
        size = _with_channels(model, checked_input_size(input_size))
    if size is None:
        return None
    return image_inputs(size)


def _with_channels(model: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return (channels, *spatial); raise PlanError if the size does not fit the model's axes."""
    first = next(iter(_convs_with_names(model)), None)
    if first is not None and size[0] == first.in_channels:
        # The first convolution sees the image; later ones may have more axes.
        if len(size) - 1 == dims_of(first):
            return size
    dims = max(_dims(model))
    if len(size) == dims:
        return (IMAGE_CHANNELS, *size)
    if len(size) != dims + 1:
        raise PlanError(
            f"input size {size_text(size)} must be channels and {dims} sides, the model is {dims}-D"
        )
    return size


def _dims(model: nn.Module) -> set[int]:
    """Return the numbers of spatial axes of the model's convolutions; {2} if there are none."""
    return set(map(dims_of, _convs_with_names(model))) or {2}


def find_convs_for(model: nn.Module, inputs: InputSpec | None) -> ModelConvs:
    """Return every convolution object of `model`, as `find_convs` does, for described inputs."""
    check_not_wrapped(model)
    _check_not_converted(model)
    names_of = _convs_with_names(model)
    is_users_code = not is_library_code(model)
    traced, inputs, macs_note = _try_trace(model, inputs, is_users_code=is_users_code)
    reasons = _why_skipped(model, names_of, traced)
    measured = Measured()
    if is_users_code:
        convs = {names[0]: conv for conv, names in names_of.items() if names[0] not in reasons}
        measured = _measure(model, convs, inputs)
        reasons |= measured.reasons
    stages = _find_stages(model, names_of, traced, inputs)
    sites: list[ConvSite] = []
    skipped = list(other_forms(model))
    for conv, names in names_of.items():
        name = names[0]
        if name in reasons:
            skipped.append(Skipped(name=name, type=type(conv).__name__, reason=reasons[name]))
            continue
        site = _site(
            conv,
            names,
            None if traced is None else traced.calls[name],
            stage=stages.stage_of.get(name),
            stem=name in stages.stem or _takes_image(conv, names_of, traced, inputs),
            why_attributes_are_needed=measured.why_read.get(name),
        )
        sites.append(site)
    return ModelConvs(
        sites=tuple(sites),
        skipped=tuple(skipped),
        params=parameter_count(model),
        macs=None if traced is None else traced.macs,
        inputs=inputs,
        input_size=as_image_size(inputs, _dims(model)),
        macs_note=macs_note,
        not_measured=measured.not_measured,
        dependence=measured.dependence,
        stages_from=stages.found_by,
    )


def _check_not_converted(model: nn.Module) -> None:
    converted = [module for module in model.modules() if isinstance(module, DclsConvNd)]
    if converted:
        raise PlanError(
            f"the model is converted already: it has {len(converted)} DCLS layers. For a larger "
            "window: dcls-convert FOLDER --dilated-size N, in Python convert_(model, "
            "dilated_size=N)"
        )


def _find_stages(
    model: nn.Module,
    names_of: Mapping[AnyConv, Sequence[str]],
    traced: Trace | None,
    inputs: InputSpec | None,
) -> Stages:
    strides = _output_strides(traced, inputs)
    places = []
    for conv, (name, *_) in names_of.items():
        is_spatial = max(on_every_axis(conv.kernel_size, 1)) > 1
        places.append(ConvPlace(name=name, stride=strides.get(name), is_spatial=is_spatial))
    if traced is None:
        networks = whole_networks_by_definition(
            {names[0]: conv for conv, names in names_of.items()}
        )
    else:
        networks = traced.networks
    return find_stages(model, places, networks)


def _takes_image(
    conv: AnyConv,
    names_of: Mapping[AnyConv, Sequence[str]],
    traced: Trace | None,
    inputs: InputSpec | None,
) -> bool:
    """True if a convolution sees an input of the network, and its channels fit.

    They fit if they are the channels of one input, or of all inputs together. Without a trace, the
    first convolution is assumed to see an input.
    """
    if traced is None:
        sees_input = conv is next(iter(names_of))
    else:
        sees_input = traced.calls[names_of[conv][0]].takes_image
    channels = [tensor.shape[1] for tensor in inputs or () if len(tensor.shape) > 2]
    fits = not channels or conv.in_channels in (*channels, sum(channels))
    return sees_input and fits


def _why_skipped(
    model: nn.Module, names_of: Mapping[AnyConv, Sequence[str]], traced: Trace | None
) -> dict[str, str]:
    """Return, by name, why convolutions cannot be replaced: the reasons known without measuring."""
    holders = _modules_by_parameter(model)
    reasons: dict[str, str] = {}
    for conv, names in names_of.items():
        name = names[0]
        reason = why_inside_wrapper(model, name) or why_not_replaceable(conv)
        if reason is None and len(holders[id(conv.weight)]) > 1:
            reason = f"{' and '.join(holders[id(conv.weight)])} share its weight"
        if reason is None and traced is not None and name not in traced.calls:
            reason = NOT_CALLED
        if reason is not None:
            reasons[name] = reason
    return reasons


def _measure(model: nn.Module, convs: Mapping[str, AnyConv], inputs: InputSpec | None) -> Measured:
    """Measure a network that is not library code, or say why it cannot be measured."""
    from .measure import measure  # not needed for a library's network
    from .probing import CannotMeasureError

    if not convs:
        return Measured()
    if inputs is None:
        reason = f"no input size is known; give input_size ({OTHER_INPUTS})"
    elif not _has_values(model):
        reason = "it has parameters without values, on the meta device or lazy"
    else:
        try:
            return measure(model, cast(Mapping[str, Conv], convs), inputs)
        except CannotMeasureError as error:
            reason = str(error)
    return Measured(not_measured=reason)


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


def _has_values(model: nn.Module) -> bool:
    """True if all parameters have values: none is on the meta device or of a lazy layer."""
    return not any(parameter.is_meta or is_lazy(parameter) for parameter in model.parameters())


def _try_trace(
    model: nn.Module, inputs: InputSpec | None, *, is_users_code: bool
) -> tuple[Trace | None, InputSpec | None, str | None]:
    """Trace the model on one image or, if it does not take one image, on the batch as given.

    Library code runs on meta first. The user's code runs with its values, unless it has none.

    Returns:
        The trace, the inputs with which the model runs, and what the MACs lack. If the model does
        not run: None, the inputs as given, and the reason.
    """
    if inputs is None:
        return None, None, f"no input size is known; give input_size ({OTHER_INPUTS}){NOT_COMPARED}"
    if any(map(is_lazy, model.parameters())):
        return None, inputs, "the model has lazy layers; run it once"
    has_values = _has_values(model)
    is_too_large = pixel_count(inputs) > MAX_PIXELS
    tries_on_meta: list[bool] = []
    if not is_users_code or not has_values or is_too_large:
        tries_on_meta.append(True)
    if has_values and not is_too_large:
        tries_on_meta.append(False)
    dims = _dims(model)
    problem = ""
    for candidate in dict.fromkeys((one_image(inputs, dims), inputs)):
        for on_meta in tries_on_meta:
            try:
                traced, suitable = _best_trace(model, candidate, on_meta=on_meta)
                note = None
                if is_users_code and traced.uncounted:
                    note = f"nothing was counted in {short_list(traced.uncounted)}"
                return traced, suitable, note
            except Exception as error:  # any model code may run; the model can still be converted
                problem = one_line(error)[:200]
    input_size = as_image_size(inputs, dims)
    if input_size is None:
        return None, inputs, f"the model does not run at {inputs_text(inputs)}: {problem}"
    where = size_text(input_size)
    return None, inputs, f"the model does not run at {where}: {problem}; {OTHER_INPUTS}"


def _best_trace(model: nn.Module, inputs: InputSpec, *, on_meta: bool) -> tuple[Trace, InputSpec]:
    """Trace the model on normal values, or from 0 to 1 if more outputs are then finite."""
    traced = trace(model, inputs, on_meta=on_meta)
    others = in_unit_range(inputs)
    if traced.finite < 1 and others != inputs:
        with contextlib.suppress(Exception):
            traced_on_others = trace(model, others, on_meta=on_meta)
            if traced_on_others.finite > traced.finite:
                traced, inputs = traced_on_others, others
    return traced, inputs


def _output_strides(traced: Trace | None, inputs: InputSpec | None) -> dict[str, OutputStride]:
    """Return, by name, the output stride of each convolution whose output has all image axes."""
    if traced is None or inputs is None:
        return {}
    strides: dict[str, OutputStride] = {}
    for name, calls in traced.calls.items():
        first_size = calls.output_size
        image_sides = sides_of_image(inputs, len(first_size))
        if image_sides is not None and min(first_size) > 0:
            strides[name] = output_stride(image_sides, first_size)
    return strides


def parameter_count(model: nn.Module) -> int:
    """Count the parameters, except those of lazy layers, which have no size yet."""
    return sum([parameter.numel() for parameter in model.parameters() if not is_lazy(parameter)])


def _site(
    conv: AnyConv,
    names: Sequence[str],
    calls: Calls | None,
    *,
    stage: str | None,
    stem: bool,
    why_attributes_are_needed: str | None,
) -> ConvSite:
    """Make the record of one convolution; `calls` is None without a trace."""
    settings = settings_of(conv)
    return ConvSite(
        **asdict(settings),
        names=tuple(names),
        type=type(conv).__name__,
        kind=_kind(settings),
        stage=stage,
        stem=stem,
        missing_members=_missing_members(conv),
        why_attributes_are_needed=why_attributes_are_needed,
        input_extent=None if calls is None else calls.input_extent,
        output_positions=None if calls is None else calls.output_positions,
        frozen=_is_frozen(conv),
    )


def _missing_members(conv: AnyConv) -> tuple[str, ...]:
    """Return the public members of a user's own class that a DCLS layer does not have.

    Attributes of the object itself are carried over.
    """
    own_class = type(conv)
    if own_class.__module__.startswith(LIBRARIES):
        return ()
    layer_class = DCLS_LAYERS[dims_of(conv)]
    members = [name for name in dir(own_class) if not name.startswith("_")]
    return tuple(name for name in members if not hasattr(layer_class, name))


def _is_frozen(conv: AnyConv) -> bool:
    """True if the weight is not trained, nor parameters that compute it, as in weight norm."""
    for name, parameter in conv.named_parameters():
        if name != "bias" and parameter.requires_grad:
            return False
    return True


def _kind(settings: ConvSettings) -> str:
    if settings.groups == 1:
        return "dense"
    if settings.groups == settings.in_channels:
        return "depthwise"
    return "grouped"
