"""Find the stage of each convolution, from timm's names or from the model's structure.

A stage is a part of one network that works at one resolution. Without timm's names, it is the
outermost module with a number in its name, or all these modules of one output stride together:

    convolution            output stride    stage
    stem.conv              2                none: no number in its path
    layer1.0.conv          4                layer1
    features.3.conv        8                features/stride8
    features.4.conv        8                features/stride8
    features.5.conv        16               features.5, the only child with this stride

A number can also be the version of a whole network, which has many strides: netv2.blocks.0.conv is
in netv2.blocks.0 or netv2.blocks/stride4, not in a stage netv2.

Without a trace, output strides are not known: features.3 and features.4 are two stages.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import nn

from ..geometry import size_text
from ..text import short_list
from .whole_networks import paths_above

# The deepest stems have this many spatial convolutions. A "stem" with more is a backbone, such as
# the ResNet in front of a ViT.
MAX_STEM_CONVS = 8
MAX_STRIDES_OF_A_STAGE = 2  # output strides inside a stage: its own, and its input's

OutputStride = tuple[int, ...]  # input cells per output cell, on each axis


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvPlace:
    """The place and the resolution of a convolution, from which its stage is found."""

    name: str
    stride: OutputStride | None  # None without a trace, or if the output has other axes
    # True for a kernel larger than 1. Only these convolutions name stages: a 1x1 convolution before
    # a strided convolution still works at the previous resolution.
    is_spatial: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a model's convolutions."""

    found_by: str  # how the stages were found, in words
    # Name of the stage, by the name of a convolution. Convolutions outside all stages are absent.
    stage_of: Mapping[str, str]
    stem: Set[str]  # names of the convolutions in the stem


def find_stages(model: nn.Module, convs: Sequence[ConvPlace], networks: Set[str]) -> Stages:
    """Find the stages of a model.

    Args:
        model: The model, before conversion.
        convs: Its convolutions.
        networks: Paths of the whole networks inside the model. The stages of each are found as if
            it were alone; its path is put before their names.
    """
    if hasattr(model, "group_matcher"):  # timm knows this model as a single network
        networks = frozenset()
    if not networks:
        return _stages_of_network(model, convs)
    found_by: dict[str, None] = {}  # in order, each once
    stage_of: dict[str, str] = {}
    stem: set[str] = set()
    convs_in = _by_network(convs, networks)
    for network, inner_convs in convs_in.items():
        prefix = f"{network}." if network else ""
        alone = _stages_of_network(
            model.get_submodule(network),
            [replace(conv, name=conv.name.removeprefix(prefix)) for conv in inner_convs],
        )
        found_by[alone.found_by] = None
        for name, stage in alone.stage_of.items():
            stage_of[prefix + name] = prefix + stage
        stem.update(prefix + name for name in alone.stem)
    each = short_list(network for network in convs_in if network)
    return Stages(
        found_by=f"{' and '.join(found_by)} in each of {each}", stage_of=stage_of, stem=stem
    )


def _by_network(convs: Sequence[ConvPlace], networks: Set[str]) -> dict[str, list[ConvPlace]]:
    """Return the convolutions by their innermost network: "" for those outside all networks."""
    convs_in: dict[str, list[ConvPlace]] = {}
    for conv in convs:
        network = ""
        for path in paths_above(conv.name):
            if path in networks:
                network = path
        convs_in.setdefault(network, []).append(conv)
    return convs_in


def _stages_of_network(model: nn.Module, convs: Sequence[ConvPlace]) -> Stages:
    """Find the stages of one network; see `find_stages`."""
    stage_patterns, stem_patterns = _timm_patterns(model)
    stem: set[str] = set()
    spatial_in_stem = 0
    for conv in convs:
        if any(pattern.match(f"{conv.name}.") for pattern in stem_patterns):
            stem.add(conv.name)
            spatial_in_stem += conv.is_spatial
    if spatial_in_stem > MAX_STEM_CONVS:
        stem = set()  # this "stem" is a backbone
    if stage_patterns:
        found_by = "timm's group_matcher"
        stage_of = _stages_by_timm(stage_patterns, convs)
    else:
        outside = [conv for conv in convs if conv.name not in stem]
        found_by = "module path"
        if any(conv.stride is not None for conv in convs):
            found_by = "output stride and module path"
            outside = [conv for conv in outside if conv.stride is not None]
        stage_of = _stages_from_structure(outside)
    return Stages(found_by=found_by, stage_of=stage_of, stem=stem)


def _stages_by_timm(
    stage_patterns: Sequence[re.Pattern[str]], convs: Sequence[ConvPlace]
) -> dict[str, str]:
    """Map each convolution to its stage: the text that the first pattern with groups matches."""
    stage_of: dict[str, str] = {}
    for conv in convs:
        for pattern in stage_patterns:
            match = pattern.match(f"{conv.name}.")
            if match and match.groups():
                stage_of[conv.name] = match.group(0).rstrip(".")
                break
    return stage_of


def output_stride(input_size: Sequence[int], output_size: Sequence[int]) -> OutputStride:
    """Return the input cells per output cell on each axis, rounded to a power of two.

    Convolutions without padding lose cells at the borders: the ratio may be 8.5 for a stride of 8.
    """
    strides: list[int] = []
    for input_side, output_side in zip(input_size, output_size, strict=True):
        exponent = round(math.log2(input_side / output_side))
        strides.append(2 ** max(0, exponent))
    return tuple(strides)


def _timm_patterns(model: nn.Module) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Return the patterns of stages and the patterns of the stem, from timm's `group_matcher`.

    If coarse and fine groups are equal, there are no stage patterns: the groups are single blocks.
    """
    stage_patterns: list[re.Pattern[str]] = []
    stem_patterns: list[re.Pattern[str]] = []
    try:
        coarse = model.group_matcher(coarse=True)  # type: ignore[operator]
        fine = model.group_matcher(coarse=False)  # type: ignore[operator]
        for group, specs in coarse.items():
            if isinstance(specs, str):
                specs = [specs]
            for spec in specs:
                if isinstance(spec, str):
                    pattern = spec
                else:
                    pattern, number = spec
                    if number is not None:  # in timm's convention, a number marks the head
                        continue
                patterns = stem_patterns if group.startswith("stem") else stage_patterns
                patterns.append(re.compile(pattern))
    except Exception:  # the model's own code; without a usable matcher, the structure decides
        return [], []
    if coarse == fine:
        return [], stem_patterns
    return stage_patterns, stem_patterns


def _stages_from_structure(convs: Sequence[ConvPlace]) -> dict[str, str]:
    """Map convolutions to their stages; see the top of this file."""
    versions = _versions(convs)
    stage_of: dict[str, str] = {}
    child_of: dict[str, str] = {}  # by the name of a convolution
    # (container, output stride) -> the convolutions in its numbered children.
    convs_of: dict[tuple[str, OutputStride], list[ConvPlace]] = {}
    strides_in: dict[str, set[OutputStride]] = {}  # child -> strides of its spatial convolutions
    for conv in convs:
        child = _outermost_numbered(conv.name, versions)
        if child is None:
            continue
        container, _, last_part = child.rpartition(".")
        if conv.stride is None or not last_part.isdigit():
            if child != conv.name:
                stage_of[conv.name] = child
            continue
        child_of[conv.name] = child
        convs_of.setdefault((container, conv.stride), []).append(conv)
        if conv.is_spatial:
            strides_in.setdefault(child, set()).add(conv.stride)
    for (container, stride), members in convs_of.items():
        children = {child_of[conv.name] for conv in members if conv.is_spatial}
        if not children:
            continue
        stage = _stage_named_by_stride(container, stride)
        first = min(children)
        # A child that is itself a convolution, or has several strides, gives no stage its name.
        if len(children) == len(strides_in[first]) == 1 and first not in child_of:
            stage = first
        for conv in members:
            stage_of[conv.name] = stage
    return stage_of


def _outermost_numbered(name: str, versions: Set[str]) -> str | None:
    """Return the outermost module with a number in its name, or a convolution that is numbered.

    "layer1.0.conv1"            -> "layer1"
    "features.3"                -> "features.3"
    "convnextv2.stages.1.conv"  -> "convnextv2.stages.1"  (if `versions` has "convnextv2")
    "conv1"                     -> None
    """
    for path in (*paths_above(name), name):
        last_part = path.rpartition(".")[2]
        has_number = any(character.isdigit() for character in last_part)
        if has_number and path not in versions and (path != name or last_part.isdigit()):
            return path
    return None


def _stage_named_by_stride(container: str, stride: OutputStride) -> str:
    """Return the name of a stage that is not a single module: "features/stride8"."""
    if len(set(stride)) == 1:
        stride = stride[:1]
    return f"{container}/stride{size_text(stride)}".lstrip("/")


def _versions(convs: Sequence[ConvPlace]) -> set[str]:
    """Return the modules whose number is a version ("convnextv2"): they are whole networks.

    Such a module has convolutions of three or more output strides, and does not belong to a series
    of numbered modules. Without a trace, each convolution counts as a stride of its own, and a
    name that is only a number, as in a container, is no version.
    """
    strides_inside: dict[str, set[object]] = {}
    for conv in convs:
        for path in paths_above(conv.name):
            if conv.stride is None and path.rpartition(".")[2].isdigit():
                continue
            strides_inside.setdefault(path, set()).add(conv.stride or conv.name)
    # "net.layer12" -> "net.layer#": the same text for all modules of a series.
    series_of = {path: re.sub(r"\d+(?=[^.]*$)", "#", path) for path in strides_inside}
    series_sizes = Counter(series_of.values())
    versions: set[str] = set()
    for path, inner_strides in strides_inside.items():
        spans_stages = len(inner_strides) > MAX_STRIDES_OF_A_STAGE
        if spans_stages and series_sizes[series_of[path]] == 1:
            versions.add(path)
    return versions
