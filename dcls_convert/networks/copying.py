"""Copy a network, with whatever it keeps in its attributes."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def copy_network(model: nn.Module, *, shared: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Copy a network as `copy.deepcopy` does, even if it keeps tensors that it has computed.

    `copy.deepcopy` refuses tensors with a graph, such as a table of attention biases that is kept
    in eval mode. They are copied as constants, wherever they are: in attributes, lists, caches.

    Args:
        model: Not changed.
        shared: Tensors to use in place of copies, by the ids of the originals.
    """
    with _CopiedTensors(_constant):
        return copy.deepcopy(model, dict(shared or {}))


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model to meta, in eval mode and without forward hooks. Forward pre-hooks stay."""
    memo: dict[int, Any] = {}  # of copy.deepcopy: id of a tensor -> its copy
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            empty = _empty_on_meta(tensor)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=False)
            memo[id(tensor)] = empty
    with _CopiedTensors(_on_meta):
        meta = copy.deepcopy(model, memo).eval()
    for module in meta.modules():
        if isinstance(module, torch.jit.ScriptModule):  # it has no attributes of this kind
            continue
        attributes = vars(module)
        attributes.get("_forward_hooks", {}).clear()
        attributes.pop("_compiled_call_impl", None)  # of `module.compile()`
        original = module._modules.get("_orig_mod")  # of `torch.compile(module)`
        if original is not None:
            attributes["forward"] = original.forward
    return meta


def _constant(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor, without the graph that it was computed by."""
    if tensor.is_leaf:
        copied: Tensor = Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call]
        return copied
    return tensor.detach().clone()


def _on_meta(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    return _empty_on_meta(tensor)


def _empty_on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


class _CopiedTensors(TorchFunctionMode):
    """While it is active, `copy.deepcopy` copies tensors by a function. For this thread only."""

    def __init__(self, copy_tensor: Callable[[Tensor, dict[int, Any]], Tensor]) -> None:
        super().__init__()
        self.copy_tensor = copy_tensor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self.copy_tensor(tensor, memo)
        return memo[id(tensor)]
