"""The networks that a comparison trains: the original, and one for each way of converting it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..choosing.results import RequestedSize
from ..conversion.conversion import convert_network_
from ..conversion.fold import fold_to_dense_
from ..conversion.loaded import LoadedNetwork
from ..conversion.request import ConversionRequest
from ..conversion.resolved import resolve
from ..geometry import size_text
from ..layers.position_statistics import outside_share
from ..networks.position_parameters import position_parameters
from ..networks.source import LIBRARY_KINDS
from ..options import AUTO, DEFAULT_BUDGET, ERROR_SCOPE, EXACT, PlanOptions, Positions
from ..planning.plan import ConversionPlan
from ..progress import Note, ignore_messages

ORIGINAL_LABEL = "as it is"
# frozen: converted, but positions are not trained.
# dense: not converted; has plain convolutions with kernels of the window's size ("large kernels").
ArmKind = Literal["original", "converted", "frozen", "dense"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One of the networks that a comparison trains."""

    kind: ArmKind = "original"
    size: RequestedSize | None = None  # of the window; None: chosen by the rules
    positions: Positions = "normal"  # initial positions of a random start

    @property
    def label(self) -> str:
        """ "as it is", "17x17", "+4", "17x17 uniform", "17x17 frozen", or "auto" without a size."""
        if self.kind == "original":
            return ORIGINAL_LABEL
        if self.size is None:
            words = ["auto"]
        elif isinstance(self.size, int):
            words = [size_text((self.size, self.size))]
        elif isinstance(self.size, str):
            words = [self.size]
        else:
            words = [size_text(self.size)]
        if self.kind != "converted":
            words.append(self.kind)
        if self.positions != "normal":
            words.append(self.positions)
        return " ".join(words)

    @property
    def file_name(self) -> str:
        """The label with hyphens instead of spaces."""
        return self.label.replace(" ", "-")


def make_arms(
    sizes: Sequence[RequestedSize | None], starts: Sequence[Positions], *, ablate: bool = False
) -> list[Arm]:
    """Return the arms: the original, then every size with all initial positions in `starts`.

    With `ablate`, each converted network also gets an arm with frozen positions, and each size an
    arm with large kernels.
    """
    arms = [Arm()]
    for size in sizes:
        for start in starts:
            arms.append(Arm(kind="converted", size=size, positions=start))
        if ablate:
            for start in starts:
                arms.append(Arm(kind="frozen", size=size, positions=start))
            arms.append(Arm(kind="dense", size=size))
    return arms


def check_arms(request: ConversionRequest, arms: Sequence[Arm]) -> None:
    """Plan every arm from names and shapes, to find mistakes before images are read.

    Raises:
        DclsConvertError: A size does not fit the network, or the weights are for layers of the
            authors' package.
    """
    LoadedNetwork(request).refuse_authors_weights()
    options = request.options
    if options.scope == ERROR_SCOPE:
        options = replace(options, scope="model")
    untrained = replace(request.without_images(), options=options, pretrained=False, weights=None)
    loaded = LoadedNetwork(untrained)
    if loaded.source is None or loaded.source.kind not in LIBRARY_KINDS:
        return  # the user's own code, which may need the number of classes
    for size in dict.fromkeys(arm.size for arm in arms if arm.kind != "original"):
        resolve(loaded, replace(options, dilated_size=size or AUTO))


@dataclass(kw_only=True, slots=True)
class ArmNetwork:
    """The network of an arm, before it is trained."""

    model: nn.Module
    plan: ConversionPlan | None = None  # None if it has no DCLS layers
    macs: int | None
    initial_positions: list[Tensor] = field(init=False)  # copies of the tensors: (A, *C, E)

    def __post_init__(self) -> None:
        parameters = position_parameters(self.model, "positions")
        self.initial_positions = [parameter.tensor.detach().clone() for parameter in parameters]

    def position_shift(self, trained: nn.Module) -> "PositionShift | None":
        """Return how far positions moved in training; None without DCLS layers.

        Args:
            trained: The same network after training, on the CPU.
        """
        if self.plan is None:
            return None
        layer_plans = {layer.name: layer for layer in self.plan.layers}
        # For each positions tensor:
        distances = []  # how far each element moved, in cells: (elements,)
        counts = []  # number of coordinates
        outside = []  # share of elements outside the old kernel
        outside_before = []  # the same before training
        parameters = position_parameters(trained, "positions")
        for before, parameter in zip(self.initial_positions, parameters, strict=True):
            after = parameter.tensor.detach().double()
            distances.append((after - before.double()).square().sum(0).sqrt().flatten())
            name, layer = next(iter(parameter.layers.items()))
            extents = layer_plans[name].extents
            old_sides = [extents[axis] for axis in layer.learnt_axes]
            counts.append(after.numel())
            outside.append(outside_share(after, old_sides))
            outside_before.append(outside_share(before, old_sides))
        return PositionShift(
            distance=float(torch.cat(distances).mean()),
            outside=_weighted_mean(outside, counts),
            outside_before=_weighted_mean(outside_before, counts),
        )


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    products = torch.tensor(weights, dtype=torch.float64) * torch.tensor(
        values, dtype=torch.float64
    )
    return float(products.sum() / sum(weights))


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionShift:
    """How far the positions of a network moved in training."""

    distance: float  # cells; mean over all elements
    outside: float  # share of elements outside the old kernel after training
    outside_before: float  # the same before training


def make_network(
    request: ConversionRequest, arm: Arm, *, note: Note = ignore_messages
) -> ArmNetwork:
    """Build the network of an arm.

    Layers that are not converted start with the same weights in every arm; random ones depend only
    on the request's seed.
    """
    load = functools.partial(LoadedNetwork, note=note)
    if arm.kind == "original":
        loaded = load(request)
        return ArmNetwork(model=loaded.network, macs=loaded.convs.macs)
    options = replace(request.options, dilated_size=arm.size or AUTO)
    if arm.kind == "dense":
        return _make_large_kernel_network(load(_large_kernel_request(request, options)))
    loaded = load(replace(request, positions=arm.positions, options=options))
    conversion = convert_network_(loaded, resolve(loaded))
    if arm.kind == "frozen":
        for parameter in position_parameters(conversion.model):
            parameter.tensor.requires_grad_(False)
    report = conversion.report
    return ArmNetwork(model=conversion.model, plan=report.plan, macs=report.macs.after)


def _large_kernel_request(request: ConversionRequest, options: PlanOptions) -> ConversionRequest:
    """Return the request for a network with one element for every cell of the old kernels.

    When it is folded, its kernels are the old ones, padded to larger windows.
    """
    options = replace(
        options, kernel_count=EXACT, scope="auto", budget=DEFAULT_BUDGET, interpolation=None
    )
    return replace(request.without_images(), init="exact", options=options)


def _make_large_kernel_network(loaded: LoadedNetwork) -> ArmNetwork:
    """Build a network of plain convolutions with a weight in every cell of the window.

    Args:
        loaded: Loaded from a `_large_kernel_request`, so that the kernels start as the old ones,
            padded with zeros.
    """
    conversion = convert_network_(loaded, resolve(loaded))
    fold_to_dense_(conversion.model)
    return ArmNetwork(model=conversion.model, macs=conversion.report.macs.after)
