"""`dcls-convert fold`: a checkpoint's model with plain convolutions, for timm, ONNX or torch.export.

Whatever is written has first given the outputs of the model that it was made from.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..checkpoints.folder import (
    check_output,
    check_output_file,
    load_converted,
    new_file,
    new_folder,
    read_plan,
    save_converted,
)
from ..errors import CheckpointError, DclsConvertError, ModelError, one_line, shown
from ..networks.outputs import ComparisonError, check_equal
from ..networks.quiet import quietly
from ..options import FoldFormat
from ..planning.plan import ConversionPlan
from ..reports.report import measure_report
from ..surgery.fold import fold_to_dense_
from .stock_timm import NotStockError, StockModel, find_stock_model, load_as_timm_does, write_stock_folder

FOLDING_BOUND = 1e-4  # relative error in float32: the same sums in another order
ONNX_BOUND = 1e-3  # other kernels, and constants folded beforehand
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "pt2": ".pt2"}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
MOST_IN_ONE_FILE = 1_900_000_000  # bytes of weights; a protobuf, and so an ONNX file, ends at 2 GiB
BATCHES = (1, 3)  # for which outputs are compared
SEED = 0  # of the images

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Step = Callable[[str], None]
Exported = Callable[[Tensor], Any]
Export = Callable[[Path, Tensor, bool], Exported]  # file, images, whether the batch may have any size


@dataclass(frozen=True, kw_only=True, slots=True)
class Folded:
    """What was written, and what was found out about it."""

    format: str
    checkpoint: str
    output: str
    kind: str  # "stock timm", "dcls", "onnx" or "pt2"
    relative_error: float  # the largest between the checkpoint's model and what was made of it
    with_timm: bool  # whether its model comes from timm
    layers: int
    params_before: int
    params_after: int
    input_size: tuple[int, ...]
    batch: int | None = None  # the only one that it takes; None where it takes any
    kernel_args: dict[str, Any] | None = None  # with which stock timm builds it
    note: str | None = None  # why it is not stock timm's, or takes one batch size only

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A folded model, what it must give, and where it goes."""

    checkpoint: Path
    output: Path
    force: bool
    step: Step
    model: nn.Module
    plan: ConversionPlan  # with `folded` set
    images: tuple[Tensor, ...]  # one tensor a batch size of BATCHES
    wanted: tuple[Any, ...]  # outputs of the checkpoint's own model for them
    error: float  # of folding
    params_before: int
    was_folded: bool


def fold_checkpoint(
    checkpoint: Path, format: FoldFormat, output: Path | None = None, *, force: bool = False, step: Step | None = None
) -> Folded:
    """Fold a checkpoint's model, and write it for use without learnable positions.

    Args:
        checkpoint: Folder written by `save_converted`; not changed.
        format: "timm" (a folder that timm loads, without this package where its architecture allows), "onnx" or "pt2".
        output: Folder or file to write; `default_fold_output` without it.
        force: Replace a checkpoint folder, or a file of the same suffix, that is there.
        step: Told what is being done.

    Raises:
        DclsConvertError: The checkpoint is damaged, outputs differ, or it cannot be written; nothing is left behind.
    """
    output = output or default_fold_output(checkpoint, format)
    plan = read_plan(checkpoint)
    _check_fold_output(checkpoint, format, output, force)
    job = _folded(checkpoint, plan, output, force, step or (lambda text: None))
    return {"timm": _write_for_timm, "onnx": _write_onnx, "pt2": _write_pt2}[format](job)


def default_fold_output(checkpoint: Path, format: FoldFormat) -> Path:
    """In the current directory: NAME-folded, NAME.onnx, NAME.pt2."""
    return Path(checkpoint.resolve().name + SUFFIXES.get(format, "-folded"))


def _check_fold_output(checkpoint: Path, format: FoldFormat, output: Path, force: bool) -> None:
    suffix = SUFFIXES.get(format)
    if suffix is None:
        if output.resolve() == checkpoint.resolve():
            raise CheckpointError(f"output {output} is the checkpoint itself, whose positions would be lost")
        check_output(output, force=force)
        return
    if output.suffix != suffix:
        raise CheckpointError(f"output {shown(output)} must end in {suffix}")
    check_output_file(output, force=force)
    missing = [name for name in ONNX_PACKAGES if format == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise DclsConvertError(f"--format onnx needs {', '.join(missing)}: pip install 'dcls-convert[export]'")


def _folded(checkpoint: Path, plan: ConversionPlan, output: Path, force: bool, step: Step) -> _Job:
    if plan.input_size is None:
        raise CheckpointError(f"{checkpoint}: its plan states no input size, so its outputs cannot be compared")
    step("loading")
    model = load_converted(checkpoint)
    params_before = sum(p.numel() for p in model.parameters())
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(max(BATCHES), *plan.input_size, generator=generator).to(dtype)
    batches = tuple(images[:batch] for batch in BATCHES)
    step("folding")
    wanted = _outputs(model, batches, f"{checkpoint}: its model")
    fold_to_dense_(model)
    outputs = _outputs(model, batches, "the folded model")
    return _Job(
        checkpoint=checkpoint,
        output=output,
        force=force,
        step=step,
        model=model,
        plan=replace(plan, folded=True),
        images=batches,
        wanted=wanted,
        error=check_equal(wanted, outputs, bound=FOLDING_BOUND, what=f"{checkpoint}: folding"),
        params_before=params_before,
        was_folded=plan.folded,
    )


def _record(job: _Job, *, format: FoldFormat, kind: str, error: float, **more: Any) -> Folded:
    return Folded(
        format=format,
        checkpoint=str(job.checkpoint),
        output=str(job.output),
        kind=kind,
        relative_error=max(error, job.error),
        with_timm=(job.plan.model or "").startswith("timm:"),
        layers=len(job.plan.layers),
        params_before=job.params_before,
        params_after=sum(p.numel() for p in job.model.parameters()),
        input_size=job.plan.input_size or (),
        **more,
    )


def _outputs(model: Exported, batches: tuple[Tensor, ...], what: str) -> tuple[Any, ...]:
    try:
        with torch.no_grad(), quietly():
            return tuple(model(images) for images in batches)
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(f"{what} does not run on {tuple(batches[0].shape)}: {_brief(error)}") from error


def _write_for_timm(job: _Job) -> Folded:
    job.step("looking for timm's own arguments")
    report = measure_report(job.model, job.plan)
    try:
        stock = find_stock_model(job.model, job.plan)
        job.step(f"writing {job.output}")
        with new_folder(job.output, force=job.force) as partial:
            write_stock_folder(job.model, job.plan, stock, report, partial)
            error = _check_stock(job, stock, partial)
        return _record(job, format="timm", kind="stock timm", error=error, kernel_args=stock.kernel_args)
    except NotStockError as reason:
        if job.was_folded:
            raise DclsConvertError(f"{job.checkpoint} is folded already, and {reason}") from reason
        job.step(f"writing {job.output}, a checkpoint of this program")
        save_converted(job.model, job.plan, job.output, report=report, force=job.force)
        return _record(job, format="timm", kind="dcls", error=0.0, note=str(reason))


def _check_stock(job: _Job, stock: StockModel, folder: Path) -> float:
    """The error of the model that timm makes of the folder; shapes do not say what a network does with its kernels."""
    what = f"timm's {stock}"
    try:
        outputs = _outputs(load_as_timm_does(folder), tuple(images.float() for images in job.images), what)
        return check_equal(job.wanted, outputs, bound=FOLDING_BOUND, what=what)
    except (ModelError, ComparisonError) as error:
        raise NotStockError(str(error)) from error


def _write_onnx(job: _Job) -> Folded:
    size = sum(t.numel() * t.element_size() for t in job.model.state_dict().values())

    def export(path: Path, images: Tensor, dynamic: bool) -> Exported:
        torch.onnx.export(
            job.model if isinstance(job.wanted[0], Tensor) else _FlatOutputs(job.model),
            (images,),
            path,
            dynamo=True,
            input_names=["input"],
            output_names=["output"] if isinstance(job.wanted[0], Tensor) else None,
            dynamic_shapes=({0: "batch"},) if dynamic else None,
            external_data=size > MOST_IN_ONE_FILE,
            verbose=False,
        )
        return _onnx_session(path)

    # ONNX knows no structure: its outputs are the tensors in their order.
    flat = tuple(_flat(outputs) for outputs in job.wanted)
    return _export(replace(job, wanted=flat), "onnx", ONNX_BOUND, export)


class _FlatOutputs(nn.Module):
    """Returns tensors only: torch 2.8 cannot export a None among outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return _flat(self.model(images))


def _flat(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))


def _onnx_session(path: Path) -> Exported:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    return lambda images: tuple(map(torch.from_numpy, session.run(None, {entry.name: images.numpy()})))


def _write_pt2(job: _Job) -> Folded:
    def export(path: Path, images: Tensor, dynamic: bool) -> Exported:
        shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
        torch.export.save(torch.export.export(job.model, (images,), dynamic_shapes=shapes), path)
        return torch.export.load(path).module()

    return _export(job, "pt2", FOLDING_BOUND, export)


def _export(job: _Job, format: FoldFormat, bound: float, export: Export) -> Folded:
    """For any batch size where the model allows it, else for one image; whatever takes its place has been run."""
    with new_file(job.output, force=job.force) as partial:
        job.step("exporting")
        try:
            return _record(job, format=format, kind=format, error=_run_export(job, partial, bound, export, BATCHES))
        except DclsConvertError as reason:
            for leftover in partial.parent.iterdir():
                leftover.unlink()
            job.step("exporting again, for one image at a time")
            error = _run_export(job, partial, bound, export, BATCHES[:1])
            return _record(job, format=format, kind=format, error=error, batch=1, note=str(reason))


def _run_export(job: _Job, path: Path, bound: float, export: Export, batches: Sequence[int]) -> float:
    what = f"the export to {path.suffix.removeprefix('.')}"
    count = len(batches)
    try:
        with torch.no_grad(), quietly():
            exported = export(path, job.images[count - 1], count > 1)
    except OSError:
        raise
    except Exception as error:  # what the exporters raise has no bounds
        raise ModelError(f"{what} fails: {_brief(error)}") from error
    outputs = _outputs(exported, job.images[:count], what)
    return check_equal(job.wanted[:count], outputs, bound=bound, what=what)


def _brief(error: BaseException) -> str:
    """What went wrong at the bottom of it; exporters wrap an error in much advice to the model's author."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {shown(ANSI_COLOUR.sub('', one_line(error)), 200)}"
