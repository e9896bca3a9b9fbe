"""A conversion of a model on a GPU mixes no CPU tensors with its tensors, and gives the same result
as on the CPU.

The GPU is simulated: its tensors are in the CPU's memory, and mixing them with CPU tensors fails as
it does with a real GPU.
"""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from dcls_convert import convert_, fold_to_dense_
from dcls_convert.checkpoints.fingerprint import fingerprint_deviation, take_fingerprint
from dcls_convert.running.input_spec import image_inputs

from ..starts.networks import INPUT_SIZE, network, smooth_noise

pytestmark = [
    # torch scripts its decompositions when a dispatch mode is active.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
        reason="this torch cannot simulate a GPU",
    ),
]


DEVICE = torch.device("cuda", 0)
MOVING = {"_to_copy", "copy_"}  # operations that accept tensors of several devices
INDEXING = {"index", "index_put", "index_put_"}  # operations whose indices may be on the CPU


class OnSimulatedGpu(Tensor):
    """A tensor that claims to be on a GPU; its values are in the CPU tensor `value`."""

    @staticmethod
    def __new__(cls, value):
        tensor = Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            dtype=value.dtype,
            device=DEVICE,
            layout=value.layout,
        )
        tensor.value = value
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_on_cpu(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def run_on_cpu(func, args, kwargs):
    """Run an operation on the CPU, and wrap its result if it would be on the GPU.

    Fails if the operation gets tensors of both devices, or a CPU generator for the GPU.
    """
    name = func.overloadpacket.__name__
    gpu_tensors = [
        leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, OnSimulatedGpu)
    ]
    result_on_gpu = bool(gpu_tensors)
    if result_on_gpu and name not in MOVING:
        checked = args[0] if name in INDEXING else (args, kwargs)
        tensors = [leaf for leaf in tree_flatten(checked)[0] if isinstance(leaf, Tensor)]
        # Tensors without axes may be on the CPU.
        cpu_tensors = [
            tensor for tensor in tensors if not isinstance(tensor, OnSimulatedGpu) and tensor.dim()
        ]
        assert not cpu_tensors, f"{func} gets tensors of the CPU and of the GPU"
    if kwargs.get("device") is not None:
        result_on_gpu = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": "cpu" if result_on_gpu else kwargs["device"]}
    elif name == "copy_":
        result_on_gpu = isinstance(args[0], OnSimulatedGpu)
    has_generator = kwargs.get("generator") is not None
    assert not (result_on_gpu and has_generator), f"{func} gets a generator of the CPU"
    cpu_args, cpu_kwargs = tree_map_only(
        OnSimulatedGpu, lambda tensor: tensor.value, (args, kwargs)
    )
    result = func(*cpu_args, **cpu_kwargs)
    if not result_on_gpu:
        return result
    wrapper_of_value = {id(tensor.value): tensor for tensor in gpu_tensors}

    def wrap(tensor):
        if id(tensor) in wrapper_of_value:  # an argument that the operation changed in place
            return wrapper_of_value[id(tensor)]
        return OnSimulatedGpu(tensor)

    return tree_map_only(Tensor, wrap, result)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_on_cpu(func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Handles tensors made from lists, and lists made from tensors, which are not dispatched as
    operations or refuse subclasses.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.new_tensor, Tensor.tolist) and isinstance(args[0], OnSimulatedGpu):
            result = func(args[0].value, *args[1:], **kwargs)
            return OnSimulatedGpu(result) if isinstance(result, Tensor) else result
        if func is torch.tensor and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


@contextlib.contextmanager
def simulated_gpu():
    """Simulate a GPU inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        # Operations of cuDNN do not run on the CPU.
        patch.setattr(torch.backends.cudnn, "enabled", False)
        # Let `nn.Module.to` replace parameters, since it cannot set their data to a subclass.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        torch._C._ensureCUDADeviceGuardSet()
        with _Numbers(), _Operations():
            yield


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"init": "random"}, id="random"),
        pytest.param({"calibration": [smooth_noise(2)]}, id="calibration"),
    ],
)
def test_a_model_on_a_gpu_stays_there_and_gives_the_same_result_as_on_the_cpu(options, monkeypatch):
    """New tensors are on the GPU by default, so CPU generators need an explicit CPU device.

    The test runs in float64, since another order of summation moves float32 solutions by more than
    rounding.
    """
    # A simulated tensor is of a subclass; convolutions with such weights stay otherwise.
    monkeypatch.setattr("dcls_convert.layers.conv_classes._why_weight_unusual", lambda _: None)
    options = {"dilated_size": 9, "budget": 60, "input_size": INPUT_SIZE, **options}
    cpu_model = network(bias=True).double()
    gpu_model = network(bias=True).double()
    convert_(cpu_model, **options)
    with simulated_gpu():
        gpu_model.to("cuda")
        with torch.device("cuda"):
            convert_(gpu_model, **options)
        cpu_state = cpu_model.state_dict()
        for name, tensor in gpu_model.state_dict().items():
            assert isinstance(tensor, OnSimulatedGpu), name
            torch.testing.assert_close(tensor.value, cpu_state[name], rtol=0, atol=1e-5)
        inputs = image_inputs(INPUT_SIZE)
        before = take_fingerprint(gpu_model, inputs)
        assert fingerprint_deviation(before, take_fingerprint(cpu_model, inputs)) < 1e-5
        assert fold_to_dense_(gpu_model) == 3
        assert fingerprint_deviation(take_fingerprint(gpu_model, inputs), before) < 1e-5
