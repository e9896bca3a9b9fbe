"""Keep timm's `reparameterize_model` from merging branches whose kernels now differ in size.

It merges the branches of a block by adding their kernels, and pads those of 1x1 branches to the
size that the network was built with. If only some branches have a larger window, it would fail; if
all have one, the merged convolution needs more padding.
"""

import contextlib
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..geometry import grown_padding
from ..layers.conv_classes import Conv, padding_of
from ..networks.copying import meta_copy
from ..networks.running import unchanged_on_failure

# Methods that timm's `reparameterize_model` looks for on a child, in this order. It calls the first
# one that it finds.
REPARAMETERIZE_METHODS = ("fuse", "reparameterize", "switch_to_deploy")


def keep_unmergeable_branches_(model: nn.Module, convs: Iterable[str]) -> None:
    """Let timm merge the branches of a folded model where it can, and keep the others.

    Args:
        model: Changed in place: such blocks get a method of their own.
        convs: Names of the convolutions with the larger windows.
    """
    blocks: dict[str, nn.Module] = {}
    for name in convs:
        parts = name.split(".")
        for length in range(len(parts)):  # 0 is the model itself
            path = ".".join(parts[:length])
            blocks[path] = model.get_submodule(path)
    for block in blocks.values():
        for method in REPARAMETERIZE_METHODS:
            if hasattr(type(block), method):
                if not _can_merge(block, method):
                    vars(block)[method] = partial(_merge_or_keep, block, method)
                break


def _can_merge(block: nn.Module, method: str) -> bool:
    """Try to merge the branches of a copy on the meta device."""
    with contextlib.suppress(Exception), torch.no_grad():  # the network's own code
        copied = meta_copy(block)
        merged = getattr(type(block), method)(copied)
        return not (_with_another_weight(copied) or _with_another_weight(merged))
    return False


def _merge_or_keep(block: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Merge the branches of a block; if that fails, leave it as it was, and say so."""
    try:
        with unchanged_on_failure(block):
            merged = getattr(type(block), method)(block, *args, **kwargs)
            for conv in (*_with_another_weight(block), *_with_another_weight(merged)):
                _fit_to_weight_(conv)
            return merged
    except Exception:  # the network's own code, which takes the old kernel size for granted
        warnings.warn(
            "some branches of the network have other windows than the branches beside them, so "
            "they are not merged; outputs stay the same",
            stacklevel=2,
        )
        return block


def _with_another_weight(module: object) -> list[Conv]:
    """Return the convolutions whose weight is not of their kernel size.

    timm makes a convolution of the size that the network was built with for merged branches, and
    then sets their weight.
    """
    if not isinstance(module, nn.Module):
        return []
    found = []
    for conv in module.modules():
        if isinstance(conv, Conv) and conv.weight.shape[2:] != conv.kernel_size:
            found.append(conv)
    return found


def _fit_to_weight_(conv: Conv) -> None:
    """Give a convolution the kernel size of its weight, and the padding that keeps its output."""
    size = tuple(conv.weight.shape[2:])
    padding: Any = grown_padding(
        padding_of(conv), conv.kernel_size, conv.dilation, size, conv.stride
    )
    kernel_size: Any = size
    conv.padding = padding
    conv.kernel_size = kernel_size
