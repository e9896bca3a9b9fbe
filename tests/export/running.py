"""Run what each export format writes as its user does, and compare with the checkpoint's model."""

import onnxruntime
import torch

from dcls_convert import load_converted
from dcls_convert.running.arguments import random_arguments
from dcls_convert.running.compare_outputs import max_relative_error, tensors_in
from dcls_convert.running.input_spec import image_inputs, with_batch

from ..checkpoints.folders import IMAGE

FLOAT32_ERROR = 1e-5  # relative; other implementations sum in other orders


def run_folder(folder, arguments, unconverted):
    model = load_converted(folder, model=unconverted, trust_code=True).eval()
    return model(*arguments.args, **arguments.kwargs)


def run_onnx(file, arguments, _):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    arrays = [tensor.numpy() for tensor in arguments.tensors()]
    outputs = session.run(None, dict(zip(names, arrays, strict=True)))
    return list(map(torch.from_numpy, outputs))


def run_pt2(file, arguments, _):
    return torch.export.load(file).module()(*arguments.args, **arguments.kwargs)


RUN = {"timm": run_folder, "onnx": run_onnx, "pt2": run_pt2}


def images(count):
    return random_arguments(with_batch(image_inputs(IMAGE), count), seed=1)


def error_of(checkpoint, written, arguments, build=lambda: None):
    """Return the relative error of what was written.

    `build` makes the unconverted network, for a checkpoint that does not name it.
    """
    with torch.no_grad():
        expected = run_folder(checkpoint, arguments, build())
        outputs = RUN.get(written.kind, RUN["timm"])(written.output, arguments, build())
    return max_relative_error(tensors_in(expected), tensors_in(outputs))
