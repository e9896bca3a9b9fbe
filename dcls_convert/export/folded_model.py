"""The folded model to export, the outputs that it must reproduce, and the report of an export."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.card import with_folder
from ..checkpoints.folder import OpenedFolder
from ..errors import ModelError
from ..networks.find_convs import parameter_count
from ..progress import Notify
from ..records import Record
from ..running.arguments import Arguments, random_arguments
from ..running.input_spec import InputSpec, with_batch
from ..running.model_state import image_dtype
from ..running.process_settings import suppress_output
from ..running.run import running
from ..text import one_line, shortened
from .formats import OutputFormat

COMPARED_IMAGES = 3  # images on which outputs are compared
FOLDING_BOUND = 1e-4  # largest relative error in float32; folding only reorders sums


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport(Record):
    """Report of an export: what was written, and how close its outputs are to the folder's."""

    format: int = 1  # of this record
    checkpoint: str  # the folder
    output: str
    data_file: str | None = None  # has the weights, if they do not fit into an ONNX file
    kind: OutputFormat
    relative_error: float  # of the outputs: the larger of folding's and the format's
    loading: str  # lines of Python that load the output
    layers: int
    params_before: int
    params_after: int
    input_size: tuple[int, ...] | None  # of one image; None for other inputs
    batch: int | None = None  # the only batch size that the output takes; None if it takes any
    kernel_args: dict[str, Any] | None = None  # arguments with which stock timm builds the model
    note: str | None = None  # why stock timm cannot build the model


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedModel:
    """A folded model to write, and the outputs that the written model must reproduce."""

    model: nn.Module
    opened: OpenedFolder  # from which the model was loaded
    input_size: tuple[int, ...] | None  # of one image; None for other inputs
    inputs: InputSpec
    outputs: Any  # for the inputs' `arguments_for`, computed before folding
    relative_error: float  # of folding
    params_before: int  # before folding
    output: Path
    force: bool
    notify: Notify

    def report(
        self, output_format: OutputFormat, error: float, loading: str, **fields: Any
    ) -> ExportReport:
        """Return the report of what was written.

        Args:
            output_format: What was written: `ExportReport.kind`.
            error: Relative error of the written model's outputs.
            loading: Lines of Python that load the output, with `{folder}` for its path.
            fields: Other fields of the report.
        """
        return ExportReport(
            checkpoint=str(self.opened.folder),
            output=str(self.output),
            kind=output_format,
            relative_error=max(error, self.relative_error),
            loading=with_folder(loading, self.output),
            layers=len(self.opened.plan.layers),
            params_before=self.params_before,
            params_after=parameter_count(self.model),
            input_size=self.input_size,
            **fields,
        )


def arguments_for(model: nn.Module, inputs: InputSpec, batch: int = COMPARED_IMAGES) -> Arguments:
    """Return random arguments for a batch of this size, in the model's dtype."""
    return random_arguments(with_batch(inputs, batch), dtype=image_dtype(model))


def run_model(model: Callable[..., Any], arguments: Arguments, subject: str) -> Any:
    """Return the outputs of a model, or of the function that runs a loaded file.

    Raises:
        ModelError: The model fails; the message begins with `subject`.
    """
    try:
        if isinstance(model, nn.Module):
            with running(model) as run:
                return run(*arguments.args, **arguments.kwargs)
        with torch.no_grad(), suppress_output():
            return model(*arguments.args, **arguments.kwargs)
    except Exception as error:  # the model's own code may raise anything
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in arguments.tensors())
        raise ModelError(f"{subject} does not run on {shapes}: {root_cause(error)}") from error


def root_cause(error: BaseException) -> str:
    """Return the root cause as text, because exporters wrap it in long advice to authors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {shortened(one_line(error), 200)}"
