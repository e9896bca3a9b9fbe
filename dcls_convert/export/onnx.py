"""Write a folded model as an ONNX file."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from ..networks.inputs import Arguments
from ..options import DEFAULT_OPSET
from .export_file import export_file
from .folded_model import (
    ExportReport,
    FoldedModel,
    ModelFunction,
    any_batch_shapes,
    metadata,
)

BOUND = 1e-3  # largest relative error; onnxruntime has other kernels and folds constants
# Without this variable, onnxruntime 1.29 and later sends names of models to its makers.
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
MAX_IN_ONE_FILE = 1_900_000_000  # bytes of weights; ONNX files are protobufs, limited to 2 GiB
OUTPUT_NAME = "output"  # if there is one output
LOAD_ONNX = 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}")\n'


def write_onnx(folded: FoldedModel) -> ExportReport:
    """Write the ONNX file, and a second file with the weights if they do not fit into one."""
    # onnxruntime reads the variable when it is imported.
    os.environ.setdefault(NO_TELEMETRY, "1")

    opset = folded.opset or DEFAULT_OPSET
    size = sum(tensor.nbytes for tensor in folded.model.state_dict().values())

    def export(path: Path, arguments: Arguments, any_batch: bool) -> ModelFunction:
        shapes = None
        if any_batch:
            shapes = any_batch_shapes(folded.model, arguments, "batch")
        torch.onnx.export(
            folded.model,
            arguments.args,
            path,
            kwargs=arguments.kwargs,
            input_names=list(folded.input_names),
            output_names=[OUTPUT_NAME] if folded.one_output else None,
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=shapes,
            external_data=size > MAX_IN_ONE_FILE,
            verbose=False,
        )
        _check_opset_and_add_metadata(path, opset, metadata(folded, folded.input_names))
        return _load(path)

    return replace(export_file(folded, BOUND, export, LOAD_ONNX), opset=opset)


def _load(path: Path) -> ModelFunction:
    """Return a function that runs the file's model with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        arrays = [tensor.numpy() for tensor in (*args, *kwargs.values())]
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
        return tuple(map(torch.from_numpy, outputs))

    return run


def _check_opset_and_add_metadata(path: Path, opset: int, facts: Mapping[str, Any]) -> None:
    """Check a file's opset, remove this machine's source paths, and add facts as metadata."""
    import onnx

    network = onnx.load(path, load_external_data=False)
    # The entry without a domain is the opset of ONNX's own operators.
    written_opset = next(entry.version for entry in network.opset_import if not entry.domain)
    if written_opset != opset:
        raise ModelError(f"torch wrote opset {written_opset} for this model, not opset {opset}")
    for part in _parts(network):
        part.ClearField("doc_string")
        kept_notes = [note for note in part.metadata_props if not note.key.endswith("stack_trace")]
        del part.metadata_props[:]
        part.metadata_props.extend(kept_notes)
    texts = {name: _text(fact) for name, fact in facts.items()}
    onnx.helper.set_model_props(network, texts)
    onnx.save(network, path)


def _text(fact: Any) -> str:
    """Return a fact as a string for ONNX's metadata; values that are not strings become JSON."""
    if isinstance(fact, str):
        return fact
    return json.dumps(fact)


def _parts(network: Any) -> Iterator[Any]:
    """Yield the ONNX model and every part of it to which exporters attach notes and doc strings."""
    yield network
    yield from _parts_of_graph(network.graph)
    for function in network.functions:
        yield function
        yield from function.value_info
        yield from _parts_of_nodes(function.node)


def _parts_of_graph(graph: Any) -> Iterator[Any]:
    yield graph
    yield from graph.input
    yield from graph.output
    yield from graph.value_info
    yield from graph.initializer
    yield from _parts_of_nodes(graph.node)


def _parts_of_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _parts_of_graph(attribute.g)
            for graph in attribute.graphs:
                yield from _parts_of_graph(graph)
