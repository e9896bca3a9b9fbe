"""The depthwise convolution on a GPU gives what it gives on the CPU."""

import pytest
import torch
import torch.nn.functional as F

from dcls_convert.depthwise import table, why_no_blocks

from .by_table import conv2d, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(autouse=True)
def _blocks_are_taken():
    """Without blocks, everything below would compare torch with itself."""
    assert why_no_blocks(torch.device("cuda", torch.cuda.current_device())) is None


every_format = pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)


@every_format
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("side", "window"), [(7, 17), (28, 17), (30, 31), (56, 9)])
def test_blocks_of_small_integers_are_exact(dtype, stride, side, window, memory_format):
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=generator).double()

    padding = window // 2
    arguments = ((stride, stride), (padding, padding), (1, 1), 5)
    exact = [integers(3, 5, side, side), integers(5, 1, window, window), integers(5)]
    exact = [tensor.requires_grad_() for tensor in exact]
    leaves = [tensor.detach().to("cuda", dtype) for tensor in exact]
    leaves[0] = leaves[0].to(memory_format=memory_format)
    leaves = [tensor.requires_grad_() for tensor in leaves]
    expected = F.conv2d(*exact, *arguments)
    assert table.choose_algorithm(spec_of(*leaves, *arguments)).name == "blocks"
    output = conv2d(*leaves, *arguments)
    gradient = integers(*output.shape)
    results = [output, *torch.autograd.grad(output, leaves, gradient.to("cuda", dtype))]
    for result, exact_result in zip(
        results, [expected, *torch.autograd.grad(expected, exact, gradient)], strict=True
    ):
        assert torch.equal(result.cpu(), exact_result.to(dtype))
