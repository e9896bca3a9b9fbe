"""Carry over the mode, the hooks and users' attributes to the module that replaces another."""

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# Hooks that compute a parameter from others before each forward pass.
_COMPUTING_HOOKS = (BasePruningMethod, WeightNorm, SpectralNorm)
# Attributes in which a module keeps its forward and backward hooks, and the kind of its backward
# hooks. State dict hooks are not among them. A new module takes over the dictionaries themselves,
# because the handles that users keep for `handle.remove()` refer to them.
_HOOK_REGISTRIES = {"_is_full_backward_hook"}
_HOOK_REGISTRIES |= {
    name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_"))
}


def carry_over_(old: nn.Module, new: nn.Module, *, exclude: Collection[str]) -> None:
    """Give `new` the mode, trainability and hooks of `old`, and all attributes that users added.

    Those are all except `exclude`, the attributes of its class.
    """
    new.train(old.training)
    for name, parameter in new.named_parameters(recurse=False):
        if parameter is not getattr(old, name, None):
            parameter.requires_grad_(bool(old.weight.requires_grad))
    weight = new.weight
    if type(old.weight) is type(weight) is nn.Parameter:
        vars(weight).update(vars(old.weight))  # such as a learning rate of its own
    own_names = {*exclude, *vars(new), *new._parameters} - _HOOK_REGISTRIES
    for name, value in vars(old).items():
        if name not in own_names and not hasattr(type(new), name):  # which it would hide
            vars(new)[name] = value
    # Leave out hooks that compute a parameter: `new` does not have what they compute it from.
    other_hooks: OrderedDict[int, Any] = OrderedDict()
    for key, hook in old._forward_pre_hooks.items():
        if not isinstance(hook, _COMPUTING_HOOKS):
            other_hooks[key] = hook
    if len(other_hooks) < len(old._forward_pre_hooks):
        new._forward_pre_hooks = other_hooks


def compute_parameter_(layer: nn.Module, hook: Any) -> None:
    """Run a hook now if it is one of torch's that compute a parameter before each forward pass."""
    if isinstance(hook, SpectralNorm):
        weight = hook.compute_weight(layer, do_power_iteration=False)
        setattr(layer, hook.name, weight)
    elif isinstance(hook, _COMPUTING_HOOKS):
        hook(layer, ())
