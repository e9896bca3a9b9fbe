"""Models inside wrappers, and parameters that are sharded over processes."""

from torch import Tensor, nn

# Attributes in which wrappers keep their model: "module" of DDP, DataParallel and EMA copies, then
# those of `torch.compile` and FSDP1.
WRAPPED_AT = ("module", "_orig_mod", "_fsdp_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that only call it: DDP, `torch.compile`, EMA copies, FSDP1."""
    while True:
        children = list(model.named_children())
        if len(children) != 1 or list(model.parameters(recurse=False)):
            return model
        name, inner = children[0]
        if name not in WRAPPED_AT:
            return model
        model = inner


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole parameter, gathered if FSDP2 has sharded it; differentiable.

    Under FSDP2, all ranks must call it.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered
