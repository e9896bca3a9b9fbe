"""Find what must be undone before a model or its parts can be converted: wrappers, other forms."""

import re
from collections.abc import Iterator

import torch
from torch import fx, nn

from ..errors import ModelError, PlanError
from ..layers.conv_classes import AnyConv
from .sites import Skipped

# Classes of torch that hold a network as their `module`.
WRAPPERS = (
    "AveragedModel",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
)
COMPILED = "_orig_mod"  # name of the module that torch.compile wraps
# What wrappers add to names: torch.compile, FSDP1, checkpointing, DeepSpeed (in Lightning).
WRAPPER_NAMES = re.compile(
    r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
# Wrappers of torch and timm that only call the network, their `module`.
CALLING_WRAPPERS = (
    "AveragedModel",
    "DataParallel",
    "DistributedDataParallel",
    "ModelEmaV2",
    "ModelEmaV3",
)
ADAPTED = "base_layer"  # name of the module that an adapter of peft wraps
SCRIPTED = "is TorchScript; convert before torch.jit.script or torch.jit.trace"
EXPORTED = "is a graph of operators; convert before torch.export"


def check_not_wrapped(model: nn.Module) -> None:
    """Raise PlanError, with what to do first, if the model is a wrapper or not made of modules."""
    if COMPILED in model._modules:
        raise PlanError("the model is compiled; convert it before torch.compile")
    for base in type(model).__mro__:
        if base.__name__ in WRAPPERS and base.__module__.startswith("torch."):
            raise PlanError(
                f"the model is wrapped in {base.__name__}; convert its `module`, then wrap it"
            )
    if isinstance(model, torch.jit.ScriptModule):
        raise PlanError(f"the model {SCRIPTED}")
    if _is_exported(model):
        raise PlanError(f"the model {EXPORTED}")


def inside_wrappers(model: nn.Module, *, replaces_parameters: bool = False) -> nn.Module:
    """Return the network inside wrappers that only call it: compiled, parallel, averaged models.

    Args:
        model: The network or a wrapper.
        replaces_parameters: Whether the caller replaces parameters of the network. DDP would
            continue with the old ones.

    Raises:
        ModelError: The wrapper has sharded the network, or would miss its new parameters.
    """
    while True:
        if COMPILED in model._modules:
            model = model.get_submodule(COMPILED)
            continue
        wrapper = _wrapper_class(model)
        if wrapper == "FullyShardedDataParallel":
            raise ModelError(
                f"the model is sharded by {wrapper}; load its full state dict into a network that "
                "is not wrapped, and use that"
            )
        if wrapper == "DistributedDataParallel" and replaces_parameters:
            raise ModelError(f"the model is wrapped in {wrapper}; give its `module`, then wrap it")
        if wrapper not in CALLING_WRAPPERS:
            return model
        model = model.get_submodule("module")


def _wrapper_class(model: nn.Module) -> str | None:
    """Return the name of the wrapper of torch or timm that the model is; None for all others."""
    for base in type(model).__mro__:
        library = base.__module__.partition(".")[0]
        if base.__name__ in {*WRAPPERS, *CALLING_WRAPPERS} and library in ("torch", "timm"):
            return base.__name__
    return None


def plain_name(name: str) -> str:
    """Return the name of a part of a network, without the names of wrappers inside it."""
    return WRAPPER_NAMES.sub("", f"{name}.").rstrip(".")


def other_forms(model: nn.Module) -> Iterator[Skipped]:
    """Yield the parts of a model that convolve, but not by a convolution of torch.nn."""
    for name, module in model.named_modules():
        reason = None
        if isinstance(module, torch.jit.ScriptModule):
            # One line for the outermost scripted module, not for all that is inside.
            parent = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(parent, torch.jit.ScriptModule):
                reason = SCRIPTED
        elif _is_exported(module):
            reason = EXPORTED
        elif _is_quantised(module) and not isinstance(module, AnyConv):
            reason = why_inside_wrapper(model, name)
        if reason is not None:
            yield Skipped(name=name, type=type(module).__name__, reason=reason)


def why_inside_wrapper(model: nn.Module, name: str) -> str | None:
    """Return why a convolution cannot be replaced in the form or wrapper that it is in; or None."""
    if _is_quantised(model.get_submodule(name)):
        return "it is quantised; convert before the quantisation"
    parts = name.split(".")
    if COMPILED in parts:
        return "it is in a module that torch.compile wraps; convert first, then compile"
    if vars(model.get_submodule(name)).get("_compiled_call_impl") is not None:
        return "it is compiled; convert first, then compile"
    for length in range(len(parts)):
        if _is_adapter(model.get_submodule(".".join(parts[:length]))):
            return "it belongs to an adapter, such as LoRA; merge the adapter first"
    return None


def _is_adapter(module: nn.Module) -> bool:
    """True for a layer of peft, which wraps a layer of the network; or one that is built alike."""
    if ADAPTED not in module._modules:
        return False
    is_of_peft = type(module).__module__.startswith("peft.")
    return is_of_peft or any(name.startswith("lora_") for name in module._modules)


def _is_quantised(module: nn.Module) -> bool:
    """True for a convolution of torch.ao, also for quantisation-aware training."""
    is_from_torch_ao = type(module).__module__.startswith("torch.ao.nn.")
    return is_from_torch_ao and hasattr(module, "kernel_size")


def _is_exported(module: nn.Module) -> bool:
    """True if the module is a graph that calls torch's operators for convolutions."""
    if not isinstance(module, fx.GraphModule):
        return False
    return any(str(node.target).startswith("aten.conv") for node in module.graph.nodes)
