"""A GPU that is not there: its tensors live in the CPU's memory, and are refused where a GPU's would be."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("cuda", 0)
MOVING = {"_to_copy", "copy_"}  # what takes tensors of several devices
INDEXING = {"index", "index_put", "index_put_"}  # the indices alone may be on the CPU


class OnToyGpu(Tensor):
    @staticmethod
    def __new__(cls, value):
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=DEVICE, layout=value.layout
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
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, OnToyGpu)]
    there = bool(given)
    if there and name not in MOVING:
        strange = [tensor for tensor in tensors if not isinstance(tensor, OnToyGpu) and tensor.dim()]
        assert not strange, f"{func} gets tensors of the CPU and of the GPU"
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": "cpu" if there else kwargs["device"]}
    elif name == "copy_":
        there = isinstance(args[0], OnToyGpu)
    assert not (there and kwargs.get("generator") is not None), f"{func} gets a generator of the CPU"
    plain_args, plain_kwargs = tree_map_only(OnToyGpu, lambda tensor: tensor.value, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    known = {id(tensor.value): tensor for tensor in given}
    if not there:
        return result
    return tree_map_only(Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else OnToyGpu(tensor), result)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatched(func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Tensors made from lists, and lists made from tensors: copies that are no operations, or refuse subclasses."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is Tensor.new_tensor:
            kwargs, device = {"dtype": args[0].dtype, **kwargs}, args[0].device if device is None else device
            func, args = torch.tensor, args[1:]
        if func is torch.tensor and device is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        if func is Tensor.tolist and isinstance(args[0], OnToyGpu):
            return args[0].value.tolist()
        return func(*args, **kwargs)


@contextlib.contextmanager
def toy_gpu():
    """Inside, there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.backends.cudnn, "enabled", False)  # operations of cuDNN cannot run on the CPU
        # `nn.Module.to` replaces parameters: their memory cannot become that of a subclass.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        torch._C._ensureCUDADeviceGuardSet()
        with _Numbers(), _Operations():
            yield
