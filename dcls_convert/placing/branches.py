"""Refuse to merge the branches of a converted block where the result would be wrong.

timm's `reparameterize_model` merges the branches of a block (MobileOne, RepVGG, FastViT) by adding
their kernels. This takes the old kernel sizes for granted, so networks are reparameterised before
they are converted.
"""

import inspect
import weakref
from typing import Any

from torch import nn

from ..errors import PlanError
from ..layers.conv_classes import Conv
from ..layers.dcls_conv import DclsConvNd
from ..planning.plan import ConversionPlan

# Methods of a block that timm's `reparameterize_model` calls, without arguments.
MERGING_METHODS = ("fuse", "reparameterize", "switch_to_deploy")


def guard_merging_(model: nn.Module, plan: ConversionPlan) -> None:
    """Check what the blocks around the plan's layers merge. The guards stay when it is folded."""
    for layer in plan.layers:
        path = layer.name
        while path:
            path, _, _ = path.rpartition(".")
            block = model.get_submodule(path)
            for method in MERGING_METHODS:
                if inspect.isfunction(getattr(type(block), method, None)):
                    vars(block)[method] = _Guard(block, method)


class _Guard:
    """A block's method that merges branches, and checks the result.

    The block has it as an attribute, so it refers to the block weakly: networks that are dropped
    are freed at once.
    """

    def __init__(self, block: nn.Module, method: str) -> None:
        self.block: Any = weakref.ref(block)
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _merge(self.block(), self.method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Guard":
        return _Guard(memo[id(self.block())], self.method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Guard, (self.block(), self.method)


def _merge(block: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a block's own method, and check the sizes of merged kernels."""
    merge = getattr(type(block), method)
    if args or kwargs:  # another method of this name, such as a fusion of maps
        return merge(block, *args, **kwargs)
    if any(isinstance(module, DclsConvNd) for module in block.modules()):
        raise PlanError("fold the network before its branches are merged: fold_to_dense_(model)")
    try:
        merged = merge(block)
        for conv in nn.ModuleList([block, merged or nn.Identity()]).modules():
            # timm may set a larger weight on a convolution of the old size and padding.
            if isinstance(conv, Conv) and conv.weight.shape[2:] != conv.kernel_size:
                raise ValueError(f"its weight is not of size {conv.kernel_size}")
    except Exception as error:  # the network's own code
        raise PlanError(
            f"the branches of {type(block).__name__} can no longer be merged, since their windows "
            f"differ from the old kernels; reparameterise the network before you convert it"
        ) from error
    return merged
