"""Convolve as a layer does: in the way that the table gives."""

from dcls_convert.depthwise.eager import is_counting_flops, is_eager
from dcls_convert.depthwise.table import TORCH, Case, computed_dtype, find_way


def case_of(input, kernel, bias, stride, padding, dilation, groups):
    """Return the case of arguments as in `F.conv2d`."""
    return Case(
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
    case = case_of(input, kernel, bias, *arguments)
    tensors = [tensor for tensor in (input, kernel, bias) if tensor is not None]
    eager = is_eager(*tensors) and not is_counting_flops()
    way = TORCH if case.dtype is None else find_way(case, *tensors, eager=eager)
    return way.prepare(case, input, bias)(input, bias, kernel)
