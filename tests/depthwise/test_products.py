"""Compare matrix products on a GPU, in each precision, with float64 on the CPU."""

import pytest
import torch
import torch.nn.functional as F

from dcls_convert.depthwise import products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISIONS["tf32"] = torch.float32
CHANNELS = 6
WINDOW = 9


@pytest.fixture(params=PRECISIONS)
def dtype(request):
    if request.param == "tf32":
        torch.set_float32_matmul_precision("high")
    yield PRECISIONS[request.param]
    torch.set_float32_matmul_precision("highest")


def output_and_gradients(convolve, images, kernel, grad):
    images = images.detach().requires_grad_()
    kernel = kernel.detach().requires_grad_()
    output = convolve(images, kernel)
    gradients = torch.autograd.grad(output, (images, kernel), grad)
    return [output.detach(), *gradients]


def convolve_by_torch(images, kernel):
    return F.conv2d(images, kernel, padding=WINDOW // 2, groups=CHANNELS)


def convolve_by_products(images, kernel):
    padding = (WINDOW // 2, WINDOW // 2)
    return products.depthwise_by_products(images, None, kernel, dtype=kernel.dtype, padding=padding)


@pytest.mark.parametrize("side", [7, 13, 16, 30])
@pytest.mark.parametrize("images", [1, 4])
def test_products_lose_at_most_twice_what_torch_loses(dtype, side, images):
    torch.manual_seed(0)
    shapes = [(images, CHANNELS, side, side), (CHANNELS, 1, WINDOW, WINDOW)]
    tensors = [torch.randn(shape).to("cuda", dtype) for shape in (*shapes, shapes[0])]
    exact = output_and_gradients(convolve_by_torch, *[tensor.cpu().double() for tensor in tensors])
    by_products = output_and_gradients(convolve_by_products, *tensors)
    by_torch = output_and_gradients(convolve_by_torch, *tensors)
    rounding = torch.finfo(dtype).eps
    if torch.get_float32_matmul_precision() == "high":
        rounding = torch.finfo(torch.float16).eps  # TF32 has as many digits
    for result, torch_result, expected in zip(by_products, by_torch, exact, strict=True):
        error = (result.cpu().double() - expected).norm() / expected.norm()
        torch_error = (torch_result.cpu().double() - expected).norm() / expected.norm()
        assert error <= 2 * torch_error + rounding
