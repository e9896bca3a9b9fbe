"""Copy a network to the meta device, with whatever it keeps in its attributes."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model to meta, in eval mode and without forward hooks. Forward pre-hooks stay."""
    memo: dict[int, Any] = {}  # of copy.deepcopy: id of a tensor -> its copy
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    with _CopiesOnMeta():
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


class _CopiesOnMeta(TorchFunctionMode):
    """While it is active, `copy.deepcopy` copies tensors to meta. For this thread only.

    This also copies tensors that `copy.deepcopy` refuses, since they have a graph: for example, a
    table of attention biases that a network has computed and keeps.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = torch.empty_like(tensor, device="meta", requires_grad=False)
        return memo[id(tensor)]
