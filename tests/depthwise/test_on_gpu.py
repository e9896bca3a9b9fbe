"""The depthwise convolution on a GPU gives what it gives on the CPU."""

import pytest
import torch

from dcls_convert.depthwise.choice import VARIABLE, fastest_conv2d

from ..layers.common import FLOAT64_ATOL, randn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("side", [7, 14, 28])
def test_wide_windows_are_convolved_as_on_the_cpu(monkeypatch, side, memory_format):
    monkeypatch.setenv(VARIABLE, "matmul")
    maps = randn(3, 5, side, side).to(memory_format=memory_format)
    kernel = randn(5, 1, 17, 17, seed=1)
    results = []
    for device in ("cpu", "cuda"):
        pair = [tensor.to(device).requires_grad_() for tensor in (maps, kernel)]
        output = fastest_conv2d(*pair, None, (1, 1), (8, 8), (1, 1), 5)
        gradients = torch.autograd.grad(output.square().sum(), pair)
        results.append([tensor.detach().cpu() for tensor in (output, *gradients)])
        assert output.is_contiguous(memory_format=memory_format)
    for on_cpu, on_gpu in zip(*results, strict=True):
        atol = FLOAT64_ATOL * on_gpu.abs().max().item()
        torch.testing.assert_close(on_cpu, on_gpu, rtol=FLOAT64_ATOL, atol=atol)
