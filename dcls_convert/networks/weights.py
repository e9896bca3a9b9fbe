"""Read a network's weights from a file and load them; weights that are not finite are refused."""

import argparse
import contextlib
import copy
import math
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import CheckpointError, listed, one_line, shown
from ..files import check_weights_file
from .outputs import tensors_in
from .source import LIBRARIES, ModelSource, build_model

# Keys under which training scripts store a state dict. Averaged weights come first, as in timm.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
MOST_WRAPPERS = 3  # nesting depth; bounded because a mapping can hold itself
PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")  # of DistributedDataParallel and torch.compile
USUAL_CLASSIFIERS = ("fc", "classifier", "head")  # for models that do not name their classifier
ALIGNMENT = 64  # bytes; torch allocates memory at multiples of it
MOST_HEADER = 16 << 20  # bytes of a safetensors header; enough for 150,000 tensors
# Largest ratio of unpacked size to file size for a torch file. torch itself does not compress.
MOST_GROWTH = 20
ZIP_START = b"PK\x03\x04"  # first bytes of a torch file, except for files of torch before 1.6
# Packed bits (bits8, float4_e2m1fn_x2) are left out: only special operators can read them.
FRACTIONS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = {*FRACTIONS, *INTEGERS, torch.complex64, torch.complex128}


def read_weights(weights: Mapping[str, Tensor] | str | Path) -> dict[str, Tensor]:
    """Return the state dict that is given, or read it from a safetensors or torch file.

    In a file, the mappings that training scripts put around a state dict are opened, and the
    prefixes of DistributedDataParallel and torch.compile are removed from the names.

    Raises:
        CheckpointError: The file cannot be read, or there is no state dict in it.
    """
    if isinstance(weights, Mapping):
        return checked_entries(weights, "the state dict")
    path = Path(weights)
    where = f"checkpoint {path}"
    if path.suffix == ".safetensors":
        content: Any = load_file(path, "checkpoint")
    else:
        content = _read_torch(path, where)
    found = _find_state_dict(content)
    if found is None:
        kind = f"a {type(content).__name__}"
        if isinstance(content, Mapping):
            kind = f"a mapping with {listed(key for key in content if isinstance(key, str))}"
        raise CheckpointError(f"{where}: holds {kind}, not a state dict (names to tensors)")
    state: dict[str, Tensor] = {}
    for name, tensor in checked_entries(found, where).items():
        bare_name = PREFIXES.sub("", name)
        if bare_name in state:
            raise CheckpointError(
                f"{where}: {shown(name, 120)} is there twice, with and without a wrapper's prefix"
            )
        state[bare_name] = tensor
    return state


def checked_entries(state: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    """Return the entries of a state dict, detached.

    Raises:
        CheckpointError: A key is not a string, or a value is not an ordinary dense tensor.
    """
    # Name the types only: a small file can hold a tuple whose text would take gigabytes.
    odd_types = {type(key).__name__ for key in state if not isinstance(key, str)}
    if odd_types:
        raise CheckpointError(
            f"{where}: has keys of type {listed(sorted(odd_types))}; weights have names"
        )
    entries: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{where}: entry {shown(name, 120)!r} is a {type(value).__name__}, not a tensor"
            )
        kind = _special_kind(value)
        if kind is not None:
            raise CheckpointError(
                f"{where}: {shown(name, 120)} is {kind}; "
                "weights must be ordinary dense tensors of numbers"
            )
        entries[name] = value.detach()
    return entries


def _special_kind(tensor: Tensor) -> str | None:
    """What makes a tensor unusable as a weight, in words; None for a dense tensor of numbers."""
    if tensor.is_meta:
        return "without data (meta)"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.dtype not in NUMBERS:
        return str(tensor.dtype)
    return None


def load_weights_(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False
) -> list[str]:
    """Copy a state dict into a model; if it does not fit, the model is unchanged.

    Returns the names of the classifier's tensors that kept their values, see `check_weights`.

    Raises:
        CheckpointError: From `check_weights`.
    """
    kept = check_weights(model, state, where, new_classifier=new_classifier)
    _load_entries_(model, _without(state, kept))
    return kept


def assign_weights_(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False
) -> bool:
    """Put the tensors of a state dict into a meta model, without a copy where that is possible.

    Returns False where the model still lacks values: the caller must then build it with values.

    Raises:
        CheckpointError: From `check_weights`.
    """
    kept = check_weights(model, state, where, new_classifier=new_classifier)
    if kept or alias_names(model):
        return False
    own = model.state_dict()
    ready: dict[str, Tensor] = {}
    storages_in_use: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.detach().to(device="cpu", dtype=own[name].dtype)
        storage = tensor.untyped_storage()
        fills_storage = storage.nbytes() == tensor.nbytes
        shares_storage = storage.data_ptr() in storages_in_use
        # For memory with another alignment than torch's, products are summed in another order,
        # which changes the last bits of the outputs.
        aligned = tensor.data_ptr() % ALIGNMENT == 0
        if not fills_storage or shares_storage or not tensor.is_contiguous() or not aligned:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.numel():
            storages_in_use.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    _load_entries_(model, ready, assign=True)
    # A module can also hold tensors as plain attributes, neither parameters nor buffers.
    for module in model.modules():
        if any(tensor.is_meta for tensor in tensors_in(vars(module))):
            return False
    return True


def _load_entries_(model: nn.Module, state: Mapping[str, Tensor], *, assign: bool = False) -> None:
    """Load checked entries; names that `state` lacks keep their values."""
    # The model's own state dict carries the format versions of the modules, which torchvision's
    # MNASNet reads when it is loaded. So fill it anew instead of passing `state`.
    versioned = model.state_dict()
    versioned.clear()
    versioned.update(state)
    model.load_state_dict(versioned, strict=False, assign=assign)


def build_with_state(
    source: ModelSource,
    state: Mapping[str, Tensor],
    where: str,
    *,
    prepare_: Callable[[nn.Module], None] = lambda _: None,
    meta: nn.Module | None = None,
    seed: int = 0,
    new_classifier: bool = False,
) -> tuple[nn.Module, list[str]]:
    """Build a trusted source's network and load a state dict into it.

    Args:
        source: Its code is run without a check.
        state: Weights, under the names that the network has after `prepare_`.
        where: How error messages call the state dict.
        prepare_: Changes the network before the weights are loaded.
        meta: The source's network on the meta device, if the caller has built it already; it is
            not changed.
        seed: Of the values that the state dict lacks.
        new_classifier: See `check_weights`.

    Returns:
        The network, and the names of the classifier's tensors that kept their values.

    Raises:
        CheckpointError: From `check_weights`.
    """
    if source.kind in LIBRARIES:  # the user's own code is not run twice, so not on meta first
        if meta is None:
            model = build_model(source, device="meta", trust_code=True)
        else:
            model = copy.deepcopy(meta)
        prepare_(model)
        if assign_weights_(model, state, where, new_classifier=new_classifier):
            return model, []
    model = build_model(source, seed=seed, trust_code=True)
    prepare_(model)
    return model, load_weights_(model, state, where, new_classifier=new_classifier)


def check_weights(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False
) -> list[str]:
    """Check that a state dict fits a model and is finite.

    With `new_classifier`, the classifier's tensors may have other shapes in the state dict. Their
    names are returned: the model keeps its own values there.

    Raises:
        CheckpointError: Names, shapes or kinds of numbers differ, or a value is not finite.
    """
    kept = _reshaped_classifier(model, state) if new_classifier else []
    taken = _without(state, kept)
    problem = next(misfits(model, taken, lacking=kept), None)
    if problem is None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        problem = _first_not_finite(taken, parameters.keys())
    if problem is not None:
        raise CheckpointError(f"{where}: {problem}")
    return kept


def _without(state: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in names}


def _reshaped_classifier(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Names of the classifier's tensors whose shapes differ between model and state dict."""
    config = getattr(model, "pretrained_cfg", None)
    classifiers: Any = config.get("classifier") if isinstance(config, dict) else None
    if not classifiers:
        classifiers = USUAL_CLASSIFIERS
    elif isinstance(classifiers, str):
        classifiers = (classifiers,)
    prefixes = tuple(f"{module}." for module in classifiers)
    names: list[str] = []
    for name, tensor in model.state_dict().items():
        if name.startswith(prefixes) and name in state and state[name].shape != tensor.shape:
            names.append(name)
    return names


def _first_not_finite(state: Mapping[str, Tensor], parameters: Collection[str]) -> str | None:
    """The first tensor with NaN or infinite values, in words; buffers may be attention masks."""
    for name, tensor in state.items():
        problem = not_finite(name, tensor, mask=name not in parameters)
        if problem is not None:
            return problem
    return None


def misfits(
    model: nn.Module, state: Mapping[str, Tensor], *, lacking: Collection[str] = ()
) -> Iterator[str]:
    """How a state dict differs from the model's in names, shapes and kinds of numbers, in words.

    The names in `lacking` may be missing from the state dict.
    """
    own = model.state_dict()
    aliases = alias_names(model)
    missing: list[str] = []
    for name in own:
        if name not in state and name not in lacking and aliases.get(name) not in state:
            missing.append(name)
    unexpected: list[str] = []
    for name in state:
        if name not in own:
            unexpected.append(name)
    differences: list[str] = []
    if missing:
        differences.append(f"lacks {listed(missing)}")
    if unexpected:
        differences.append(f"has {listed(unexpected)} too many")
    if differences:
        hint = ""
        if any(name.endswith("dcls_positions") for name in unexpected):
            hint = "; these weights are converted already"
        yield f"does not fit the model: it {' and '.join(differences)}{hint}"
    for name, theirs in state.items():
        ours = own.get(name, theirs)
        if theirs.shape != ours.shape:
            yield f"{name} has shape {tuple(theirs.shape)}, the model needs {tuple(ours.shape)}"
        needs_fractions = ours.is_floating_point() and not theirs.is_floating_point()
        if needs_fractions or theirs.is_complex() != ours.is_complex():
            yield f"{name} is {theirs.dtype}, the model needs {ours.dtype}"


def not_finite(name: str, tensor: Tensor, *, mask: bool) -> str | None:
    """Say in words that a tensor has NaN or infinite values; None if it has none.

    With `mask`, a tensor whose values are all 0 or -inf is accepted, as an attention mask.
    """
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    if not has_fractions or tensor.is_meta or not tensor.numel():
        return None
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if values.itemsize == 1:  # torch does not compare float8
        values = values.float()
    least, largest = values.aminmax()  # makes no copy of the tensor
    if math.isfinite(least) and math.isfinite(largest):
        return None
    if mask and bool(((values == 0) | (values == -torch.inf)).all()):
        return None
    count = int((~values.isfinite()).sum())
    return f"{name} has {count} of {tensor.numel()} values that are NaN or infinite"


def alias_names(model: nn.Module) -> dict[str, str]:
    """Further names of a tensor in the model's state dict -> its first name.

    A tensor has several names where its module has several places in the model.
    """
    first_names: dict[int, str] = {}  # by the id of the tensor
    aliases: dict[str, str] = {}
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
    return aliases


def with_names_of(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the entries of a state dict to the model's names, where timm knows how.

    timm translates downloaded weights by a function of the model's module. Files of other programs
    also lack BatchNorm's `num_batches_tracked`; inference does not use it, so 0 is filled in.
    """
    own = model.state_dict().keys()
    if own != state.keys():
        state = _translated_by_timm(model, state, own)
    completed = dict(state)
    differing = own ^ state.keys()
    if all(name in own and name.endswith(".num_batches_tracked") for name in differing):
        for name in differing:
            completed[name] = torch.tensor(0)
    return completed


def _translated_by_timm(
    model: nn.Module, state: Mapping[str, Tensor], own: Collection[str]
) -> Mapping[str, Tensor]:
    """The state dict as timm's function for the model renames it, if more names then fit."""
    module_name = type(model).__module__
    if not module_name.startswith("timm."):
        return state
    translate = getattr(sys.modules.get(module_name), "checkpoint_filter_fn", None)
    if translate is None:
        return state
    # The function may fail on names that it does not know; loading then says what does not fit.
    with contextlib.suppress(Exception):
        translated: dict[str, Any] = translate(dict(state), model)
        fits_better = _name_differences(own, translated) < _name_differences(own, state)
        if fits_better and _all_have_data(translated.values()):
            return translated
    return state


def _name_differences(names: Collection[str], others: Collection[str]) -> int:
    return len(set(names) ^ set(others))


def _all_have_data(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Tensor) and not value.is_meta for value in values)


def _open_lazily(path: Path) -> Any:
    """Open a file whose tensors are read: views of a mapped file would count as memory too."""
    try:
        return safe_open(path, framework="pt", backend="pread")
    except TypeError:  # safetensors before 0.8 maps files alone
        return safe_open(path, framework="pt")


@contextlib.contextmanager
def opened(path: Path, what: str = "") -> Iterator[Any]:
    """Open a safetensors file whose tensors are read one by one, when asked for.

    Raises:
        CheckpointError: The file cannot be read; also for errors inside the block.
    """
    check_weights_file(path, what)
    try:
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
        if header_length > MOST_HEADER:
            raise ValueError(
                f"its header has {header_length:,} bytes; {MOST_HEADER:,} are the most"
            )
        with _open_lazily(path) as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        where = f"{what} {path}".lstrip()
        raise CheckpointError(
            f"{where}: not a readable safetensors file: {one_line(error)[:200]}"
        ) from error


def load_file(path: Path, what: str = "") -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, each into memory of its own that a model can keep.

    Raises:
        CheckpointError: The file cannot be read.
    """
    with opened(path, what) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}


def _read_torch(path: Path, where: str) -> Any:
    """The content of a file of torch.save, unpickled with weights_only=True."""
    check_weights_file(path)
    try:
        unpacked = _unpacked_size(path)
        if unpacked > MOST_GROWTH * path.stat().st_size:
            raise CheckpointError(
                f"{where}: its parts unpack to {unpacked:,} bytes, "
                f"more than {MOST_GROWTH} times the file's size"
            )
        # timm's training checkpoints hold their arguments as a Namespace. Old files make torch
        # warn about its own code.
        with (
            warnings.catch_warnings(action="ignore"),
            torch.serialization.safe_globals([argparse.Namespace]),
        ):
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes raise anything when unpickled: struct.error, ...
        what = "is damaged"
        if isinstance(error, pickle.UnpicklingError):
            what = "is damaged or holds more than tensors"
        raise CheckpointError(
            f"{where}: {what}, or is no file of torch.save; it is read with weights_only=True, "
            f"so save its state dict alone ({type(error).__name__})"
        ) from error


def _unpacked_size(path: Path) -> int:
    """Bytes of a zip file's parts when unpacked; 0 for a file of another format."""
    with path.open("rb") as file:
        if file.read(len(ZIP_START)) != ZIP_START:
            return 0
        return sum(part.file_size for part in zipfile.ZipFile(file).infolist())


def _find_state_dict(content: Any, depth: int = 0) -> Mapping[Any, Any] | None:
    """The state dict inside the mappings of a training script; None if it has no tensors."""
    if not isinstance(content, Mapping) or depth > MOST_WRAPPERS:
        return None
    for key in WRAPPERS:
        inner = _find_state_dict(content.get(key), depth + 1)
        if inner is not None:
            return inner
    if any(isinstance(value, Tensor) for value in content.values()):
        return content
    return None
