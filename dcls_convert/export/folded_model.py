"""The folded model that is exported, what it must give, and the report of what was written."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..checkpoints.folder import Checkpoint
from ..checkpoints.loading_code import with_folder
from ..errors import ModelError
from ..networks.model_outputs import tensors_in
from ..networks.running import quietly
from ..progress import Notify
from ..records import Record
from ..text import one_line, shown

FOLDING_BOUND = 1e-4  # relative error in float32: the same sums in another order
BATCHES = (1, 3)  # numbers of images for which outputs are compared

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ModelFunction = Callable[[Tensor], Any]  # images -> outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport(Record):
    """What was written, and how near its outputs are to the checkpoint's."""

    format: str
    checkpoint: str
    output: str
    kind: str  # the format's name; of --format timm, "stock timm" or "dcls"
    relative_error: float  # the largest, of folding and of the format
    loading: str  # the lines of Python that load it
    layers: int
    params_before: int
    params_after: int
    input_size: tuple[int, ...]
    batch: int | None = None  # the only one that it takes; None where it takes any
    opset: int | None = None  # of an ONNX model
    kernel_args: dict[str, Any] | None = None  # with which stock timm builds it
    note: str | None = None  # why it is not stock timm's, or takes one batch size only


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedModel:
    """A folded model to be written, and the outputs that what is written must give."""

    model: nn.Module
    checkpoint: Checkpoint  # from which it was loaded
    input_size: tuple[int, ...]
    images: tuple[Tensor, ...]  # one tensor for each batch size of BATCHES
    outputs: tuple[Any, ...]  # of the model for them, before it was folded
    one_output: bool  # whether the model returns one tensor
    relative_error: float  # of folding
    params_before: int  # before folding
    params_after: int
    format: str  # a name in EXPORT_FORMATS
    output: Path
    opset: int | None  # as asked; None for the format's own
    force: bool
    notify: Notify

    def report(self, kind: str, error: float, loading: str, **more: Any) -> ExportReport:
        """The report of what was written.

        Args:
            kind: What it is.
            error: Relative error of its outputs.
            loading: Lines of Python that load it, with `{folder}` for the output.
            more: Other fields.
        """
        return ExportReport(
            format=self.format,
            checkpoint=str(self.checkpoint.folder),
            output=str(self.output),
            kind=kind,
            relative_error=max(error, self.relative_error),
            loading=with_folder(loading, self.output),
            layers=len(self.checkpoint.plan.layers),
            params_before=self.params_before,
            params_after=self.params_after,
            input_size=self.input_size,
            **more,
        )


def metadata(folded: FoldedModel, input_name: str) -> dict[str, Any]:
    """What a file says about the network in it. What the checkpoint does not state is absent."""
    stated = folded.checkpoint.preprocessing
    channels = folded.input_size[0]
    classes = stated.get("num_classes")
    facts = {
        "dcls_convert_version": __version__,
        "base_model": folded.checkpoint.plan.model,
        "input_name": input_name,
        "input_size": list(folded.input_size),
        "mean": _if_as_many(stated.get("mean"), channels),
        "std": _if_as_many(stated.get("std"), channels),
        "interpolation": stated.get("interpolation"),
        "crop_pct": stated.get("crop_pct"),
        "crop_mode": stated.get("crop_mode"),
        "class_names": _if_as_many(stated.get("label_names"), classes),
        "class_descriptions": stated.get("label_descriptions"),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _if_as_many(values: Any, count: Any) -> Any:
    """The values, or None if the model has another number of channels or classes by now."""
    if isinstance(values, (list, dict)) and len(values) == count:
        return values
    return None


def brief(error: BaseException) -> str:
    """The first cause: exporters wrap an error in much advice to the model's author."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = ANSI_COLOUR.sub("", one_line(error))
    return f"{type(error).__name__}: {shown(message, 200)}"


def run_model(model: ModelFunction, batches: Sequence[Tensor], what: str) -> tuple[Any, ...]:
    """Outputs for each batch.

    Raises:
        ModelError: The model fails; the message begins with `what`.
    """
    try:
        with torch.no_grad(), quietly():
            return tuple(model(images) for images in batches)
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(
            f"{what} does not run on {tuple(batches[0].shape)}: {brief(error)}"
        ) from error


def flattened(folded: FoldedModel) -> FoldedModel:
    """The same with tuples of tensors as outputs to compare with, for `flat_outputs`.

    A model of several outputs, or of outputs with a structure, returns them as such a tuple.
    """
    outputs = tuple(tuple(tensors_in(each)) for each in folded.outputs)
    if folded.one_output:
        return replace(folded, outputs=outputs)
    return replace(folded, outputs=outputs, model=_FlatOutputs(folded.model))


class _FlatOutputs(nn.Module):
    """Returns tensors only: torch 2.8 cannot export a None among outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.model(images)))
