"""Walk a model once: its convolutions as plain values, the stage of each, and what it costs as it is."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from .budget import conv_macs
from .errors import PlanError, one_line

CONV_CLASSES: dict[int, type[_ConvNd]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
KINDS = ("depthwise", "grouped", "dense")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvSite:
    """One convolution object of the model, as found before conversion. Axes in the order of tensor.shape."""

    names: tuple[str, ...]  # every qualified name of the object, the first is canonical
    type: str  # class name
    kind: str  # one of KINDS
    stage: str | None  # "stages.2"; None where the model has no stages, or outside them
    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str
    bias: bool
    output_size: tuple[int, ...] | None  # of the first call, at the stated input size; None where not known
    input_extent: tuple[int, ...] | None  # smallest spatial input of any call; None where not known
    output_positions: int | None  # spatial positions of all calls for one image; None where not known

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dims(self) -> int:
        return len(self.kernel_size)

    @property
    def weights(self) -> int:
        """Weights of the dense kernel."""
        return self.out_channels * self.in_channels // self.groups * functools.reduce(int.__mul__, self.kernel_size)

    @property
    def macs(self) -> int | None:
        """Multiply-accumulates for one image."""
        if self.output_positions is None:
            return None
        return conv_macs(self.output_positions, self.out_channels, self.in_channels // self.groups, self.kernel_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A convolution that stays as it is, and why."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConvs:
    """All convolutions of a model, and what the model costs before conversion."""

    sites: tuple[ConvSite, ...]
    skipped: tuple[Skipped, ...]
    params: int  # every parameter once
    macs: int | None  # for one image at input_size; None where the forward pass could not be traced
    input_size: tuple[int, ...] | None
    macs_note: str | None  # why macs is None
    stages_from: str  # how the stages were found

    def __iter__(self) -> Iterator[tuple[ConvSite, ...] | tuple[Skipped, ...]]:
        """`sites, skipped = find_convs(...)`."""
        yield self.sites
        yield self.skipped


@dataclass(slots=True)
class _Calls:
    """What a convolution saw in the meta forward."""

    output_size: tuple[int, ...] | None = None
    input_extent: tuple[int, ...] | None = None
    output_positions: int = 0


def find_convs(model: nn.Module, input_size: Sequence[int] | None = None) -> ModelConvs:
    """Every convolution object of `model`, once, under all its names.

    Args:
        model: Left as it is. Its weights may be on any device, meta included.
        input_size: (channels, *spatial), or spatial alone for 3 channels, of one input; without it, the size that a
            timm model states. One forward pass on the meta device gives output sizes and MACs; where the model cannot
            be run so, they are None.

    Raises:
        PlanError: `input_size` is not two to four positive integers.
    """
    size = _input_size(model, input_size)
    names_of: dict[_ConvNd, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _ConvNd):
            names_of.setdefault(module, []).append(name)
    stage_of, stages_from = stage_finder(model)
    calls, macs, note = _trace(model, size, names_of)
    shared = _shared_weights(model)
    sites: list[ConvSite] = []
    skipped: list[Skipped] = []
    for module, names in names_of.items():
        reason = _cannot_convert(module, shared)
        if reason is not None:
            skipped.append(Skipped(name=names[0], type=type(module).__name__, reason=reason))
        else:
            known = calls.get(module, _Calls()) if macs is not None else None
            sites.append(_site(module, tuple(names), stage_of(names[0]), known))
    return ModelConvs(
        sites=tuple(sites),
        skipped=tuple(skipped),
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=macs,
        input_size=size,
        macs_note=note,
        stages_from=stages_from,
    )


def _site(conv: _ConvNd, names: tuple[str, ...], stage: str | None, calls: _Calls | None) -> ConvSite:
    depthwise = conv.groups == conv.in_channels and conv.groups > 1
    return ConvSite(
        names=names,
        type=type(conv).__name__,
        kind="depthwise" if depthwise else "grouped" if conv.groups > 1 else "dense",
        stage=stage,
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        groups=conv.groups,
        kernel_size=tuple(conv.kernel_size),
        stride=tuple(conv.stride),
        padding=conv.padding if isinstance(conv.padding, str) else tuple(conv.padding),
        dilation=tuple(conv.dilation),
        padding_mode=conv.padding_mode,
        bias=conv.bias is not None,
        output_size=calls.output_size if calls else None,
        input_extent=calls.input_extent if calls else None,
        output_positions=calls.output_positions if calls else None,
    )


def _cannot_convert(conv: _ConvNd, shared: Mapping[int, str]) -> str | None:
    """Why this object cannot be replaced, whatever the rules say; None where it can."""
    kind = type(conv).__name__
    if isinstance(conv, _ConvTransposeNd):
        return "transposed convolution"
    if parametrize.is_parametrized(conv):
        return f"its {', '.join(conv.parametrizations)} is parametrised (torch.nn.utils.parametrize)"  # type: ignore[arg-type]
    if set(conv._parameters) != {"weight", "bias"}:
        return f"its weight is computed from other parameters ({', '.join(sorted(conv._parameters))})"
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return "lazy convolution that has not seen an input yet"
    base = next((base for base in CONV_CLASSES.values() if isinstance(conv, base)), None)
    if base is None or any(
        getattr(type(conv), method) is not getattr(base, method) for method in ("forward", "_conv_forward", "__call__")
    ):
        return f"{kind} has a forward of its own that is not known here"
    if conv._modules or conv._buffers:
        return f"{kind} holds {', '.join([*conv._modules, *conv._buffers])}, which would be lost"
    if id(conv.weight) in shared:
        return f"its weight is shared with {shared[id(conv.weight)]}"
    return None


def _shared_weights(model: nn.Module) -> dict[int, str]:
    """id of each parameter that several modules hold -> the names of those modules."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    return {key: " and ".join(names) for key, names in holders.items() if len(names) > 1}


def _input_size(model: nn.Module, given: Sequence[int] | None) -> tuple[int, ...] | None:
    if given is None:
        stated = getattr(model, "pretrained_cfg", None) or {}
        given = stated.get("input_size") if isinstance(stated, Mapping) else None
        channels = getattr(model, "_model_args", {}).get("in_chans")  # what timm was asked for; its config says 3 still
        return (channels or given[0], *given[1:]) if given else None
    if not 2 <= len(given) <= 4 or any(not isinstance(size, int) or size < 1 for size in given):
        raise PlanError(f"input size {given!r} must be channels and spatial sizes, such as (3, 224, 224)")
    return (3, *given) if len(given) == 2 else tuple(given)


def _trace(
    model: nn.Module, input_size: tuple[int, ...] | None, convs: Iterable[nn.Module]
) -> tuple[dict[nn.Module, _Calls], int | None, str | None]:
    """Run one image through on the meta device: what each conv saw, the MACs of all, and why there are none."""
    if input_size is None:
        return {}, None, "no input size is known; state one"
    calls: dict[nn.Module, _Calls] = {}

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        seen = calls.setdefault(module, _Calls())
        spatial = tuple(output.shape[2:])
        entering = tuple(inputs[0].shape[2:])
        seen.output_size = seen.output_size or spatial
        seen.input_extent = tuple(map(min, seen.input_extent or entering, entering))
        seen.output_positions += functools.reduce(int.__mul__, spatial, output.shape[0])

    handles = [module.register_forward_hook(record) for module in convs]
    try:
        return calls, sum(count_flops(model, input_size)[""].values()) // 2, None
    except Exception as error:  # any model code may run here, and a model that cannot be traced can still be converted
        return {}, None, f"the model does not run on the meta device at {input_size}: {one_line(error)[:200]}"
    finally:
        for handle in handles:
            handle.remove()


def count_flops(model: nn.Module, input_size: Sequence[int]) -> dict[str, dict[str, int]]:
    """Floating-point operations of one image through `model`, by torch's flop counter on the meta device.

    Args:
        model: Left as it is, whatever device it is on; run in eval mode.
        input_size: (channels, *spatial).

    Returns:
        Qualified module name ("" for the whole model) -> operator ("convolution", "mm", ...) -> operations, two for a
        multiply-accumulate. What the counter does not know counts nothing.
    """
    from torch.utils.flop_counter import FlopCounterMode

    tensors = dict(_tensor_slots(model))
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    modes = {module: module.training for module in model.modules()}
    hollow: dict[int, torch.Tensor] = {}  # tied tensors stay tied
    stand_ins = {name: hollow.setdefault(id(t), torch.empty_like(t, device="meta")) for name, t in tensors.items()}
    counter = FlopCounterMode(display=False)
    image = torch.empty(1, *input_size, dtype=dtype, device="meta")
    try:
        model.eval()
        with torch.no_grad(), torch.device("meta"), counter:
            torch.func.functional_call(model, stand_ins, (image,), tie_weights=False)
    finally:
        for module, training in modes.items():
            module.training = training
    prefix = type(model).__name__ + "."
    counts = counter.get_flop_counts()
    counts[prefix] = counts.pop("Global", {})
    return {
        path.removeprefix(prefix): {str(operator).rpartition(".")[2]: int(count) for operator, count in found.items()}
        for path, found in counts.items()
    }


def _tensor_slots(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every place that holds a parameter or buffer, once.

    Not `named_parameters(remove_duplicate=False)`: that names the slots of a shared module several times, and
    `functional_call` then restores its own stand-ins into them.
    """
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def stage_finder(model: nn.Module) -> tuple[Callable[[str], str | None], str]:
    """A function from module name to stage name, and where the stages come from.

    timm's models say what their stages are (`group_matcher(coarse=True)`); elsewhere the stage is the module path up
    to its first number: "layer1" for "layer1.0.conv2", "features.3" for "features.3.1.block.0".
    """
    matcher = getattr(model, "group_matcher", None)
    if matcher is not None:
        try:
            patterns = list(_stage_patterns(matcher(coarse=True)))
        except Exception:  # a model's own code; those without a usable matcher have a structure all the same
            patterns = []
        if patterns:
            return functools.partial(_stage_from_patterns, patterns), "timm's group_matcher"
    return _stage_from_path, "module path"


def _stage_patterns(groups: Mapping[str, Any]) -> Iterator[re.Pattern[str]]:
    for name, specs in groups.items():
        if name.startswith("stem"):
            continue
        for spec in [specs] if isinstance(specs, str) else specs:
            pattern, ordinal = (spec, None) if isinstance(spec, str) else spec
            if ordinal is None:  # those with a number are the head, by timm's convention
                yield re.compile(pattern)


def _stage_from_patterns(patterns: Sequence[re.Pattern[str]], name: str) -> str | None:
    for pattern in patterns:
        found = pattern.match(name + ".")
        if found and found.groups():
            return found.group(0).rstrip(".")
    return None


def _stage_from_path(name: str) -> str | None:
    parts = name.split(".")
    for index, part in enumerate(parts[:-1], start=1):
        if part[-1:].isdigit():
            return ".".join(parts[:index])
    return None
