"""torch.compile makes one graph of a network for a GPU, whatever the batch; with fake tensors."""

import contextlib

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import dcls_convert
from dcls_convert.depthwise import devices

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),
]


class Driver:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def as_with_a_gpu():
    """Let torch and this package trace as if an H100 were here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils._triton.has_triton", lambda: True)
        patch.setattr(triton.runtime.driver, "_active", Driver())
        patch.setattr(devices, "_why_no_blocks", lambda device: None)
        patch.setattr(devices, "_adds_three_taps", lambda device: True)
        torch.compiler.reset()
        yield
        torch.compiler.reset()


def put_on_fake_gpu_(model):
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
            setattr(module, name, nn.Parameter(fake, requires_grad=parameter.requires_grad))


def graphs_of(model, images):
    """Compile a training network on the GPU for each of the images, whose sizes are dynamic."""
    graphs = []

    def trace_only(graph, _):
        graphs.append(graph)
        outputs = graph.graph.output_node().args[0]
        return lambda *inputs: tuple(node.meta["example_value"] for node in outputs)

    with as_with_a_gpu(), FakeTensorMode(shape_env=ShapeEnv()):
        put_on_fake_gpu_(model)
        compiled = torch.compile(model.train(), backend=trace_only, fullgraph=True)
        for shape, dynamic_axes in images:
            image = torch.empty(shape, device="cuda")
            for axis in dynamic_axes:
                torch._dynamo.mark_dynamic(image, axis)
            compiled(image)
    return graphs


def test_a_network_is_one_graph_of_blocks_for_batches_of_any_size():
    model = timm.create_model("test_convnext")
    dcls_convert.convert_(model, dilated_size=9, init="random", input_size=(3, 64, 64))
    (graph,) = graphs_of(model, [((batch, 3, 64, 64), [0]) for batch in (4, 6, 9)])
    names = [str(node.target) for module in graph.modules() for node in module.graph.nodes]
    launches = [name for name in names if "triton_kernel_wrapper" in name]
    converted = sum(isinstance(module, dcls_convert.DclsConv2d) for module in model.modules())
    assert converted > 0
    assert len(launches) == 8 * converted  # 3 in the forward pass, 5 in the backward pass


@pytest.mark.parametrize("interpolation", ["bilinear", "gaussian"])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_of_every_kind_are_one_graph_for_images_of_any_size(interpolation, frozen):
    layer = dcls_convert.DclsConv2d(
        8,
        8,
        groups=8,
        kernel_count=9,
        dilated_kernel_size=9,
        padding=4,
        interpolation=interpolation,
    )
    layer.requires_grad_(not frozen)
    images = [((batch, 8, side, side + 8), [0, 2, 3]) for batch, side in ((4, 64), (6, 96))]
    assert len(graphs_of(layer, images)) == 1
