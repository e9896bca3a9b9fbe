"""A folded model as one file: ONNX, or a program of torch.export."""

import io
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..networks.outputs import tensors_in
from .folding import FOLDING_BOUND, Exported, ExportFormat, Folded, Folding, export_file

ONNX_BOUND = 1e-3  # relative error; onnxruntime has other kernels, and folds constants beforehand
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # onnxruntime 1.29 and later, which else sends names of models to its makers
MOST_IN_ONE_FILE = 1_900_000_000  # bytes of weights; a protobuf, and so an ONNX file, ends at 2 GiB
LOAD_ONNX = 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}")\n'
LOAD_PT2 = 'import torch\n\nmodel = torch.export.load("{folder}").module()\n'


def write_onnx(folding: Folding) -> Folded:
    """Write the file, and a second one for the weights if they are too large for one."""
    os.environ.setdefault(NO_TELEMETRY, "1")  # before anything imports onnxruntime, which begins then
    import onnxruntime

    size = sum(t.numel() * t.element_size() for t in folding.model.state_dict().values())

    def export(path: Path, images: Tensor, dynamic: bool) -> Exported:
        torch.onnx.export(
            folding.model if isinstance(folding.outputs[0], Tensor) else _FlatOutputs(folding.model),
            (images,),
            path,
            dynamo=True,
            input_names=["input"],
            output_names=["output"] if isinstance(folding.outputs[0], Tensor) else None,
            dynamic_shapes=({0: "batch"},) if dynamic else None,
            external_data=size > MOST_IN_ONE_FILE,
            verbose=False,
        )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (entry,) = session.get_inputs()
        return lambda images: tuple(map(torch.from_numpy, session.run(None, {entry.name: images.numpy()})))

    # ONNX knows no structure: its outputs are the tensors in their order.
    flat = tuple(tuple(tensors_in(outputs)) for outputs in folding.outputs)
    return export_file(replace(folding, outputs=flat), ONNX_BOUND, export, LOAD_ONNX)


class _FlatOutputs(nn.Module):
    """Returns tensors only: torch 2.8 cannot export a None among outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.model(images)))


def write_pt2(folding: Folding) -> Folded:
    def export(path: Path, images: Tensor, dynamic: bool) -> Exported:
        shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
        program = io.BytesIO()  # where the disk is full, torch's own writer of files ends the process
        torch.export.save(torch.export.export(folding.model, (images,), dynamic_shapes=shapes), program)
        path.write_bytes(program.getbuffer())
        return torch.export.load(path).module()

    return export_file(folding, FOLDING_BOUND, export, LOAD_PT2)


ONNX = ExportFormat(suffix=".onnx", noun="ONNX model", write=write_onnx, packages=("onnx", "onnxscript", "onnxruntime"))
PT2 = ExportFormat(suffix=".pt2", noun="program of torch.export", write=write_pt2)
