"""Run kernels in Triton's interpreter, and compare them with torch: a program of its own.

Triton reads TRITON_INTERPRET when it is first imported, so this cannot run in the process of other
tests. Give the names of functions below.
"""

import copy
import dataclasses
import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from dcls_convert.depthwise import block_plan, table
from dcls_convert.depthwise.blocks import convolver_of_windows
from dcls_convert.layers.dcls_conv import DclsConv2d

torch.set_num_threads(1)
table.preference = lambda: "blocks"
# Small maps, cut into parts as large ones are.
block_plan.MIN_PROGRAMS = 12
block_plan.MIN_BLOCKS_IN_PART = 2
FLOAT32_ERROR = 1e-6  # relative, in Frobenius norms
HALVES = (torch.bfloat16, torch.float16)
CHANNELS = 2


def patch_interpreter():
    """Multiply bfloat16 as numbers: the interpreter (Triton 3.8) multiplies its bits as integers.

    And omit its checks for overflow, which take most of its time.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    dot = type(builder).create_dot

    def as_float32(handle):
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, interpreter.tl.float32)

    def create_dot(self, left, right, *rest):
        return dot(self, as_float32(left), as_float32(right), *rest)

    type(builder).create_dot = create_dot


patch_interpreter()


def integers(*shape):
    return torch.randint(-2, 3, shape).float()


def output_and_gradients(function, leaves, gradient):
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient(output))]


def check_exact(size, window, stride, dtype, channels_last, input_dtype=None):
    """The output and all gradients of small integers are those of torch, to the bit."""
    torch.manual_seed(0)
    format = torch.channels_last if channels_last else torch.contiguous_format
    padding = (window[0] // 2, window[1] // 2)
    leaves = [integers(2, CHANNELS, *size), integers(CHANNELS, 1, *window), integers(CHANNELS)]
    leaves[0] = leaves[0].to(memory_format=format)
    outputs = F.conv2d(*leaves, stride, padding, groups=CHANNELS)
    gradient = integers(*outputs.shape)

    def by_torch(*tensors):
        return F.conv2d(*tensors, stride, padding, groups=CHANNELS)

    def by_blocks(maps, kernel, bias):
        output = convolver_of_windows(maps, window, stride, dtype, has_bias=True)(
            maps, bias, kernel
        )
        assert output.dtype == dtype
        assert output.is_contiguous(memory_format=format)
        return output

    expected = output_and_gradients(by_torch, leaves, lambda output: gradient)
    typed = [tensor.to(dtype) for tensor in leaves]
    typed[0] = leaves[0].to(input_dtype or dtype)
    results = output_and_gradients(by_blocks, typed, lambda output: gradient.to(dtype))
    for result, exact in zip(results, expected, strict=True):
        assert torch.equal(result, exact.to(result.dtype)), (size, window, stride, dtype)


def few_exact():
    check_exact((14, 7), (9, 9), (1, 1), torch.bfloat16, True, input_dtype=torch.float32)
    check_exact((7, 9), (17, 9), (2, 1), torch.float16, channels_last=False)


def all_exact():
    sizes = [(7, 7), (14, 14), (16, 8), (20, 13), (9, 23), (30, 30)]
    windows = [(9, 9), (17, 17), (31, 9), (13, 31), (31, 31), (7, 51)]
    ways = itertools.product((torch.float32, *HALVES), (True, False), ((1, 1), (2, 2), (2, 1)))
    for number, (dtype, channels_last, stride) in enumerate(ways):
        for size, window in zip(sizes, windows[number % 6 :] + windows[: number % 6], strict=True):
            check_exact(size, window, stride, dtype, channels_last)


def layer_of(interpolation, size, stride=1):
    torch.manual_seed(0)
    layer = DclsConv2d(
        CHANNELS,
        CHANNELS,
        groups=CHANNELS,
        kernel_count=5,
        dilated_kernel_size=size,
        padding=tuple(side // 2 for side in size),
        stride=stride,
        interpolation=interpolation,
    )
    with torch.no_grad():  # on cells and between them, inside the window, at its border, beyond
        layer.positions.mul_(2 * max(size))
        layer.positions[..., ::2].round_()
    return layer


def prefer(way, layer):
    table.preference = lambda: way
    layer._convs.clear()


def results_of_layer(layer, images, way):
    prefer(way, layer)
    leaves = [images, *layer.parameters()]
    output = layer(images)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(output.shape, generator=generator)
    gradients = torch.autograd.grad(output, leaves, gradient, create_graph=True)
    second = torch.autograd.grad(
        sum(value.square().sum() for value in gradients), leaves, allow_unused=True
    )
    batch = torch.randn((2, *output.shape), generator=generator)
    batched = torch.autograd.grad(layer(images), leaves, batch, is_grads_batched=True)
    plain = torch.autograd.grad(layer(images), leaves, gradient)
    return [output, *gradients, *plain, *batched, *(value for value in second if value is not None)]


def layers():
    """Outputs and gradients, plain, batched and twice, are torch's: all three interpolations."""
    for interpolation in ("bilinear", "triangle", "gaussian"):
        layer = layer_of(interpolation, (9, 11), stride=2 if interpolation == "bilinear" else 1)
        images = torch.randn(2, CHANNELS, 9, 10).requires_grad_()
        ours = results_of_layer(layer, images, "blocks")
        theirs = results_of_layer(layer, images, "torch")
        for result, expected in zip(ours, theirs, strict=True):
            error = (result - expected).norm() / expected.norm()
            assert error < FLOAT32_ERROR, (interpolation, float(error))


def rare_layers():
    """Gradients are torch's where few tensors are learnt."""
    layer = layer_of("bilinear", (9, 9)).requires_grad_(False)
    images = torch.randn(2, CHANNELS, 9, 10)
    for leaf in (images, layer.weight, layer.positions, layer.bias):
        leaf.requires_grad_()
        for create_graph in (False, True):
            found = []
            for way in ("torch", "blocks"):
                prefer(way, layer)
                loss = layer(images).square().sum()
                found += torch.autograd.grad(loss, leaf, create_graph=create_graph)
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
        leaf.requires_grad_(False)


def clamped_positions():
    """Positions are clamped in training alone; earlier passes keep their gradients."""
    images = torch.randn(1, CHANNELS, 8, 8)
    layer = layer_of("bilinear", (9, 9))
    before = layer.positions.detach().clone()
    assert before.abs().max() > 4
    layer.eval()(images)
    assert torch.equal(layer.positions, before)
    outputs = layer(images)
    layer.train()(images)
    assert torch.equal(layer.positions, before.clamp(-4, 4))
    computed = before.clone()  # no parameter: it may be a view, as under FSDP1
    torch.func.functional_call(layer, {"positions": computed}, (images,))
    assert torch.equal(computed, before)
    inside = torch.randn_like(before).clamp(-4, 4)  # not rounded, although their cells are
    layer.positions.data.copy_(inside)
    layer(images)
    assert torch.equal(layer.positions, inside)
    layer.positions.data.copy_(before.clamp(-4, 4))
    outputs.sum().backward()
    unclamped = layer.positions.grad.clone()
    layer.positions.grad = None
    layer(images).sum().backward()
    assert torch.equal(layer.positions.grad, unclamped)


def dense_layers():
    """Dense layers, whose kernels are made in one launch, are torch's."""
    for size in ((7, 5), (17, 17), (2, 3)):
        torch.manual_seed(0)
        layer = DclsConv2d(4, 6, kernel_count=5, dilated_kernel_size=size, padding=size[0] // 2)
        with torch.no_grad():
            layer.positions.mul_(10)
            layer.positions[..., ::2].round_()
        images = torch.randn(2, 4, 9, 10).requires_grad_()
        found = []
        for way, copied in (("torch", copy.deepcopy(layer)), ("blocks", layer)):
            prefer(way, copied)
            leaves = [images, *copied.parameters()]
            output = copied(images)
            generator = torch.Generator().manual_seed(1)
            gradient = torch.randn(output.shape, generator=generator)
            found.append([output, *torch.autograd.grad(output, leaves, gradient)])
            found[-1].append(copied.positions)
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print(name, "ok", flush=True)
