"""A conversion mixes no tensors of the CPU with those of a model on a GPU, and gives what it gives
on the CPU.

The GPU is simulated: its tensors live in the CPU's memory, and are refused where a GPU's would be.
"""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from dcls_convert import convert_, fold_to_dense_
from dcls_convert.checkpoints.fingerprint import deviation, take_fingerprint

from ..fitting.networks import SMALL, network, smooth_noise

# torch compiles decompositions of its own where operations are looked at.
pytestmark = [
    pytest.mark.usefixtures("quick_fit"),  # operations on the simulated GPU take long
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
        reason="a newer torch can have such a GPU",
    ),
]


DEVICE = torch.device("cuda", 0)
MOVING = {"_to_copy", "copy_"}  # what takes tensors of several devices
INDEXING = {"index", "index_put", "index_put_"}  # the indices alone may be on the CPU


class OnSimulatedGpu(Tensor):
    @staticmethod
    def __new__(cls, value):
        made = Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            dtype=value.dtype,
            device=DEVICE,
            layout=value.layout,
        )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def dispatched(func, args, kwargs):
    name = func.overloadpacket.__name__
    checked = args[0] if name in INDEXING else (args, kwargs)
    tensors = [leaf for leaf in tree_flatten(checked)[0] if isinstance(leaf, Tensor)]
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, OnSimulatedGpu)]
    there = bool(given)
    if there and name not in MOVING:
        strange = [
            tensor for tensor in tensors if not isinstance(tensor, OnSimulatedGpu) and tensor.dim()
        ]
        assert not strange, f"{func} gets tensors of the CPU and of the GPU"
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": "cpu" if there else kwargs["device"]}
    elif name == "copy_":
        there = isinstance(args[0], OnSimulatedGpu)
    assert not (there and kwargs.get("generator") is not None), (
        f"{func} gets a generator of the CPU"
    )
    plain_args, plain_kwargs = tree_map_only(
        OnSimulatedGpu, lambda tensor: tensor.value, (args, kwargs)
    )
    result = func(*plain_args, **plain_kwargs)
    known = {id(tensor.value): tensor for tensor in given}
    if not there:
        return result
    return tree_map_only(
        Tensor,
        lambda tensor: known[id(tensor)] if id(tensor) in known else OnSimulatedGpu(tensor),
        result,
    )


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Tensors made from lists, and lists made from tensors: copies that are no operations, or
    refuse subclasses.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.new_tensor, Tensor.tolist) and isinstance(args[0], OnSimulatedGpu):
            made = func(args[0].value, *args[1:], **kwargs)
            return OnSimulatedGpu(made) if isinstance(made, Tensor) else made
        if func is torch.tensor and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


@contextlib.contextmanager
def simulated_gpu():
    """Inside, there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        # Operations of cuDNN cannot run on the CPU.
        patch.setattr(torch.backends.cudnn, "enabled", False)
        # `nn.Module.to` replaces parameters: their memory cannot become that of a subclass.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        torch._C._ensureCUDADeviceGuardSet()
        with _Numbers(), _Operations():
            yield


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"init": "random"}, id="random"),
        pytest.param({"calibration": [smooth_noise(2)]}, id="calibration", marks=pytest.mark.slow),
    ],
)
def test_a_model_on_a_gpu_stays_there_and_becomes_what_it_becomes_on_the_cpu(options):
    """Where new tensors are on the GPU by default, too: a generator of the CPU then needs the CPU
    to be named.

    In float64, since an order of sums that differs moves solutions in float32 by more than their
    rounding.
    """
    options = {"dilated_size": 9, "budget": 60, "input_size": SMALL, **options}
    ours = network(bias=True).double()
    theirs = network(bias=True).double()
    convert_(ours, **options)
    with simulated_gpu():
        theirs.to("cuda")
        with torch.device("cuda"):
            convert_(theirs, **options)
        for name, tensor in theirs.state_dict().items():
            assert isinstance(tensor, OnSimulatedGpu), name
            torch.testing.assert_close(tensor.value, ours.state_dict()[name], rtol=0, atol=1e-5)
        before = take_fingerprint(theirs, SMALL)
        assert deviation(before, take_fingerprint(ours, SMALL)) < 1e-5
        assert fold_to_dense_(theirs) == 3
        assert deviation(take_fingerprint(theirs, SMALL), before) < 1e-5
