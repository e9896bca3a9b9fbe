"""Unwrap models, and gather parameters that are sharded over processes."""

from torch import Tensor, nn

# Attributes in which wrappers keep their model: "module" in DDP, DataParallel and EMA copies,
# "_orig_mod" in `torch.compile`, "_fsdp_wrapped_module" in FSDP1. Positions that FSDP1 has
# flattened are not supported, but names inside it are still found.
MODEL_ATTRIBUTES = ("module", "_orig_mod", "_fsdp_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, such as DDP, `torch.compile` and EMA copies."""
    while True:
        children = list(model.named_children())
        if len(children) != 1 or list(model.parameters(recurse=False)):
            return model
        name, inner = children[0]
        if name not in MODEL_ATTRIBUTES:
            return model
        model = inner


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole parameter, gathered (differentiably) if FSDP2 has sharded it.

    Under FSDP2, all ranks must call it.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered
