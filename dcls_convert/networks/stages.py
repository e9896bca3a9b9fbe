"""Find the stage of each convolution, from timm's names or from the model's structure.

A stage is a part of one network that works at one resolution.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from ..geometry import size_text
from ..text import short_list
from .whole_networks import paths_above

# The deepest stems have this many spatial convolutions. A "stem" with more is a backbone, such as
# the ResNet in front of a ViT.
MAX_STEM_CONVS = 8
MAX_STRIDES_OF_A_STAGE = 2  # output strides inside a stage: its own, and that of its input

OutputStride = tuple[int, ...]  # input cells per output cell, on each axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a model's convolutions."""

    found_by: str  # how they were found, in words
    stage_of: Mapping[str, str | None]  # by the name of a convolution; None outside all stages
    stem: Set[str]  # names of the convolutions in the stem


def find_stages(
    model: nn.Module,
    names: Sequence[str],
    strides: Mapping[str, OutputStride],
    spatial: Set[str],
    networks: Set[str],
) -> Stages:
    """Find the stages of a model.

    Args:
        model: The model, before conversion.
        names: Names of its convolutions.
        strides: Output stride of each convolution, by its name; empty if the model is not traced.
        spatial: Names of the convolutions with a kernel larger than 1. Only these name stages: a
            1x1 before a strided convolution still works at the previous resolution.
        networks: Paths of the whole networks inside of the model. Each has the stages that it has
            alone, with its path before their names.
    """
    networks = {path for path in networks if not _is_part_of_timm_model(model, path)}
    if not networks:
        return _stages_of_network(model, names, strides, spatial)
    found_by: dict[str, None] = {}  # in order, each once
    stage_of: dict[str, str | None] = {}
    stem: set[str] = set()
    names_in = _by_network(names, networks)
    for network, full_names in names_in.items():
        inside = {name: name.removeprefix(f"{network}.") for name in full_names}
        alone = _stages_of_network(
            model.get_submodule(network),
            list(inside.values()),
            {inside[name]: strides[name] for name in full_names if name in strides},
            {inside[name] for name in full_names if name in spatial},
        )
        found_by[alone.found_by] = None
        for name, name_alone in inside.items():
            stage = alone.stage_of.get(name_alone)
            if stage is not None and network:
                stage = f"{network}.{stage}"
            stage_of[name] = stage
            if name_alone in alone.stem:
                stem.add(name)
    each = short_list(network for network in names_in if network)
    return Stages(
        found_by=f"{' and '.join(found_by)} in each of {each}", stage_of=stage_of, stem=stem
    )


def _is_part_of_timm_model(model: nn.Module, path: str) -> bool:
    """True inside a model of timm, which is one network whatever its parts begin with."""
    holders = ("", *paths_above(path))
    return any(hasattr(model.get_submodule(holder), "group_matcher") for holder in holders)


def _by_network(names: Sequence[str], networks: Set[str]) -> dict[str, list[str]]:
    """Return the names in each innermost network; in "" those outside of all networks."""
    names_in: dict[str, list[str]] = {}
    for name in names:
        network = ""
        for path in paths_above(name):
            if path in networks:
                network = path
        names_in.setdefault(network, []).append(name)
    return names_in


def _stages_of_network(
    model: nn.Module, names: Sequence[str], strides: Mapping[str, OutputStride], spatial: Set[str]
) -> Stages:
    """Find the stages of one network; see `find_stages`."""
    stage_patterns, stem_patterns = _timm_patterns(model)
    stem = {name for name in names if _matches_any(stem_patterns, name)}
    if len(stem & spatial) > MAX_STEM_CONVS:
        stem = set()  # it is a backbone
    stage_of: dict[str, str | None] = {}
    if stage_patterns:
        found_by = "timm's group_matcher"
        for name in names:
            stage_of[name] = _stage_by_timm(stage_patterns, name)
    elif strides:
        found_by = "output stride and module path"
        outside = {name: stride for name, stride in strides.items() if name not in stem}
        stage_of.update(_stages_from_structure(outside, spatial))
    else:
        found_by = "module path"
        common_depth = _common_depth(spatial)
        for name in names:
            stage_of[name] = _stage_by_path(common_depth, name)
    return Stages(found_by=found_by, stage_of=stage_of, stem=stem)


def _matches_any(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(pattern.match(name + ".") for pattern in patterns)


def _stage_by_timm(stage_patterns: Sequence[re.Pattern[str]], name: str) -> str | None:
    for pattern in stage_patterns:
        match = pattern.match(name + ".")
        if match and match.groups():
            return match.group(0).rstrip(".")
    return None


def _stage_by_path(common_depth: int, name: str) -> str | None:
    """Return the path of a module up to its first part that ends in a digit.

    The first `common_depth` parts hold all convolutions. A number there is a version ("net3") and
    is skipped, unless it numbers modules ("features.0"). If there is no other number, the path up
    to the first version is returned:

        common_depth 0: "layer1.0.conv1"       -> "layer1"
        common_depth 1: "net3.features.4.conv" -> "net3.features.4"
        common_depth 1: "net3.conv"            -> "net3"
    """
    parts = name.split(".")
    path_to_version: str | None = None
    for length, part in enumerate(parts[:-1], start=1):
        if not part[-1:].isdigit():
            continue
        path = ".".join(parts[:length])
        numbers_modules = part.isdigit() or parts[length].isdigit()
        if numbers_modules or length > common_depth:
            return path
        if path_to_version is None:
            path_to_version = path
    return path_to_version


def output_stride(input_size: Sequence[int], output_size: Sequence[int]) -> OutputStride:
    """Return the input cells per output cell on each axis, rounded to a power of two.

    Convolutions without padding lose cells at the borders: the ratio may be 8.5 for a stride of 8.
    """
    strides: list[int] = []
    for input_side, output_side in zip(input_size, output_size, strict=True):
        exponent = round(math.log2(input_side / output_side))
        strides.append(2 ** max(0, exponent))
    return tuple(strides)


def _common_depth(names: Iterable[str]) -> int:
    """Return the depth of the lowest module that holds all of these modules; 0 for the model."""
    parents = [name.split(".")[:-1] for name in names]
    depth = 0
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        depth += 1
    return depth


def _timm_patterns(model: nn.Module) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Return patterns of the stages and of the stem, from timm's `group_matcher`.

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


def _stages_from_structure(
    strides: Mapping[str, OutputStride], spatial: Set[str]
) -> dict[str, str]:
    """Map each convolution to its stage.

    A stage is a module with a number in its name ("layer1"). Where a container only numbers its
    children ("features.0"), those with the same output stride are a stage.
    """
    stages: dict[str, str] = {}
    # (container, output stride) -> the convolutions in its numbered children.
    convs_of: dict[tuple[str, OutputStride], list[str]] = {}
    versions = _versions(strides)
    for name, stride in strides.items():
        container, numbers_children = _container(name, versions)
        if container is None:
            continue
        if numbers_children:
            convs_of.setdefault((container, stride), []).append(name)
        else:
            stages[name] = container
    children_of = _children_with_spatial_convs(convs_of, spatial)
    stride_counts: Counter[str] = Counter()  # child -> number of its output strides
    for children in children_of.values():
        stride_counts.update(children)
    for (container, stride), children in children_of.items():
        names = convs_of[container, stride]
        stage = _naming_child(children, stride_counts, names)
        if stage is None:
            stage = _stage_named_by_stride(container, stride)
        for name in names:
            stages[name] = stage
    return stages


def _children_with_spatial_convs(
    convs_of: Mapping[tuple[str, OutputStride], Sequence[str]], spatial: Set[str]
) -> dict[tuple[str, OutputStride], set[str]]:
    """Return the children with spatial convolutions of each container and output stride.

    For example ("features", (8, 8)) -> {"features.3"}.
    """
    children_of: dict[tuple[str, OutputStride], set[str]] = {}
    for (container, stride), names in convs_of.items():
        depth_of_child = container.count(".") + 2 if container else 1
        for name in names:
            if name in spatial:
                child = ".".join(name.split(".")[:depth_of_child])
                children_of.setdefault((container, stride), set()).add(child)
    return children_of


def _naming_child(
    children: Set[str], stride_counts: Mapping[str, int], convs: Sequence[str]
) -> str | None:
    """Return the child that gives a stage its name; None if the stage is named by its stride.

    This child alone has spatial convolutions of the stage's stride. It has none of another stride,
    and is not itself one of the convolutions.
    """
    if len(children) != 1:
        return None
    (child,) = children
    if stride_counts[child] > 1 or child in convs:
        return None
    return child


def _stage_named_by_stride(container: str, stride: OutputStride) -> str:
    """Return the name of a stage that is not a single module: "features/stride8"."""
    if len(set(stride)) == 1:
        stride = stride[:1]
    return f"{container}/stride{size_text(stride)}".lstrip("/")


def _versions(strides: Mapping[str, OutputStride]) -> set[str]:
    """Return the modules whose number is a version ("convnextv2").

    They have convolutions of three or more output strides, and do not belong to a series of
    numbered modules.
    """
    strides_inside: dict[str, set[OutputStride]] = {}
    for name, stride in strides.items():
        for path in paths_above(name):
            strides_inside.setdefault(path, set()).add(stride)
    # "net.layer12" -> "net.layer#", which is the same for all modules of a series.
    series_of = {path: re.sub(r"\d+(?=[^.]*$)", "#", path) for path in strides_inside}
    series_sizes = Counter(series_of.values())
    versions: set[str] = set()
    for path, inner_strides in strides_inside.items():
        spans_stages = len(inner_strides) > MAX_STRIDES_OF_A_STAGE
        if spans_stages and series_sizes[series_of[path]] == 1:
            versions.add(path)
    return versions


def _container(name: str, versions: Set[str]) -> tuple[str | None, bool]:
    """Return the outermost module that has a number in its name, or that numbers its children.

    The second value is True if it numbers its children:

        "layer1.0.conv1"            -> "layer1", False
        "features.3.conv"           -> "features", True
        "convnextv2.stages.1.conv"  -> "convnextv2.stages", True  (if `versions` has "convnextv2")
        "conv1"                     -> None, False
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        path = ".".join(parts[: index + 1])
        if path in versions:
            continue
        if part.isdigit():
            return ".".join(parts[:index]), True
        is_module = index + 1 < len(parts)
        if is_module and any(character.isdigit() for character in part):
            return path, False
    return None, False
