"""Read a trained network's weights from a file, and put them into the network before it is converted."""

import argparse
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CheckpointError, one_line, shown

# What training scripts wrap a state dict in, the one to take first. timm takes averaged weights before plain ones.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
ALIGNMENT = 64  # bytes; of memory that torch allocates
MOST_WRAPPERS = 3  # one in the other; a mapping can hold itself
PREFIXES = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a safetensors file, or in a torch file (read with `weights_only=True`).

    Wrappers (`state_dict`, `model`, `state_dict_ema`) are taken off, and so are the prefixes `module.` and
    `_orig_mod.`.

    Raises:
        CheckpointError: No such file, not readable, or nothing in it that looks like a state dict.
    """
    path = Path(path)
    check_weights_file(path)
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    where = f"checkpoint {path}"
    unwrapped = _unwrapped(content)
    if unwrapped is None:
        kind = (
            f"a mapping with {_some(list(content))}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        )
        raise CheckpointError(f"{where}: holds {kind}, not a state dict (names to tensors)")
    state: dict[str, Tensor] = {}
    for name, value in unwrapped.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{where}: entry {name!r} is a {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = "without data (meta)" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
            raise CheckpointError(f"{where}: {name} is {kind}; weights must be ordinary dense tensors")
        stripped = _stripped(str(name))
        if stripped in state:
            raise CheckpointError(f"{where}: {name} is there twice, with and without the prefix of a wrapper")
        state[stripped] = value
    return state


def check_weights_file(path: Path) -> None:
    """Refuse what cannot be a file of weights; CheckpointError says why."""
    try:
        if not path.is_file():
            missing = "there is no such file" if not path.exists() else "is not a file"
            raise CheckpointError(f"checkpoint {path}: {missing}")
    except OSError as error:
        raise CheckpointError(f"checkpoint {shown(path)}: {error.strerror}") from error


def load_weights_(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False
) -> list[str]:
    """Copy a state dict into a model, everything or nothing.

    Args:
        model: Changed in place.
        state: Must have every parameter and buffer of the model, with its shape, and nothing else.
        where: What messages call it.
        new_classifier: The model was built for another number of classes: where the classifier's shape differs, it
            keeps its initial values.

    Returns:
        Names that kept their initial values.

    Raises:
        CheckpointError: Names or shapes that do not fit; the model is then unchanged.
    """
    state = dict(state)
    kept = _checked(model, state, where, new_classifier)
    for name in kept:
        del state[name]
    model.load_state_dict(_versioned(model, state), strict=False)
    return kept


def fill_(model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False) -> bool:
    """As `load_weights_`, for a model built without its weights: the tensors of the state dict become the model's own.

    Only a tensor of another dtype, or one that is a part of some other memory, is copied.

    Args:
        model: From `build_hollow`.

    Returns:
        Whether all of the model has values now. Where not, it is of no use, and `load_weights_` into a model that was
        built on the CPU is the way.

    Raises:
        CheckpointError: As `load_weights_`.
    """
    kept = _checked(model, state, where, new_classifier)
    own = model.state_dict()
    if kept or alias_names(model) or own.keys() - state.keys():
        return False
    taken: set[int] = set()
    ready = {name: _of_its_own(tensor, own[name].dtype, taken) for name, tensor in state.items()}
    model.load_state_dict(_versioned(model, ready), strict=False, assign=True)
    return not _is_hollow(model)


def _of_its_own(tensor: Tensor, dtype: torch.dtype, taken: set[int]) -> Tensor:
    """The tensor, contiguous and in memory that belongs to nothing else; a copy only if it is not.

    Memory starts where torch's own does, or products would be summed in another order, and their last bits differ.
    """
    tensor = tensor.detach().to(device="cpu", dtype=dtype)
    memory = tensor.untyped_storage()
    whole = memory.nbytes() == tensor.numel() * tensor.element_size()
    aligned = tensor.data_ptr() % ALIGNMENT == 0
    if not (tensor.is_contiguous() and whole and aligned) or memory.data_ptr() in taken:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.numel():
        taken.add(tensor.untyped_storage().data_ptr())
    return tensor


def _is_hollow(model: nn.Module) -> bool:
    """Whether a tensor has no values: a parameter, a buffer, or one in an attribute of a module."""
    leaves = (leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module)))
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)


def _checked(model: nn.Module, state: Mapping[str, Tensor], where: str, new_classifier: bool) -> list[str]:
    """Names that keep their initial values; CheckpointError where the rest does not fit the model."""
    own = model.state_dict()
    kept = [name for name in _classifier_names(model, own) if new_classifier and name in state]
    kept = [name for name in kept if state[name].shape != own[name].shape]
    aliases = alias_names(model)
    given = state.keys() - set(kept)
    missing = [name for name in own if name not in given and name not in kept and aliases.get(name) not in given]
    unexpected = [name for name in state if name not in own]
    if missing or unexpected:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(unexpected)} too many"] * bool(unexpected)
        raise CheckpointError(f"{where}: does not fit the model: it {' and '.join(parts)}")
    for name in [name for name in state if name in given]:
        tensor = state[name]
        if tensor.is_complex() != own[name].is_complex():
            raise CheckpointError(f"{where}: {name} is {tensor.dtype}, the model needs {own[name].dtype}")
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(own[name].shape)}"
            )
    return kept


def _versioned(model: nn.Module, state: Mapping[str, Tensor]) -> "OrderedDict[str, Tensor]":
    """With the versions of the modules' formats, which files do not keep, and torchvision's MNASNet asks for."""
    versioned = OrderedDict(state)
    versioned._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    return versioned


def alias_names(model: nn.Module) -> dict[str, str]:
    """Names in the state dict whose tensor has an earlier name -> that name: modules that stand in several places."""
    first: dict[int, str] = {}
    own = model.state_dict(keep_vars=True)
    return {name: first[id(tensor)] for name, tensor in own.items() if first.setdefault(id(tensor), name) != name}


def _classifier_names(model: nn.Module, own: Mapping[str, Tensor]) -> list[str]:
    config = getattr(model, "pretrained_cfg", None)
    stated = (config.get("classifier") if isinstance(config, dict) else None) or ("fc", "classifier", "head")
    modules = (stated,) if isinstance(stated, str) else tuple(stated)
    return [name for name in own if name.rpartition(".")[0].startswith(modules)]


def load_file(path: Path) -> dict[str, Tensor]:
    """A safetensors file, one tensor after the other into memory that torch allocates, which a model can keep."""
    # Tensors that are read, not views of the mapped file, whose pages count as memory too.
    with safe_open(path, framework="pt", backend="pread") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: not a readable safetensors file: {one_line(error)[:200]}") from error


def _read_torch(path: Path) -> Any:
    try:
        # timm's training checkpoints hold their arguments as a Namespace.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # old files make torch warn about itself
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what unpickling damaged bytes raises has no bounds: struct.error, IndexError, ...
        what = "is damaged or holds more than tensors" if isinstance(error, pickle.UnpicklingError) else "is damaged"
        raise CheckpointError(
            f"checkpoint {path}: {what}, or is no file of torch.save; it is read with weights_only=True, so save its "
            f"state dict alone ({type(error).__name__})"
        ) from error


def _unwrapped(content: Any, depth: int = 0) -> Mapping[Any, Any] | None:
    """What a training script put its state dict into, taken off; None where there are no tensors anywhere."""
    if not isinstance(content, Mapping) or depth > MOST_WRAPPERS:
        return None
    inner = (_unwrapped(content.get(key), depth + 1) for key in WRAPPERS)
    own = content if any(isinstance(value, Tensor) for value in content.values()) else None
    return next((state for state in inner if state is not None), own)


def _stripped(name: str) -> str:
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _some(names: list[Any]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(str, names[:3])) or "nothing") + more
