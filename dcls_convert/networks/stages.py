"""The stage of each convolution, as timm names it or the model's structure shows it; each works at one resolution."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, takewhile

from torch import nn

from ..depthwise.geometry import size_text

# The deepest stems have this many spatial convolutions. A "stem" with more is a backbone (hybrids of ResNet and ViT).
MOST_STEM_CONVS = 8
MOST_STRIDES_OF_A_STAGE = 2  # its own, and that of its input

OutputStride = tuple[int, ...]  # input cells for one output cell, per axis


def find_stages(
    model: nn.Module, strides: Mapping[str, OutputStride], spatial: Set[str]
) -> tuple[str, Callable[[str], str | None], Callable[[str], bool]]:
    """How the stages were found, a module's stage, and whether it is in the stem; the latter by its qualified name."""
    # Only `spatial` convolutions name stages: a 1x1 before a strided one still works at the previous resolution.
    blocks, stems = _timm_patterns(model)
    if sum(any(stem.match(name + ".") for stem in stems) for name in spatial) > MOST_STEM_CONVS:
        stems = []

    def in_stem(name: str) -> bool:
        return any(stem.match(name + ".") for stem in stems)

    def stage_by_timm(name: str) -> str | None:
        matches = (block.match(name + ".") for block in blocks)
        return next(
            (match.group(0).rstrip(".") for match in matches if match and match.groups()), None
        )

    if blocks:
        return "timm's group_matcher", stage_by_timm, in_stem
    if strides:
        outside = {name: stride for name, stride in strides.items() if not in_stem(name)}
        stages = _stages_from_structure(outside, spatial)
        return "output stride and module path", stages.get, in_stem
    parent = common_parent(spatial)
    depth = len(parent.split(".")) if parent else 0

    def stage_by_path(name: str) -> str | None:
        """The number of a module that holds all convolutions, and does not count its children, is a version."""
        parts = name.split(".")
        numbered = [index for index, part in enumerate(parts[:-1], start=1) if part[-1:].isdigit()]
        counts = {
            index for index in numbered if parts[index - 1].isdigit() or parts[index].isdigit()
        }
        first = [index for index in numbered if index > depth or index in counts] or numbered
        return ".".join(parts[: next(iter(first), 0)]) or None

    return "module path", stage_by_path, in_stem


def output_stride(input_size: Sequence[int], output_size: Sequence[int]) -> OutputStride:
    """Input cells for one output cell on each axis, rounded to a power of two: borders turn 8 into 8.5."""
    ratios = (entered / left for entered, left in zip(input_size, output_size, strict=True))
    return tuple(2 ** max(0, round(math.log2(ratio))) for ratio in ratios)


def common_parent(names: Iterable[str]) -> str:
    """The lowest module that holds all of these modules."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels))


def _timm_patterns(model: nn.Module) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Patterns of the stages, none where the model names only blocks, and patterns of the stem."""
    blocks: list[re.Pattern[str]] = []
    stems: list[re.Pattern[str]] = []
    try:
        coarse, fine = model.group_matcher(coarse=True), model.group_matcher(coarse=False)  # type: ignore[operator]
        for group, specs in coarse.items():
            for spec in [specs] if isinstance(specs, str) else specs:
                pattern, ordinal = (spec, None) if isinstance(spec, str) else spec
                if ordinal is None:  # in timm's convention, a pattern with a number is for the head
                    (stems if group.startswith("stem") else blocks).append(re.compile(pattern))
    except Exception:  # the model's own code; without a usable matcher, the structure decides
        return [], []
    return ([] if coarse == fine else blocks), stems


def _stages_from_structure(
    strides: Mapping[str, OutputStride], spatial: Set[str]
) -> dict[str, str]:
    """Containers with numbers in their names ("layer1"); where they only count ("features.0"), children by stride."""
    stages: dict[str, str] = {}
    counted: dict[tuple[str, OutputStride], list[str]] = {}
    versions = _versions(strides)
    for name, stride in strides.items():
        container, counts = _container(name, versions)
        if container is not None and counts:
            counted.setdefault((container, stride), []).append(name)
        elif container is not None:
            stages[name] = container
    children: dict[
        tuple[str, OutputStride], set[str]
    ] = {}  # such as "features.3" for ("features", (8, 8))
    for key, names in counted.items():
        depth = key[0].count(".") + 2 if key[0] else 1
        if named := {".".join(name.split(".")[:depth]) for name in names if name in spatial}:
            children[key] = named
    uses = Counter(child for named in children.values() for child in named)
    for (container, stride), named in children.items():
        names, child = counted[container, stride], next(iter(named))
        if len(named) == 1 and uses[child] == 1 and child not in names:
            stage = child
        else:
            stage = f"{container}/stride{size_text(stride if len(set(stride)) > 1 else stride[:1])}".lstrip(
                "/"
            )
        stages |= dict.fromkeys(names, stage)
    return stages


def _versions(strides: Mapping[str, OutputStride]) -> set[str]:
    """Modules whose number is a version ("convnextv2"): of three output strides and more, and not one of a series."""
    inside: dict[str, set[OutputStride]] = {}
    for name, stride in strides.items():
        for path in accumulate(name.split(".")[:-1], "{}.{}".format):
            inside.setdefault(path, set()).add(stride)
    # "net.layer12" -> "net.layer#", the same for all modules of a series
    series = {path: re.sub(r"\d+(?=[^.]*$)", "#", path) for path in inside}
    members = Counter(series.values())
    return {
        path
        for path in inside
        if len(inside[path]) > MOST_STRIDES_OF_A_STAGE and members[series[path]] == 1
    }


def _container(name: str, versions: Set[str]) -> tuple[str | None, bool]:
    """The outermost module with a number in its name, or that counts its children, and whether it is the latter."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if ".".join(parts[: index + 1]) in versions:
            continue
        if part.isdigit():
            return ".".join(parts[:index]), True
        if index + 1 < len(parts) and any(character.isdigit() for character in part):
            return ".".join(parts[: index + 1]), False
    return None, False
