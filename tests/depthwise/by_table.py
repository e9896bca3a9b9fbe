"""Convolve as a layer does: in the way that the table gives."""

from dcls_convert.depthwise.case import Case, computed_dtype
from dcls_convert.depthwise.table import TORCH, find_way


def case_of(input, kernel, bias, stride, padding, dilation, groups):
    """Return the case of arguments as in `F.conv2d`, and its tensors."""
    tensors = [tensor for tensor in (input, kernel, bias) if tensor is not None]
    case = Case(
        device=input.device,
        dtype=computed_dtype(*tensors),
        input_shape=tuple(input.shape),
        kernel_shape=tuple(kernel.shape),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )
    return case, tensors


def conv2d(input, kernel, bias, *arguments):
    """Compute `F.conv2d`."""
    case, tensors = case_of(input, kernel, bias, *arguments)
    way = TORCH if case.dtype is None else find_way(case, *tensors)
    return way.convolve(input, kernel, bias, case)
