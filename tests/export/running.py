"""Run what each export format writes, and compare its outputs with the original model's."""

import onnxruntime
import torch
from torch.utils._pytree import tree_leaves

from dcls_convert import load_converted
from dcls_convert.export.formats import EXPORT_FORMATS
from dcls_convert.networks.model_outputs import max_relative_error

from ..checkpoints.folders import IMAGE

FLOAT32_ERROR = 1e-5  # relative; other implementations sum in other orders


def outputs_of(checkpoint, images):
    with torch.no_grad():
        return load_converted(checkpoint, trust_code=True).eval()(images)


def run_by_onnxruntime(file, images):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return list(map(torch.from_numpy, outputs))


def run_by_torch_export(file, images):
    with torch.no_grad():
        return torch.export.load(file).module()(images)


# By format: how users run what it writes.
RUN = {"timm": outputs_of, "onnx": run_by_onnxruntime, "pt2": run_by_torch_export}


def error_of(checkpoint, written, batch=2):
    """Return the relative error of what was written, on new random images."""
    images = torch.randn(batch, *IMAGE)
    outputs = outputs_of(checkpoint, images)
    if EXPORT_FORMATS[written.format].flat_outputs:
        outputs = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return max_relative_error(outputs, RUN[written.format](written.output, images))
