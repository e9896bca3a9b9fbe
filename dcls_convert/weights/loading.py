"""Load weights into a network; refuse weights that do not fit or are not finite."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import CheckpointError
from ..layers.dcls_conv import DclsConvNd
from ..networks.building import build_model
from ..networks.source import LIBRARY_PREFIXES, ModelSource
from ..networks.timm_notes import config_of
from ..text import short_list

USUAL_CLASSIFIERS = ("fc", "classifier", "head")  # for models that do not name their classifier
CONVERTED_ENTRY = ".positions"  # end of a name that only DCLS layers have


def load_weights_(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, optional: Collection[str] = ()
) -> None:
    """Copy a state dict into a model; leave the model unchanged if it does not fit.

    Raises:
        CheckpointError: From `check_weights`.
    """
    check_weights(model, state, where, optional=optional)
    load_entries_(model, state)


def assign_weights_(model: nn.Module, state: Mapping[str, Tensor], where: str) -> bool:
    """Put the tensors of a state dict into a meta model, without copying them if possible.

    Returns False if the model still lacks values; the caller must then build it on the CPU.

    Raises:
        CheckpointError: From `check_weights`.
    """
    check_weights(model, state, where)
    if alias_names(model):
        return False
    own = model.state_dict()
    ready: dict[str, Tensor] = {}
    storages_in_use: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.detach().to(device="cpu", dtype=own[name].dtype)
        storage = tensor.untyped_storage()
        is_view = storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages_in_use
        if is_view or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        storages_in_use.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    load_entries_(model, ready, assign=True)
    # Parameters, buffers and plain attributes of modules.
    leaves = tree_leaves([vars(module) for module in model.modules()])
    return not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)


def load_entries_(model: nn.Module, state: Mapping[str, Tensor], *, assign: bool = False) -> None:
    """Load checked entries; tensors that `state` lacks keep their values."""
    # Refill the model's own state dict instead of passing `state`: it carries the format versions
    # of the modules, which torchvision's MNASNet reads on loading.
    versioned = model.state_dict()
    versioned.clear()
    versioned.update(state)
    model.load_state_dict(versioned, strict=False, assign=assign)


def build_and_load(
    source: ModelSource,
    state: Mapping[str, Tensor],
    where: str,
    *,
    prepare_: Callable[[nn.Module], None] = lambda _: None,
    seed: int = 0,
    optional: Collection[str] = (),
) -> nn.Module:
    """Build the network of a trusted source, and load a state dict into it.

    Args:
        source: What builds the network; its code runs without a check.
        state: Weights, under the names that the network has after `prepare_`.
        where: Name of the state dict in error messages.
        prepare_: Changes the network before the weights are loaded.
        seed: Seed for the values that the state dict lacks.
        optional: Names that the state dict may lack.

    Raises:
        CheckpointError: From `check_weights`.
    """
    # Do not try the user's own code on the meta device first: it must run only once.
    if source.prefix in LIBRARY_PREFIXES and not optional:
        model = build_model(source, device="meta", trust_code=True)
        prepare_(model)
        if assign_weights_(model, state, where):
            return model
    model = build_model(source, seed=seed, trust_code=True)
    prepare_(model)
    load_weights_(model, state, where, optional=optional)
    return model


def check_weights(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, optional: Collection[str] = ()
) -> None:
    """Check that a state dict fits a model and is finite; names in `optional` may be missing.

    Raises:
        CheckpointError: Names, shapes or number types differ, or a value is not finite.
    """
    problem = next(_problems(model, state, optional), None)
    if problem is not None:
        is_only_unexpected = "unexpected: " in problem and "missing: " not in problem
        if is_only_unexpected and where.startswith("weights file "):
            problem += "; delete these entries, and save the weights again"
        raise CheckpointError(f"{where}: {problem}")


def _reshaped_classifier(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of classifier tensors whose shapes differ between model and state dict."""
    prefixes = classifier_prefixes(model)
    names: list[str] = []
    for name, tensor in model.state_dict().items():
        if name.startswith(prefixes) and name in state and state[name].shape != tensor.shape:
            names.append(name)
    return names


def differing_classifier(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of classifier tensors that differ between model and state dict.

    Tensors differ if their shapes differ, or if model and state dict have no name of the classifier
    in common. If the state dict lacks only some of the names, the file is damaged, and these names
    are not returned.
    """
    own_names = model.state_dict().keys()
    names = _reshaped_classifier(model, state)
    for prefix in classifier_prefixes(model):
        ours = [name for name in own_names if name.startswith(prefix)]
        theirs = [name for name in state if name.startswith(prefix)]
        if not set(ours).intersection(theirs):
            names += [*ours, *theirs]
    return names


def classifier_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the classifier's tensor names: timm's, or else the usual ones."""
    stated: Any = (config_of(model) or {}).get("classifier")
    if isinstance(stated, str):
        stated = (stated,)
    return tuple(f"{module}." for module in stated or USUAL_CLASSIFIERS)


def differing_num_classes(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """Return the state dict's number of classes if its classifier differs in nothing else."""
    own = model.state_dict()
    class_counts: set[tuple[int, ...]] = set()  # a malformed tensor may have no axis
    for name in _reshaped_classifier(model, state):
        shape = state[name].shape
        if shape[1:] != own[name].shape[1:]:
            return None
        class_counts.add(shape[:1])
    if len(class_counts) != 1:
        return None
    return next(iter(class_counts.pop()), None)


def _problems(
    model: nn.Module, state: Mapping[str, Tensor], optional: Collection[str]
) -> Iterator[str]:
    """Yield why a state dict cannot be loaded; names in `optional` may be missing from it."""
    own = model.state_dict()
    aliases = alias_names(model)
    missing = []
    for name in own:
        is_there = name in state or aliases.get(name) in state
        if not is_there and name not in optional:
            missing.append(name)
    unexpected = [name for name in state if name not in own]
    if missing or unexpected:
        yield _describe_names(missing, unexpected)
        return
    for name, theirs in state.items():
        ours = own[name]
        if theirs.shape != ours.shape:
            yield f"{name} has shape {tuple(theirs.shape)}, the model needs {tuple(ours.shape)}"
        needs_floats = ours.is_floating_point() and not theirs.is_floating_point()
        if needs_floats or theirs.is_complex() != ours.is_complex():
            yield f"{name} is {theirs.dtype}, the model needs {ours.dtype}"
    for alias, first in aliases.items():
        if alias in state and first in state and not torch.equal(state[alias], state[first]):
            yield f"{first} and {alias} are one tensor in the model, but differ here"
    for name, module in model.named_modules():
        if isinstance(module, DclsConvNd):
            problem = module.describe_other_state(state, f"{name}.")
            if problem is not None:
                yield problem
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, theirs in state.items():
        problem = describe_non_finite(name, theirs, mask=name not in parameters)
        if problem is not None:
            yield problem


def _describe_names(missing: list[str], unexpected: list[str]) -> str:
    """Say which names differ, and what to do if the weights belong to a converted model."""
    parts = []
    if missing:
        parts.append(f"missing: {short_list(missing)}")
    if unexpected:
        parts.append(f"unexpected: {short_list(unexpected)}")
    renamed = [name for name in missing if any(_holds(other, name) for other in unexpected)]
    if any(name.endswith(CONVERTED_ENTRY) for name in unexpected):
        parts.append(
            "these weights are of a converted model: load them into the model that load_converted "
            "or timm makes from its folder, and call save_converted"
        )
    elif renamed:
        parts.append(
            "undo what has renamed them, such as torch.nn.utils.prune.remove or "
            "remove_parametrizations, and save the weights again"
        )
    return f"does not fit the model; {'; '.join(parts)}"


def _holds(entry: str, name: str) -> bool:
    """True for an entry of a mask or a norm that stands for a weight: weight_orig for weight."""
    module, _, weight = name.rpartition(".")
    prefix = f"{module}." if module else ""
    return entry.startswith((f"{name}_", f"{prefix}parametrizations.{weight}."))


def describe_unusual(value: object) -> str | None:
    """Say what a value is instead of an ordinary dense tensor; None if it is one."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}, not a tensor"
    if value.is_meta:
        return "on the meta device, without values"
    if value.layout != torch.strided:
        return f"sparse ({value.layout})"
    if value.is_quantized:
        return f"quantised ({value.dtype})"
    if hasattr(type(value), "__tensor_flatten__"):
        return f"of class {type(value).__name__}, which consists of other tensors"
    return None


def describe_non_finite(name: str, tensor: Tensor, *, mask: bool) -> str | None:
    """Describe the NaN and infinite values of a tensor, or return None if it has none.

    With `mask`, a tensor whose values are all 0 or -inf is accepted as an attention mask.
    """
    is_float = tensor.is_floating_point() or tensor.is_complex()
    if not is_float or tensor.is_meta or not tensor.numel():
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    values = tensor.float() if tensor.itemsize == 1 else tensor  # torch does not compare float8
    smallest, largest = values.aminmax()  # makes no copy of the tensor
    if math.isfinite(smallest) and math.isfinite(largest):
        return None
    if mask and bool(((values == 0) | (values == -torch.inf)).all()):
        return None
    count = int((~values.isfinite()).sum())
    return f"{name} has {count} of {tensor.numel()} values that are NaN or infinite"


def alias_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor in the model's state dict to its first name.

    A tensor has several names if its module has several places in the model.
    """
    return aliases_in(model.state_dict(keep_vars=True))


def aliases_in(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Do the same as `alias_names`, for a state dict whose values are the model's own tensors."""
    first_names: dict[int, str] = {}  # by the id of the tensor
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
    return aliases
