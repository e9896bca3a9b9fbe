"""Launch layers in many situations on a GPU that is not there: a program of its own.

Its arguments are a folder for what is compiled, and perhaps `compiled`. Nothing is computed: the
program looks at whether blocks are taken, at what is launched, and at whether tensors begin where
the compiled programs expect.
"""

import contextlib
import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch._dynamo.variables.builder
import torch.utils._triton
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from dcls_convert.depthwise import launching
from dcls_convert.depthwise.launching import LOAD_BYTES, Pass
from dcls_convert.layers import conv_cache
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.layers.gpu_construction import construct_windows

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fake_gpu import FakeGpu

GPU = FakeGpu(Path(sys.argv[1]))
GPU.take_blocks_on_cpu()
torch.set_num_threads(1)
CHANNELS = 16
FORWARD = 3  # launches
STEP = 8  # of a forward and a backward pass


def check_every_pass():
    """Each pass launches what Triton launches, on the same tensors; they begin where they must."""
    by_driver = Pass.by_driver

    def checked_by_driver(one_pass, tensors):
        run = by_driver(one_pass, tensors)
        assert run is not None
        compare_with_triton(one_pass, run, tensors)

        def checked_run(*tensors):
            check_addresses(one_pass, tensors)
            return run(*tensors)

        return checked_run

    Pass.by_driver = checked_by_driver


def check_addresses(one_pass, tensors):
    by_name = dict(zip(one_pass.given, tensors, strict=True))
    for launch, names in one_pass.launches:
        for parameter, name in zip(launch.kernel.params, names, strict=False):
            if name in by_name and not parameter.do_not_specialize_on_alignment:
                assert by_name[name].data_ptr() % LOAD_BYTES == 0, (launch.kernel.__name__, name)


def compare_with_triton(one_pass, run, tensors):
    kernels = [(launch.kernel, len(names)) for launch, names in one_pass.launches]
    ours = GPU.note(kernels, lambda: run(*tensors))
    theirs = GPU.note(kernels, lambda: one_pass.by_triton(*tensors))
    assert len(ours) == len(theirs) == len(kernels)
    address_of = {hex(tensor.data_ptr()): hex(tensor.data_ptr()) for tensor in tensors}
    for line, expected in zip(ours, theirs, strict=True):
        for word, expected_word in zip(line.split(), expected.split(), strict=True):
            if expected_word.startswith("0x"):  # a tensor of the pass may be elsewhere
                assert address_of.setdefault(expected_word, word) == word, (line, expected)
            else:
                assert word == expected_word, (line, expected)
    groups = one_pass.scratch.groups if one_pass.scratch is not None else ()
    sharing = sum(len(group) - 1 for group in groups)
    assert len(set(address_of.values())) == len(address_of) - sharing


@contextlib.contextmanager
def expect(count, situation):
    before = GPU.launches()
    yield
    assert GPU.launches() - before == count, (situation, GPU.launches() - before)


def layer_of(**options):
    options = {"groups": CHANNELS, "kernel_count": 34, "dilated_kernel_size": 17, **options}
    padding = options["dilated_kernel_size"] // 2
    return DclsConv2d(CHANNELS, CHANNELS, padding=padding, **options)


LAYER = layer_of()
IMAGES = torch.randn(2, CHANNELS, 14, 14)


def step(layer=LAYER, images=IMAGES):
    images = images.detach().requires_grad_()
    layer(images).sum().backward()


def unaligned(tensor):
    """Return an equal tensor that begins at an odd address."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return memory.view(tensor.shape).copy_(tensor)


def steps_of_ordinary_tensors():
    with expect(STEP, "a step"):
        step()
    with expect(FORWARD, "inference"), torch.no_grad():
        LAYER(IMAGES)
    with expect(STEP, "one image"):
        step(images=IMAGES[:1])
    with expect(STEP, "a wide map"):
        step(images=torch.randn(2, CHANNELS, 3, 500))
    with expect(2, "no image"):  # by torch, with the kernel made in one launch
        step(images=IMAGES[:0])
    with expect(2 * STEP, "a layer twice"):
        images = IMAGES.clone().requires_grad_()
        LAYER(LAYER(images)).sum().backward()


def steps_of_odd_memory():
    with expect(STEP, "unaligned images"):
        images = unaligned(IMAGES).requires_grad_()
        outputs = LAYER(images)
        outputs.backward(unaligned(torch.randn_like(outputs)))
    with expect(STEP, "unaligned parameters"):
        layer = copy.deepcopy(LAYER)
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(unaligned(parameter.detach())))
        step(layer)
    with expect(STEP, "positions in another order"):
        layer = copy.deepcopy(LAYER)
        other = layer.positions.detach().transpose(0, 1).contiguous().transpose(0, 1)
        layer.positions = torch.nn.Parameter(other)
        step(layer)
    with expect(STEP, "half of the channels"):
        images = torch.randn(2, 2 * CHANNELS, 14, 14)
        step(images=images.to(memory_format=torch.channels_last)[:, :CHANNELS])


def steps_of_other_dtypes():
    with expect(STEP, "autocast"), torch.autocast("cpu", torch.bfloat16):
        step()
    with expect(STEP, "a layer in bfloat16"):
        step(copy.deepcopy(LAYER).bfloat16(), IMAGES.bfloat16())
    with expect(0, "float64"):
        step(copy.deepcopy(LAYER).double(), IMAGES.double())


def steps_of_other_layers():
    with expect(STEP, "stride 2"):
        step(layer_of(stride=2), torch.randn(2, CHANNELS, 33, 47))
    with expect(STEP, "windows of Gaussians"):
        step(layer_of(interpolation="gaussian"))
    for name, launches in (("weight", 3 + 3), ("positions", 3 + 3), ("bias", 3)):
        with expect(launches, f"only {name}"):
            layer = copy.deepcopy(LAYER).requires_grad_(False)
            getattr(layer, name).requires_grad_()
            layer(IMAGES).sum().backward()
            assert getattr(layer, name).grad is not None
    with expect(2, "a dense layer"), torch.autocast("cpu", torch.bfloat16):
        dense = DclsConv2d(CHANNELS, 8, kernel_count=5, dilated_kernel_size=7, padding=3)
        step(dense)
    for shape in ((8, 4, 5), (4, 8, 5)):  # as many kernels
        with expect(2, "dense windows"):
            weight = torch.randn(shape, requires_grad=True)
            windows = construct_windows(weight, torch.randn(2, *shape), (7, 7))
            assert windows.shape == (*shape[:2], 7, 7)
            windows.sum().backward()


def steps_of_torchs_mechanisms():
    with expect(STEP + FORWARD, "checkpoint"):
        images = IMAGES.clone().requires_grad_()
        checkpoint(LAYER, images, use_reentrant=False).sum().backward()
    with expect(FORWARD, "gradients of gradients"):
        images = IMAGES.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(LAYER(images).sum(), images, create_graph=True)
        gradient.square().sum().backward()
    with expect(0, "vmap"):
        torch.func.vmap(copy.deepcopy(LAYER).eval())(IMAGES[None])


def steps_of_many_sizes():
    programs = len(launching._programs)
    layer = layer_of()
    sides = range(9, 12 + conv_cache.MAX_CONVS)
    for side in sides:
        with torch.no_grad():
            layer(torch.randn(1, CHANNELS, 9, side))
    assert len(launching._programs) == programs, "hardly any size needs a new program"
    assert len(layer._convs) == conv_cache.MAX_CONVS


def steps_of_threads():
    layer = layer_of()
    with expect(6 * 20 * STEP, "six threads"), ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: [step(layer) for _ in range(20)], range(6)))


def steps_by_triton():
    """Where the function in C cannot be built."""
    launch_function = launching.launch_function
    launching.launch_function = lambda: None
    with expect(STEP, "a step by Triton"):
        step(layer_of())
    launching.launch_function = launch_function


def compiled_steps():
    """As far as AOT: inductor's code for a GPU cannot run here."""
    torch.utils._triton.has_triton = lambda *arguments: True
    torch._dynamo.variables.builder.has_triton = lambda *arguments: True
    gaussian = layer_of(interpolation="gaussian")
    frozen = layer_of().requires_grad_(False)
    for layer, launches in ((layer_of(), STEP), (gaussian, STEP), (frozen, 3 + 3)):
        torch.compiler.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, backend=graphs, fullgraph=True)
        for images, side in ((2, 14), (3, 20), (5, 33)):
            with expect(launches, "compiled"):
                step(compiled, torch.randn(images, CHANNELS, side, side + 1))
        assert graphs.frame_count == 2, "one for images of any size, after that for the first size"


if __name__ == "__main__":
    if "compiled" in sys.argv:
        compiled_steps()
    else:
        by_driver = Pass.by_driver
        check_every_pass()
        steps_of_ordinary_tensors()
        steps_of_odd_memory()
        steps_of_other_dtypes()
        steps_of_other_layers()
        steps_of_torchs_mechanisms()
        steps_of_many_sizes()
        launching.Pass.by_driver = by_driver
        steps_of_threads()
        steps_by_triton()
    print("ok")
