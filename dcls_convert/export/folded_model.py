"""What every export format shares: the folded model, what it must give, and the record of what was written."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..errors import DclsConvertError, ModelError, filled, one_line, shown
from ..networks.outputs import check_equal
from ..networks.running import quietly
from ..output import new_file
from ..planning.plan import ConversionPlan
from ..progress import Notify
from ..records import Record

FOLDING_BOUND = 1e-4  # relative error in float32: the same sums in another order
BATCHES = (1, 3)  # numbers of images for which outputs are compared

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
Exported = Callable[[Tensor], Any]
Export = Callable[
    [Path, Tensor, bool], Exported
]  # file, images, whether the batch may have any size


@dataclass(frozen=True, kw_only=True, slots=True)
class Folded(Record):
    """What was written, and what was found out about it."""

    format: str
    checkpoint: str
    output: str
    kind: str = ""  # "stock timm", "dcls", "onnx" or "pt2"
    relative_error: float  # the largest between the checkpoint's model and what was made of it
    loading: str = ""  # the lines of Python that load it
    layers: int
    params_before: int
    params_after: int
    input_size: tuple[int, ...]
    batch: int | None = None  # the only one that it takes; None where it takes any
    opset: int | None = None  # of an ONNX model
    kernel_args: dict[str, Any] | None = None  # with which stock timm builds it
    note: str | None = None  # why it is not stock timm's, or takes one batch size only


@dataclass(frozen=True, kw_only=True, slots=True)
class Folding:
    """A folded model, and what it must give."""

    model: nn.Module
    plan: ConversionPlan  # of the checkpoint
    preprocessing: Mapping[str, Any]  # as the checkpoint states it, under timm's names
    opset: int | None  # as asked; None for the format's own
    images: tuple[Tensor, ...]  # one tensor for each batch size of BATCHES
    outputs: tuple[Any, ...]  # of the checkpoint's own model for them
    folded: Folded  # what is known before anything is written
    force: bool
    notify: Notify

    @property
    def output(self) -> Path:
        return Path(self.folded.output)

    def record(self, kind: str, error: float, loading: str, **more: Any) -> Folded:
        """What was written, with `error`; `loading` are lines of Python, with `{folder}` for the output."""
        error = max(error, self.folded.relative_error)
        return replace(
            self.folded,
            kind=kind,
            relative_error=error,
            loading=filled(loading, self.output),
            **more,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:  # a row of `formats.FORMATS`
    suffix: str  # of the default output; of every output, if that is a file: ".onnx"
    noun: str  # for messages: "ONNX model"
    write: Callable[[Folding], Folded]
    packages: tuple[str, ...] = ()  # that must be installed

    @property
    def is_file(self) -> bool:
        return self.suffix.startswith(".")


def metadata(folding: Folding, input_name: str) -> dict[str, Any]:
    """What a file says about the network in it. What the checkpoint does not state is absent."""
    stated = folding.preprocessing
    input_size = folding.folded.input_size
    facts = {
        "dcls_convert_version": __version__,
        "base_model": folding.plan.model,
        "input_name": input_name,
        "input_size": list(input_size),
        "mean": _if_as_many(stated.get("mean"), input_size[0]),
        "std": _if_as_many(stated.get("std"), input_size[0]),
        "interpolation": stated.get("interpolation"),
        "crop_pct": stated.get("crop_pct"),
        "crop_mode": stated.get("crop_mode"),
        "class_names": _if_as_many(stated.get("label_names"), stated.get("num_classes")),
        "class_descriptions": stated.get("label_descriptions"),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _if_as_many(values: Any, count: Any) -> Any:
    """The values, or None if the model has another number of channels or classes by now."""
    return values if isinstance(values, (list, dict)) and len(values) == count else None


def _brief(error: BaseException) -> str:
    """The first cause: exporters wrap an error in much advice to the model's author."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {shown(ANSI_COLOUR.sub('', one_line(error)), 200)}"


def run_model(model: Exported, batches: Sequence[Tensor], what: str) -> tuple[Any, ...]:
    """Outputs for each batch; ModelError, which begins with `what`, if the model fails."""
    try:
        with torch.no_grad(), quietly():
            return tuple(model(images) for images in batches)
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(
            f"{what} does not run on {tuple(batches[0].shape)}: {_brief(error)}"
        ) from error


def export_file(folding: Folding, bound: float, export: Export, loading: str) -> Folded:
    """Write one file, for any batch size if the model allows it, else for one image; run it before it is kept."""
    what = f"the export to {folding.folded.format}"

    def error_of(path: Path, count: int) -> float:  # for as many of BATCHES
        try:
            with torch.no_grad(), quietly():
                exported = export(path, folding.images[count - 1], count > 1)
        except (OSError, DclsConvertError):
            raise
        except Exception as error:  # exporters raise anything
            raise ModelError(f"{what} fails: {_brief(error)}") from error
        outputs = run_model(exported, folding.images[:count], what)
        return check_equal(folding.outputs[:count], outputs, bound=bound, what=what)

    with new_file(folding.output, force=folding.force) as partial:
        folding.notify("exporting")
        try:
            return folding.record(folding.folded.format, error_of(partial, len(BATCHES)), loading)
        except DclsConvertError as reason:
            for leftover in partial.parent.iterdir():
                leftover.unlink()
            folding.notify("exporting again, for one image at a time")
            return folding.record(
                folding.folded.format, error_of(partial, 1), loading, batch=1, note=str(reason)
            )
