"""The network that MODEL and its options name: the arguments, its weights, and the network itself, built once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckpointError, DclsConvertError
from ..options import AUTO, ERROR, MOST_COUNT, PlanOptions
from .arguments import WHAT, WHERE, number, option
from .completion import complete_models

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..networks.source import ModelSource
    from ..pipeline import Start
    from ..progress import Notify

MODEL_HELP = (
    "convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, hf-hub:REPO, local-dir:FOLDER, or "
    "package.module:factory, which imports and runs your own code."
)
WEIGHTS_HELP = "Start from the weights in a safetensors or torch file, also one of DCLS's authors."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_models)]
Pretrained = Annotated[bool, option(WHAT, "Start from timm's or torchvision's trained weights.", "--pretrained")]
WeightsFile = Annotated[Path | None, option(WHAT, WEIGHTS_HELP, metavar="FILE")]
NumClasses = Annotated[int | None, number(int, 0, MOST_COUNT, WHAT, "Classes of the model's head.", metavar="N")]
InChans = Annotated[int | None, number(int, 1, MOST_COUNT, WHAT, "Input channels.", metavar="N")]
Images = Annotated[Path | None, option(WHERE, "Images: fit outputs for them, not kernels.", metavar="FOLDER")]


def refuse(conflicts: Mapping[str, object]) -> None:
    """Raise the first message whose conflict there is."""
    for message, conflict in conflicts.items():
        if conflict:
            raise DclsConvertError(message)


def refuse_weights(options: PlanOptions, *, pretrained: bool, checkpoint: Path | None) -> bool:
    """Refuse two sources of weights, and what needs one where there is none. Whether the weights are trained."""
    trained = pretrained or checkpoint is not None
    needs = options.scope == ERROR and not trained
    refuse(
        {
            "--pretrained and --checkpoint exclude each other": pretrained and checkpoint is not None,
            "--scope error needs trained kernels: --pretrained or --checkpoint": needs,
        }
    )
    return trained


@dataclass(slots=True)
class Network:
    """The network to convert; built when it is needed, and once."""

    source: "ModelSource"
    where: str  # its weights come from, for messages
    pretrained: bool
    notify: "Notify"
    state: "dict[str, Tensor] | None" = None  # its weights from a file
    built: "tuple[nn.Module, list[str]] | None" = None  # with the names that kept their initial values
    seed: int = 0

    @property
    def new_classifier(self) -> bool:
        return "num_classes" in self.source.args

    def build(self) -> "tuple[nn.Module, list[str]]":
        from ..pipeline import build_with_weights

        if self.built is None:
            self.notify("building with pretrained weights" if self.pretrained else "building")
            self.built = build_with_weights(
                self.source,
                self.state,
                where=self.where,
                pretrained=self.pretrained,
                seed=self.seed,
                new_classifier=self.new_classifier,
            )
            self.state = None
        return self.built


def hollow_network(
    network: Network, checkpoint: Path | None, start: "Start", *, offline: bool, note: "Notify"
) -> tuple["nn.Module", "ModelSource | None", "Start"]:
    """The network without weights, how it is built again, and the start, which the checkpoint may decide."""
    from ..networks.source import build_model, rebuildable_source

    network.seed = start.seed
    twin = build_model(network.source, device="meta", seed=start.seed, offline=offline, trust_code=True)
    if checkpoint is not None:
        network.notify("reading weights")
        network.state, start = _read_weights(checkpoint, twin, start, note)
    return twin, rebuildable_source(twin, network.source), start


def _read_weights(
    checkpoint: Path, twin: "nn.Module", start: "Start", note: "Notify"
) -> tuple["dict[str, Tensor] | None", "Start"]:
    """The file's weights under the model's names; or, with layers of the authors' package, the start that they are."""
    from ..networks.source import with_names_of
    from ..networks.weights import read_weights
    from ..surgery.authors import RELEASED_VERSION, sort_weights

    where = f"checkpoint {checkpoint}"
    state = with_names_of(twin, read_weights(checkpoint))
    elements = sort_weights(state, where)
    if elements is None:
        if start.authors_version is not None:
            raise CheckpointError(f"{where}: has no layers of the authors' package; leave --authors-version")
        return state, start
    for name, given in [
        (f"--init {start.init}", start.init != AUTO),
        (f"--positions {start.positions}", start.positions != "normal"),
        ("--calibrate", start.calibration is not None),
    ]:
        if given:
            raise CheckpointError(f"{where}: has elements of its own, with positions; leave {name}")
    if not elements.has_sigma and start.authors_version is None:
        note(f"{where} is taken for version {RELEASED_VERSION} of the authors' layers; see --authors-version")
    return None, replace(start, elements=elements)
