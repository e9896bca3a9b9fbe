"""Check whether Core ML's converter keeps the kernels of a converted model, unfolded and folded.

    python benchmarks/coreml.py

Needs coremltools, but no Mac, since no model is run: the constant weights in the converted program
are compared with the kernels. Prints the largest relative errors.
"""

import copy
import logging
import os
import warnings

os.environ["TQDM_DISABLE"] = "1"  # before coremltools is imported, which draws bars

import coremltools
import numpy as np
import timm
import torch
from torch import nn

import dcls_convert

NAME = "test_convnext"
IMAGES = (1, 3, 96, 96)


def kernels_of(folded: nn.Module) -> list[np.ndarray]:
    """Return the kernels of all convolutions larger than 1x1."""
    return [
        module.weight.detach().numpy()
        for module in folded.modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
    ]


def converted_by_tracing(model: nn.Module):
    with torch.no_grad():
        program = torch.jit.trace(model, torch.randn(IMAGES), check_trace=False)
    return convert(program, inputs=[coremltools.TensorType(name="input", shape=IMAGES)])


def converted_from_export(model: nn.Module):
    program = torch.export.export(model, (torch.randn(IMAGES),))
    return convert(program.run_decompositions({}))


def convert(program, **options):
    return coremltools.convert(
        program,
        convert_to="mlprogram",
        compute_precision=coremltools.precision.FLOAT32,
        skip_model_load=True,
        **options,
    )


def largest_error(program, kernels: list[np.ndarray]) -> float:
    """Return the largest relative error between a kernel and the nearest constant of its shape.

    It is infinite if no constant has the shape of a kernel.
    """
    operations = program._mil_program.functions["main"].find_ops(op_type="conv")
    constants = [
        operation.weight.val for operation in operations if operation.weight.val is not None
    ]
    largest = 0.0
    for kernel in kernels:
        same_shape = [constant for constant in constants if constant.shape == kernel.shape]
        errors = [np.linalg.norm(constant - kernel) for constant in same_shape]
        largest = max(largest, min(errors, default=np.inf) / np.linalg.norm(kernel))
    return largest


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    model = timm.create_model(NAME).eval()
    dcls_convert.convert_(model, init="random", positions="uniform", input_size=IMAGES[1:])
    folded = copy.deepcopy(model)
    dcls_convert.fold_to_dense_(folded)
    kernels = kernels_of(folded)
    print(
        f"{NAME}, {len(kernels)} kernels, "
        f"coremltools {coremltools.__version__}, torch {torch.__version__}"
    )
    for way in (converted_by_tracing, converted_from_export):
        for state, network in (("unfolded", model), ("folded", folded)):
            error = largest_error(way(copy.deepcopy(network)), kernels)
            print(f"{way.__name__.replace('_', ' ')}, {state}: largest relative error {error:.2g}")


if __name__ == "__main__":
    main()
