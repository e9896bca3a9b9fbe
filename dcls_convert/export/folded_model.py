"""The folded model to export, the outputs that it must reproduce, and the report of an export."""

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
from ..networks.input_tensors import Inputs, as_image_size, channels_of
from ..networks.inputs import Arguments
from ..networks.model_outputs import tensors_in
from ..networks.running import suppress_output
from ..progress import Notify
from ..records import Record
from ..text import one_line, shortened

FOLDING_BOUND = 1e-4  # largest relative error in float32; folding only reorders sums
BATCHES = (1, 3)  # batch sizes on which outputs are compared

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ModelFunction = Callable[..., Any]  # inputs -> outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport(Record):
    """Report of an export: what was written, and how close its outputs are to the checkpoint's."""

    format: str
    checkpoint: str
    output: str
    kind: str  # the format's name; for the format timm, "stock timm" or "dcls"
    relative_error: float  # of the outputs; the larger of the errors of folding and of the format
    loading: str  # lines of Python that load the output
    layers: int
    params_before: int
    params_after: int
    input_size: tuple[int, ...] | None  # of one image; None for other inputs
    batch: int | None = None  # the only batch size that the output takes; None if it takes any
    opset: int | None = None  # of an ONNX model
    kernel_args: dict[str, Any] | None = None  # arguments with which stock timm builds the model
    note: str | None = None  # why stock timm cannot build the model, or why `batch` is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedModel:
    """A folded model to write, and the outputs that the written model must reproduce."""

    model: nn.Module
    checkpoint: Checkpoint  # from which the model was loaded
    inputs: Inputs
    input_names: tuple[str, ...]  # for formats in which inputs have names
    batches: tuple[Arguments, ...]  # the inputs, for each batch size of BATCHES
    outputs: tuple[Any, ...]  # for these inputs, computed before folding
    one_output: bool  # whether the model returns a single tensor
    relative_error: float  # of folding
    params_before: int  # before folding
    params_after: int
    format: str  # a name in EXPORT_FORMATS
    output: Path
    opset: int | None  # as requested; None for the default
    force: bool
    notify: Notify

    def report(self, kind: str, error: float, loading: str, **fields: Any) -> ExportReport:
        """Return the report of what was written.

        Args:
            kind: Value of `ExportReport.kind`.
            error: Relative error of the written model's outputs.
            loading: Lines of Python that load the output, with `{folder}` for its path.
            fields: Other fields of the report.
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
            input_size=as_image_size(self.inputs),
            **fields,
        )


def metadata(folded: FoldedModel, input_names: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of an exported file, without entries that the checkpoint lacks."""
    stated = folded.checkpoint.preprocessing
    channels = next(iter(channels_of(folded.inputs)), None)
    classes = stated.get("num_classes")
    facts = {
        "dcls_convert_version": __version__,
        "base_model": folded.checkpoint.plan.model,
        "input_name": input_names[0] if len(input_names) == 1 else list(input_names),
        "input_size": as_image_size(folded.inputs),
        "mean": _if_count_matches(stated.get("mean"), channels),
        "std": _if_count_matches(stated.get("std"), channels),
        "interpolation": stated.get("interpolation"),
        "crop_pct": stated.get("crop_pct"),
        "crop_mode": stated.get("crop_mode"),
        "class_names": _if_count_matches(stated.get("label_names"), classes),
        "class_descriptions": stated.get("label_descriptions"),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _if_count_matches(values: Any, count: Any) -> Any:
    """Return the values, or None if the model now has another number of channels or classes."""
    if isinstance(values, (list, dict)) and len(values) == count:
        return values
    return None


def any_batch_shapes(model: nn.Module, arguments: Arguments, size: Any) -> Any:
    """Return `dynamic_shapes` for torch.export: this size for the first axis of each input."""
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in arguments.tensors():
        shapes[tensor] = {0: size}
    return shapes.dynamic_shapes(model, arguments.args, arguments.kwargs)


def root_cause(error: BaseException) -> str:
    """Return the root cause as text: exporters wrap errors in long advice to the model's author."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = ANSI_COLOUR.sub("", one_line(error))
    return f"{type(error).__name__}: {shortened(message, 200)}"


def run_model(model: ModelFunction, batches: Sequence[Arguments], subject: str) -> tuple[Any, ...]:
    """Return the outputs for each batch.

    Raises:
        ModelError: The model fails; the message begins with `subject`.
    """
    try:
        with torch.no_grad(), suppress_output():
            return tuple(model(*each.args, **each.kwargs) for each in batches)
    except Exception as error:  # the model's own code may raise anything
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in batches[0].tensors())
        raise ModelError(f"{subject} does not run on {shapes}: {root_cause(error)}") from error


def with_flat_outputs(folded: FoldedModel) -> FoldedModel:
    """Turn outputs into tuples of tensors, for formats with `flat_outputs`.

    The outputs to compare with become tuples. A model that does not return a single tensor is
    wrapped so that it returns such a tuple.
    """
    outputs = tuple(tuple(tensors_in(output)) for output in folded.outputs)
    if folded.one_output:
        return replace(folded, outputs=outputs)
    return replace(folded, outputs=outputs, model=_FlatOutputs(folded.model))


class _FlatOutputs(nn.Module):
    """Return only the tensors of a model's outputs: torch 2.8 cannot export a None among them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.model(*args, **kwargs)))
