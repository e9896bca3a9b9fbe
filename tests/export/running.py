"""Run what each export format writes, and compare its outputs with the original model's."""

import onnxruntime
import torch

from dcls_convert import load_converted
from dcls_convert.networks.model_outputs import max_relative_error, tensors_in

from ..checkpoints.folders import IMAGE

FLOAT32_ERROR = 1e-5  # relative; other implementations sum in other orders


def outputs_of(checkpoint, *inputs):
    with torch.no_grad():
        return load_converted(checkpoint, trust_code=True).eval()(*inputs)


def run_by_onnxruntime(file, *inputs):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    arrays = [tensor.numpy() for tensor in inputs]
    outputs = session.run(None, dict(zip(names, arrays, strict=True)))
    return list(map(torch.from_numpy, outputs))


def run_by_torch_export(file, *inputs):
    with torch.no_grad():
        return torch.export.load(file).module()(*inputs)


# By format: how users run what it writes.
RUN = {"timm": outputs_of, "onnx": run_by_onnxruntime, "pt2": run_by_torch_export}


def error_of(checkpoint, written, batch=2):
    """Return the relative error of what was written, on new random images."""
    return error_for(checkpoint, written, torch.randn(batch, *IMAGE))


def error_for(checkpoint, written, *inputs):
    """Return the relative error of what was written, for these inputs."""
    expected = outputs_of(checkpoint, *inputs)
    outputs = RUN[written.format](written.output, *inputs)
    return max_relative_error(tensors_in(expected), tensors_in(outputs))
