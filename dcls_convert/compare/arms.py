"""The networks that a comparison trains: one as it is, and one for each way in which it is
converted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..depthwise.geometry import size_text
from ..layers.position_statistics import outside_share
from ..networks.positions import position_parameters
from ..options import AUTO, EXACT, Positions
from ..pipeline import Job
from ..planning.plan import ConversionPlan
from ..surgery.fold import fold_to_dense_
from .sweep import Size

AS_IT_IS = "as it is"
ArmKind = Literal["original", "converted", "frozen", "dense"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A network of a comparison."""

    # frozen: positions stay where they start; dense: plain kernels of the window's size
    kind: ArmKind = "original"
    size: Size | None = None  # of the window; None: as the rules state, or as it is
    positions: Positions = "normal"  # where they start, from scratch

    @property
    def label(self) -> str:
        """ "as it is", "17x17", "17x17 uniform", "17x17 frozen"; "auto" where no size is stated."""
        if self.kind == "original":
            return AS_IT_IS
        sides = (self.size, self.size) if isinstance(self.size, int) else self.size
        words = ["auto" if sides is None else size_text(sides)]
        words += [self.kind] * (self.kind != "converted") + [self.positions] * (
            self.positions != "normal"
        )
        return " ".join(words)

    @property
    def file_name(self) -> str:
        return self.label.replace(" ", "-")


def make_arms(
    sizes: Sequence[Size | None], starts: Sequence[Positions], *, ablate: bool = False
) -> list[Arm]:
    """The network as it is; converted to each size, from each start; to ablate, with frozen
    positions and dense too."""
    arms = [Arm()]
    for size in sizes:
        arms += [Arm(kind="converted", size=size, positions=start) for start in starts]
        if ablate:
            arms += [Arm(kind="frozen", size=size, positions=start) for start in starts]
            arms.append(Arm(kind="dense", size=size))
    return arms


@dataclass(kw_only=True, slots=True)
class ArmNetwork:
    """A network before it is trained."""

    model: nn.Module
    plan: ConversionPlan | None = None  # None: without DCLS layers
    macs: int | None
    start: list[Tensor] = field(init=False)  # positions

    def __post_init__(self) -> None:
        self.start = [
            one.tensor.detach().clone() for one in position_parameters(self.model, "positions")
        ]

    def moved(self, trained: nn.Module) -> "Moved | None":
        """How far positions went, in the trained model, on the CPU; None without positions."""
        if self.plan is None:
            return None
        layers = {layer.name: layer for layer in self.plan.layers}
        distances, outside = [], []
        for start, now in zip(self.start, position_parameters(trained, "positions"), strict=True):
            here = now.tensor.detach().double()
            distances.append((here - start.double()).square().sum(0).sqrt().flatten())
            name, layer = next(iter(now.layers.items()))
            sides = [layers[name].extents[axis] for axis in layer.learnt_axes]
            outside.append([here.numel(), outside_share(here, sides), outside_share(start, sides)])
        weights, shares, before = torch.tensor(outside, dtype=torch.float64).T
        shares, before = (
            float((weights * part).sum() / weights.sum()) for part in (shares, before)
        )
        return Moved(
            distance=float(torch.cat(distances).mean()), outside=shares, outside_before=before
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What a training did to positions."""

    distance: float  # cells; mean over all elements
    outside: float  # share of the elements that lie outside the old kernel
    outside_before: float  # the same before the training


def make_network(job: Job, arm: Arm) -> ArmNetwork:
    """The network of an arm; what is not converted has the weights that the job's seed gives it, in
    every arm."""
    if arm.kind == "original":
        return ArmNetwork(model=job.network, macs=job.convs.macs)
    options = replace(job.options, dilated_size=arm.size or AUTO)
    if arm.kind == "dense":
        # All cells of the window will be weights, which start as the old kernel with zeros around
        # it.
        options = replace(options, kernel_count=EXACT, scope="auto", interpolation=None)
        job = replace(job, init="exact", calibration=None, options=options)
    else:
        job = replace(job, positions=arm.positions, options=options)
    conversion = job.convert()
    model, macs = conversion.model, conversion.report.macs.after
    if arm.kind == "dense":
        fold_to_dense_(model)
        return ArmNetwork(model=model, macs=macs)
    for one in position_parameters(model) if arm.kind == "frozen" else ():
        one.tensor.requires_grad_(False)
    return ArmNetwork(model=model, plan=conversion.report.plan, macs=macs)
