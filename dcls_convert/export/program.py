"""Write a folded model as one file: a program of torch.export, or an ONNX model made from it.

The file is run, and kept only if it gives the outputs of the folder's model.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import DclsConvertError, ModelError
from ..output import check_output_path, new_output, why_not_a_file
from ..running.compare_outputs import check_close, tensors_in
from ..running.input_spec import have_batch_axis
from ..running.process_settings import suppress_output
from .folded_model import (
    COMPARED_IMAGES,
    FOLDING_BOUND,
    ExportReport,
    FoldedModel,
    arguments_for,
    root_cause,
    run_model,
)
from .formats import OutputFormat

ONNX_BOUND = 1e-3  # largest relative error; onnxruntime has other kernels and folds constants
# Without this variable, onnxruntime 1.29 and later sends names of models to its makers.
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
DATA_SUFFIX = ".data"  # of the second file, which torch names after the first
MAX_IN_ONE_FILE = 1_900_000_000  # bytes of weights; ONNX files are protobufs, limited to 2 GiB
LOAD_PT2 = 'import torch\n\nmodel = torch.export.load("{folder}").module()\n'
LOAD_ONNX = 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}")\n'

LoadedFile = Callable[..., Any]  # inputs -> outputs


def write_pt2(folded: FoldedModel) -> ExportReport:
    """Write the .pt2 file."""

    def write(program: ExportedProgram, path: Path) -> LoadedFile:
        # Save to memory first: if the disk is full, torch's own file writer ends the process.
        file = io.BytesIO()
        torch.export.save(program, file)
        path.write_bytes(file.getbuffer())
        return torch.export.load(path).module()

    return _write_file(folded, "pt2", write, FOLDING_BOUND, LOAD_PT2)


def write_onnx(folded: FoldedModel) -> ExportReport:
    """Write the ONNX file, and a second file with the weights if they do not fit into one."""
    # onnxruntime reads the variable when it is imported.
    os.environ.setdefault(NO_TELEMETRY, "1")
    size = sum(tensor.nbytes for tensor in folded.model.state_dict().values())
    data = None
    if size > MAX_IN_ONE_FILE:
        data = folded.output.with_name(f"{folded.output.name}{DATA_SUFFIX}")
        check_output_path(data, force=folded.force, why_keep=why_not_a_file)

    def write(program: ExportedProgram, path: Path) -> LoadedFile:
        names = list(map(str, program.graph_signature.user_inputs))
        if len(names) == 1:
            names = ["input"]
        torch.onnx.export(
            program,
            f=path,
            input_names=names,
            output_names=list(_output_names(folded.outputs)),
            dynamo=True,
            dynamic_shapes=[{0: "batch"}] * len(names) if program.range_constraints else None,
            external_data=data is not None,
            verbose=False,
        )
        return _load_onnx(path)

    return _write_file(folded, "onnx", write, ONNX_BOUND, LOAD_ONNX, data)


def _load_onnx(path: Path) -> LoadedFile:
    """Return a function that runs the file's model with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*args: Tensor, **kwargs: Tensor) -> list[Tensor]:
        arrays = [tensor.numpy() for tensor in (*args, *kwargs.values())]
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.from_numpy(output) for output in outputs]

    return run


def _output_names(outputs: Any, name: str = "") -> Iterator[str]:
    """Yield a name for each tensor: "logits", "boxes.0" for a dict, "output.0" for a tuple."""
    if isinstance(outputs, Tensor):
        yield name or "output"
    elif isinstance(outputs, Mapping):
        for key, part in outputs.items():
            yield from _output_names(part, f"{name}.{key}".lstrip("."))
    elif isinstance(outputs, list | tuple):
        for index, part in enumerate(outputs):
            yield from _output_names(part, f"{name or 'output'}.{index}")


def _write_file(
    folded: FoldedModel,
    output_format: OutputFormat,
    write: Callable[[ExportedProgram, Path], LoadedFile],
    bound: float,
    loading: str,
    data: Path | None = None,
) -> ExportReport:
    """Export the model, and keep the file if its outputs are within the bound.

    Args:
        folded: The model to write.
        output_format: What is written.
        write: Writes the program to a path, and loads it again.
        bound: Largest allowed relative error of the file's outputs.
        loading: As in `FoldedModel.report`.
        data: The second file, if `write` writes one.

    Raises:
        DclsConvertError: The export fails, or the outputs differ too much.
    """
    subject = f"the export to {output_format}"
    with new_output(folded.output, force=folded.force, why_keep=why_not_a_file) as path:
        folded.notify("exporting")
        try:
            with torch.no_grad(), suppress_output():
                program, batch = _export(folded)
                run = write(program, path)
        except (OSError, DclsConvertError):
            raise
        except Exception as error:  # exporters may raise anything
            raise ModelError(f"{subject} fails: {root_cause(error)}") from error
        arguments = arguments_for(folded.model, folded.inputs, batch or COMPARED_IMAGES)
        expected = run_model(folded.model, arguments, "the folded model")
        outputs = run_model(run, arguments, subject)
        difference = check_close(
            tensors_in(expected), tensors_in(outputs), bound=bound, what=subject
        )
        data_file = None if data is None else str(data)
        return folded.report(output_format, difference, loading, batch=batch, data_file=data_file)


def _export(folded: FoldedModel) -> tuple[ExportedProgram, int | None]:
    """Export for any batch size or, if the network's code fixes it, for one image.

    Returns:
        The program, and the only batch size that it takes; None if it takes any.
    """
    program = None
    if have_batch_axis(folded.inputs):
        # Export with two images: torch.export takes 1 for a constant, and the file is then run with
        # another number, to show that it takes any.
        two_images = arguments_for(folded.model, folded.inputs, 2)
        shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
        for tensor in two_images.tensors():
            shapes[tensor] = {0: torch.export.Dim.AUTO}
        dynamic = shapes.dynamic_shapes(folded.model, two_images.args, two_images.kwargs)
        program = torch.export.export(
            folded.model, two_images.args, two_images.kwargs, dynamic_shapes=dynamic
        )
    batch = None
    if program is None or not program.range_constraints:  # the network's code fixes the batch size
        batch = 1
        one_image = arguments_for(folded.model, folded.inputs, batch)
        program = torch.export.export(folded.model, one_image.args, one_image.kwargs)
    # Stack traces would name this machine's source files.
    for graph in program.graph_module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            for node in graph.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program, batch
