"""Find wrappers and compiled forms, which must be undone before a model or its part converts."""

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import fx, nn

from ..errors import ModelError, PlanError
from ..running.run import COMPILED
from .sites import Skipped

Part = TypeVar("Part")  # a module, a parameter or a buffer

SHARDED = "FullyShardedDataParallel"
PARALLEL = "DistributedDataParallel"
# Classes of torch and timm that hold a network as their `module`.
WRAPPERS = ("AveragedModel", "DataParallel", PARALLEL, SHARDED, "ModelEmaV2", "ModelEmaV3")
# Additions of wrappers to names: torch.compile, FSDP1, checkpointing, DeepSpeed (in Lightning).
WRAPPER_NAMES = re.compile(
    r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
ADAPTED = "base_layer"  # name of the module that an adapter of peft wraps
SCRIPTED = "is TorchScript; convert before torch.jit.script or torch.jit.trace"
EXPORTED = "is a graph of operators; convert before torch.export"
OTHER_FORMS = (torch.jit.ScriptModule, fx.GraphModule)  # they run a graph, not their modules


def check_not_wrapped(model: nn.Module) -> None:
    """Raise PlanError, which says what to do, if the model is a wrapper or not made of modules."""
    if COMPILED in model._modules:
        raise PlanError("the model is compiled; convert it before torch.compile")
    wrapper = _wrapper_class(model)
    if wrapper is not None:
        raise PlanError(f"the model is wrapped in {wrapper}; convert its `module`, then wrap it")
    form = _other_form(model)
    if form is not None:
        raise PlanError(f"the model {form}")


def inside_wrappers(model: nn.Module, *, replaces_parameters: bool = False) -> nn.Module:
    """Return the network inside wrappers that only call it: compiled, parallel, averaged models.

    Args:
        model: The network or a wrapper.
        replaces_parameters: Whether the caller replaces parameters of the network. DDP would
            continue with the old ones.

    Raises:
        ModelError: The wrapper has sharded the network, or would miss its new parameters.
    """
    if COMPILED in model._modules:
        inner = model.get_submodule(COMPILED)
    else:
        wrapper = _wrapper_class(model)
        if wrapper is None:
            return model
        if wrapper == SHARDED or (wrapper == PARALLEL and replaces_parameters):
            raise ModelError(
                f"the model is wrapped in {wrapper}; give the whole network, and wrap it then"
            )
        inner = model.get_submodule("module")
    return inside_wrappers(inner, replaces_parameters=replaces_parameters)


def _wrapper_class(model: nn.Module) -> str | None:
    """Return the class name of a wrapper of torch or timm; None for any other model."""
    for base in type(model).__mro__:
        if base.__name__ in WRAPPERS and base.__module__.partition(".")[0] in ("torch", "timm"):
            return base.__name__
    return None


def by_plain_name(named: Iterable[tuple[str, Part]]) -> dict[str, Part]:
    """Return parts of a network by their names, from which names of inner wrappers are removed."""
    parts = {}
    for name, part in named:
        parts[WRAPPER_NAMES.sub("", f"{name}.").rstrip(".")] = part
    return parts


def other_forms(model: nn.Module) -> Iterator[Skipped]:
    """Yield the parts of a model that are TorchScript or exported, which hides convolutions."""
    for name, module in model.named_modules():
        if not isinstance(module, OTHER_FORMS):
            continue
        reason = _other_form(module)
        # Only the outermost part is reported, not the parts inside it.
        if reason and not _other_form(model.get_submodule(name.rpartition(".")[0])):
            yield Skipped(name=name, type=type(module).__name__, reason=reason)


def _other_form(module: nn.Module) -> str | None:
    """Return what to do first if a module runs a graph instead of its modules; or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return SCRIPTED
    if isinstance(module, fx.GraphModule):
        if any(str(node.target).startswith("aten.conv") for node in module.graph.nodes):
            return EXPORTED
    return None


def why_inside_wrapper(model: nn.Module, name: str) -> str | None:
    """Return why a convolution cannot be replaced inside its wrapper or compiled form; or None."""
    conv = model.get_submodule(name)
    form = _other_form(conv)
    if form is not None:
        return form
    parts = name.split(".")
    if COMPILED in parts:
        return "it is in a module that torch.compile wraps; convert first, then compile"
    if vars(conv).get("_compiled_call_impl") is not None:
        return "it is compiled; convert first, then compile"
    for length in range(len(parts)):
        holder = model.get_submodule(".".join(parts[:length]))
        if ADAPTED in holder._modules and _is_adapter(holder):
            return "it belongs to an adapter, such as LoRA; merge the adapter first"
    return None


def _is_adapter(module: nn.Module) -> bool:
    """True for a layer of peft, which wraps a layer of the network, or a layer built like it."""
    is_of_peft = type(module).__module__.startswith("peft.")
    return is_of_peft or any(name.startswith("lora_") for name in module._modules)
