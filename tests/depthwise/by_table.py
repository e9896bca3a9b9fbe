"""Convolve as a layer does: by the algorithm that the table gives."""

from dcls_convert.depthwise.eager import is_counting_flops, is_eager
from dcls_convert.depthwise.table import TORCH, ConvSpec, computed_dtype, find_algorithm


def spec_of(input, kernel, bias, stride, padding, dilation, groups):
    """Return the spec of arguments as in `F.conv2d`."""
    return ConvSpec(
        device=input.device,
        dtype=computed_dtype(input, kernel, bias),
        input_shape=tuple(input.shape),
        kernel_shape=tuple(kernel.shape),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


def conv2d(input, kernel, bias, *arguments):
    """Compute `F.conv2d`."""
    spec = spec_of(input, kernel, bias, *arguments)
    tensors = [tensor for tensor in (input, kernel, bias) if tensor is not None]
    eager = is_eager(*tensors) and not is_counting_flops()
    algorithm = TORCH if spec.dtype is None else find_algorithm(spec, *tensors, eager=eager)
    return algorithm.prepare(spec, input, bias)(input, bias, kernel)
