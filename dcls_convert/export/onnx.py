"""A folded model as an ONNX file."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..networks.outputs import tensors_in
from ..options import DEFAULT_OPSET
from .folded_model import Exported, ExportFormat, Folded, Folding, export_file, metadata

BOUND = 1e-3  # relative error; onnxruntime has other kernels, and folds constants beforehand
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # onnxruntime 1.29 and later, which else sends names of models to its makers
MOST_IN_ONE_FILE = 1_900_000_000  # bytes of weights; a protobuf, and so an ONNX file, ends at 2 GiB
FIRST_OF_DYNAMO = 18  # opset below which torch's newer exporter fails for most models
INPUT = "input"  # its name
OUTPUT = "output"  # the name of an only one
LOADING = 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}")\n'


def write(folding: Folding) -> Folded:
    """Write the file, and a second one for the weights if they are too large for one."""
    # Before anything imports onnxruntime, which begins then.
    os.environ.setdefault(NO_TELEMETRY, "1")
    import onnxruntime

    opset = folding.opset or DEFAULT_OPSET
    size = sum(t.numel() * t.element_size() for t in folding.model.state_dict().values())
    large = size > MOST_IN_ONE_FILE
    if large and opset < FIRST_OF_DYNAMO:
        weights = f"{size / 1e9:.1f} GB of weights do not fit into one file"
        allowed = f"torch writes a second file from opset {FIRST_OF_DYNAMO} on"
        raise ModelError(f"--opset {opset}: {weights}; {allowed}")

    one_output = isinstance(folding.outputs[0], Tensor)
    model = folding.model if one_output else _FlatOutputs(folding.model)
    names = [OUTPUT] if one_output else None

    def export(path: Path, images: Tensor, dynamic: bool) -> Exported:
        if opset >= FIRST_OF_DYNAMO:
            how = _newer_exporter(dynamic, large)
        else:
            how = _older_exporter(dynamic, names)
        torch.onnx.export(
            model,
            (images,),
            path,
            input_names=[INPUT],
            output_names=names,
            opset_version=opset,
            verbose=False,
            **how,
        )
        _complete(path, opset, metadata(folding, INPUT))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (entry,) = session.get_inputs()
        return lambda images: tuple(
            map(torch.from_numpy, session.run(None, {entry.name: images.numpy()}))
        )

    # ONNX knows no structure: its outputs are the tensors in their order.
    flat = tuple(tuple(tensors_in(outputs)) for outputs in folding.outputs)
    return replace(export_file(replace(folding, outputs=flat), BOUND, export, LOADING), opset=opset)


def _newer_exporter(dynamic: bool, large: bool) -> dict[str, Any]:
    """Arguments of torch.onnx.export for the exporter that builds on torch.export."""
    shapes = ({0: "batch"},) if dynamic else None
    return {"dynamo": True, "dynamic_shapes": shapes, "external_data": large}


def _older_exporter(dynamic: bool, outputs: list[str] | None) -> dict[str, Any]:
    """Arguments of torch.onnx.export for the exporter that traces the model."""
    axes = {name: {0: "batch"} for name in [INPUT, *(outputs or [])]}
    return {"dynamo": False, "dynamic_axes": axes if dynamic else None}


def _complete(path: Path, opset: int, facts: Mapping[str, Any]) -> None:
    """Check a file's opset, remove paths of this machine's source files, and write facts into it."""
    import onnx

    network = onnx.load(path, load_external_data=False)
    written = next(one.version for one in network.opset_import if not one.domain)
    if written != opset:
        raise ModelError(f"torch wrote opset {written} for this model, not opset {opset}")
    for part in _parts(network):
        part.ClearField("doc_string")
        notes = [note for note in part.metadata_props if not note.key.endswith("stack_trace")]
        del part.metadata_props[:]
        part.metadata_props.extend(notes)
    texts = {name: _text(fact) for name, fact in facts.items()}
    onnx.helper.set_model_props(network, texts)
    onnx.save(network, path)


def _text(fact: Any) -> str:
    """ONNX's metadata knows texts only: others become JSON."""
    return fact if isinstance(fact, str) else json.dumps(fact)


def _parts(network: Any) -> Iterator[Any]:
    """The ONNX model, and everything in it to which exporters attach notes and doc strings."""
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


class _FlatOutputs(nn.Module):
    """Returns tensors only: torch 2.8 cannot export a None among outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.model(images)))


FORMAT = ExportFormat(
    suffix=".onnx", noun="ONNX model", write=write, packages=("onnx", "onnxscript", "onnxruntime")
)
