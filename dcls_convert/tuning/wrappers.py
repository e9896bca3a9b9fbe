"""Unwrap models, and gather parameters that are sharded over processes."""

from torch import Tensor, nn

# Attributes in which wrappers keep their model: "module" in DDP, DataParallel and EMA copies, the
# others in `torch.compile` and FSDP1.
MODEL_ATTRIBUTES = ("module", "_orig_mod", "_fsdp_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that only call it: DDP, `torch.compile`, EMA, FSDP1."""
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
