"""Read a network's weights from a file, and put them into the network; weights that are not finite are refused."""

import argparse
import contextlib
import math
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import CheckpointError, listed, one_line, shown
from ..files import check_weights_file
from .outputs import tensors_in
from .source import LIBRARIES, ModelSource, build_model

# Where training scripts put a state dict, in the order of preference: averaged weights first, as timm does.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
MOST_WRAPPERS = 3  # one inside the other; a mapping can hold itself
PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")  # DistributedDataParallel, torch.compile
ALIGNMENT = 64  # bytes; torch allocates memory at multiples of it
MOST_HEADER = 16 << 20  # bytes of a safetensors file's, where 150,000 tensors have room
MOST_GROWTH = (
    20  # times the size of a torch file, when it is unpacked; torch itself compresses nothing
)
ZIP = b"PK\x03\x04"  # how such a file begins, but for old ones
# Not packed bits (bits8, float4_e2m1fn_x2), which operators of their own read.
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
    """A state dict, or that in a safetensors or torch file, without wrappers and prefixes; else CheckpointError."""
    if isinstance(weights, Mapping):
        return checked_entries(weights, "the state dict")
    path = Path(weights)
    where = f"checkpoint {path}"
    content = (
        load_file(path, "checkpoint") if path.suffix == ".safetensors" else _read_torch(path, where)
    )
    if (unwrapped := _unwrapped(content)) is None:
        kind = f"a {type(content).__name__}"
        if isinstance(content, Mapping):
            kind = f"a mapping with {listed(key for key in content if isinstance(key, str))}"
        raise CheckpointError(f"{where}: holds {kind}, not a state dict (names to tensors)")
    state: dict[str, Tensor] = {}
    for name, tensor in checked_entries(unwrapped, where).items():
        bare = PREFIXES.sub("", name)
        if bare in state:
            raise CheckpointError(
                f"{where}: {shown(name, 120)} is there twice, with and without a wrapper's prefix"
            )
        state[bare] = tensor
    return state


def checked_entries(state: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    """Detached; CheckpointError for what is no state dict, names to ordinary dense tensors."""
    # Odd keys are not shown: a small file can hold a tuple that takes gigabytes in words.
    if odd := {type(key).__name__ for key in state if not isinstance(key, str)}:
        raise CheckpointError(
            f"{where}: has keys of type {listed(sorted(odd))}; weights have names"
        )
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{where}: entry {shown(name, 120)!r} is a {type(value).__name__}, not a tensor"
            )
        kinds = {
            "without data (meta)": value.is_meta,
            "quantized": value.is_quantized,
            str(value.layout): value.layout != torch.strided,
            str(value.dtype): value.dtype not in NUMBERS,
        }
        if kind := next(filter(kinds.get, kinds), None):
            what = (
                f"{shown(name, 120)} is {kind}; weights must be ordinary dense tensors of numbers"
            )
            raise CheckpointError(f"{where}: {what}")
    return {name: value.detach() for name, value in state.items()}


def load_weights_(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False
) -> list[str]:
    """Copy a state dict into a model, everything or nothing; the names that kept their values, as `check_weights`."""
    kept = check_weights(model, state, where, new_classifier=new_classifier)
    _load(model, {name: tensor for name, tensor in state.items() if name not in kept})
    return kept


def assign_weights_(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False
) -> bool:
    """As `load_weights_`, for a meta model, which takes the tensors without a copy; False where it lacks values."""
    if check_weights(model, state, where, new_classifier=new_classifier) or alias_names(model):
        return False
    own = model.state_dict()
    ready: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.detach().to(device="cpu", dtype=own[name].dtype)
        memory = tensor.untyped_storage()
        alone = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in taken
        # Elsewhere than where torch's own memory starts, products are summed in another order: last bits differ.
        if not (alone and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.numel():
            taken.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    _load(model, ready, assign=True)
    # Also those in attributes of a module, which are neither parameters nor buffers.
    return not any(
        tensor.is_meta for module in model.modules() for tensor in tensors_in(vars(module))
    )


def _load(model: nn.Module, state: Mapping[str, Tensor], *, assign: bool = False) -> None:
    versioned = (
        model.state_dict()
    )  # with the versions of the modules' formats, which torchvision's MNASNet asks for
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
    """A trusted source's network, changed by `prepare_`, with a state dict's weights; names as of `load_weights_`."""
    if source.kind in LIBRARIES:  # the user's own code is run once
        model = build_model(source, device="meta", trust_code=True) if meta is None else meta
        prepare_(model)
        if assign_weights_(model, state, where, new_classifier=new_classifier):
            return model, []
    model = build_model(
        source, seed=seed, trust_code=True
    )  # with values for all that the state dict lacks
    prepare_(model)
    return model, load_weights_(model, state, where, new_classifier=new_classifier)


def check_weights(
    model: nn.Module, state: Mapping[str, Tensor], where: str, *, new_classifier: bool = False
) -> list[str]:
    """Refuse (CheckpointError) what does not fit or is not finite; the names of a classifier that keeps its values."""
    kept: list[str] = []
    if new_classifier:
        config = getattr(model, "pretrained_cfg", None)
        stated = (config.get("classifier") if isinstance(config, dict) else None) or (
            "fc",
            "classifier",
            "head",
        )
        prefixes = tuple(
            f"{module}." for module in ([stated] if isinstance(stated, str) else stated)
        )
        own = model.state_dict()
        kept = [
            n
            for n in own
            if n.startswith(prefixes) and n in state and state[n].shape != own[n].shape
        ]
    taken = {name: tensor for name, tensor in state.items() if name not in kept}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    infinite = (
        not_finite(name, tensor, mask=name not in parameters) for name, tensor in taken.items()
    )
    if problem := next(misfits(model, taken, lacking=kept), None) or next(
        filter(None, infinite), None
    ):
        raise CheckpointError(f"{where}: {problem}")
    return kept


def misfits(
    model: nn.Module, state: Mapping[str, Tensor], *, lacking: Collection[str] = ()
) -> Iterator[str]:
    """How the names, shapes and kinds of numbers of a state dict differ from the model's, in words."""
    own, aliases = model.state_dict(), alias_names(model)
    missing = [
        n for n in own if n not in state and n not in lacking and aliases.get(n) not in state
    ]
    unexpected = [name for name in state if name not in own]
    if missing or unexpected:
        parts = [f"lacks {listed(missing)}"] * bool(missing) + [
            f"has {listed(unexpected)} too many"
        ] * bool(unexpected)
        converted = "; these weights are converted already" * any(
            name.endswith("dcls_positions") for name in unexpected
        )
        yield f"does not fit the model: it {' and '.join(parts)}{converted}"
    for name, theirs in state.items():
        ours = own.get(name, theirs)
        if theirs.shape != ours.shape:
            yield f"{name} has shape {tuple(theirs.shape)}, the model needs {tuple(ours.shape)}"
        if (
            theirs.is_complex() != ours.is_complex()
            or theirs.is_floating_point() < ours.is_floating_point()
        ):
            yield f"{name} is {theirs.dtype}, the model needs {ours.dtype}"


def not_finite(name: str, tensor: Tensor, *, mask: bool) -> str | None:
    """What is wrong with the values of a tensor, in words; a `mask` of attention may be all 0 or -inf."""
    if (
        not (tensor.is_floating_point() or tensor.is_complex())
        or tensor.is_meta
        or not tensor.numel()
    ):
        return None
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.float() if values.itemsize == 1 else values  # torch does not compare float8
    if all(math.isfinite(bound) for bound in values.aminmax()):  # without a copy of the tensor
        return None
    if mask and bool(((values == 0) | (values == -torch.inf)).all()):
        return None
    return f"{name} has {int((~values.isfinite()).sum())} of {tensor.numel()} values that are NaN or infinite"


def alias_names(model: nn.Module) -> dict[str, str]:
    """For a module that stands in several places: its tensors' later names in the state dict -> their first name."""
    first: dict[int, str] = {}
    own = model.state_dict(keep_vars=True)
    return {
        name: first[id(tensor)]
        for name, tensor in own.items()
        if first.setdefault(id(tensor), name) != name
    }


def with_names_of(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the model's names, where timm's own function for downloaded weights translates them better.

    Files of other programs lack BatchNorm's counters of batches, which no inference uses: they are 0.
    """
    own, module = model.state_dict().keys(), type(model).__module__
    translate = (
        getattr(sys.modules.get(module), "checkpoint_filter_fn", None)
        if module.startswith("timm.")
        else None
    )
    if translate is not None and own != state.keys():
        with contextlib.suppress(
            Exception
        ):  # it does not know these names; loading then says what does not fit
            translated = translate(dict(state), model)
            fits_better = len(own ^ translated.keys()) < len(own ^ state.keys())
            if fits_better and all(
                isinstance(each, Tensor) and not each.is_meta for each in translated.values()
            ):
                state = translated
    lacking = own ^ state.keys()
    counters = (
        lacking
        if all(name in own and name.endswith(".num_batches_tracked") for name in lacking)
        else ()
    )
    return {**state, **{name: torch.tensor(0) for name in counters}}


@contextlib.contextmanager
def opened(path: Path, what: str = "") -> Iterator[Any]:
    """A safetensors file, whose tensors are read when asked for; CheckpointError, here or inside the block."""
    check_weights_file(path, what)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER:
            raise ValueError(f"its header has {length:,} bytes; {MOST_HEADER:,} are the most")
        # Read the tensors: views of the mapped file would count as memory too.
        with safe_open(path, framework="pt", backend="pread") as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        where = f"{what} {path}".lstrip()
        raise CheckpointError(
            f"{where}: not a readable safetensors file: {one_line(error)[:200]}"
        ) from error


def load_file(path: Path, what: str = "") -> dict[str, Tensor]:
    """All tensors of a safetensors file, each in memory of torch's own, which a model can keep; as `opened`."""
    with opened(path, what) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}


def _read_torch(path: Path, where: str) -> Any:
    check_weights_file(path)
    try:
        with path.open("rb") as file:
            parts = zipfile.ZipFile(file).infolist() if file.read(len(ZIP)) == ZIP else []
        if (unpacked := sum(part.file_size for part in parts)) > MOST_GROWTH * path.stat().st_size:
            raise CheckpointError(
                f"{where}: its parts unpack to {unpacked:,} bytes, more than {MOST_GROWTH} times the file's size"
            )
        # timm's training checkpoints hold their arguments as a Namespace; old files make torch warn about itself.
        with (
            warnings.catch_warnings(action="ignore"),
            torch.serialization.safe_globals([argparse.Namespace]),
        ):
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except (
        Exception
    ) as error:  # damaged bytes raise anything when unpickled: struct.error, IndexError, ...
        what = (
            "is damaged or holds more than tensors"
            if isinstance(error, pickle.UnpicklingError)
            else "is damaged"
        )
        raise CheckpointError(
            f"{where}: {what}, or is no file of torch.save; it is read with weights_only=True, so save its "
            f"state dict alone ({type(error).__name__})"
        ) from error


def _unwrapped(content: Any, depth: int = 0) -> Mapping[Any, Any] | None:
    """The state dict inside the mappings of a training script; None where there are no tensors anywhere."""
    if not isinstance(content, Mapping) or depth > MOST_WRAPPERS:
        return None
    inner = (_unwrapped(content.get(key), depth + 1) for key in WRAPPERS)
    own = content if any(isinstance(value, Tensor) for value in content.values()) else None
    return next((state for state in inner if state is not None), own)
