"""From a name such as "timm:convnext_tiny" to the module. Alone imports timm and torchvision."""

import contextlib
import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import DclsConvertError, ModelError, did_you_mean, one_line

FOREIGN_SOURCES = ("hf-hub", "local-dir")  # which timm resolves itself
NOT_FOR_CONVERSION = ("dcls",)  # our own entry point in timm's registry, which rebuilds converted models
USUAL_INPUT_SIZE = (3, 224, 224)  # of what states none: the size of ImageNet's classifiers
VIDEO_FRAMES = 16  # of the clips for which torchvision states the operations of its video models
INSTALL_HINT = "install matching versions together: pip install --upgrade torch torchvision timm"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """How to build a model again."""

    name: (
        str  # "timm:convnext_tiny", "torchvision:resnet50", "hf-hub:repo", "local-dir:folder", "package.module:factory"
    )
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments for its factory

    @property
    def short_name(self) -> str:
        """For file names: what stands behind the last colon or slash."""
        return self.name.rpartition(":")[2].rstrip("/").rpartition("/")[2]


def resolve_model(
    name: str, *, num_classes: int | None = None, in_chans: int | None = None, pretrained: bool = False
) -> ModelSource:
    """Find out what a MODEL of the command line means: timm first, then torchvision.

    Raises:
        ModelError: No such model, with the closest names; or options that it cannot have.
    """
    args: dict[str, Any] = {}
    if num_classes is not None:
        args["num_classes"] = num_classes
    if in_chans is not None:
        args["in_chans"] = in_chans
    prefix, colon, rest = name.partition(":")
    if (not rest and colon) or not name.strip():
        raise ModelError(f"model {name!r} has no name")
    if colon and prefix in FOREIGN_SOURCES:
        return ModelSource(name=name, args=args)
    if prefix == "timm" or not colon:
        wanted = rest if colon else name
        if _timm().is_model(wanted.partition(".")[0]) and wanted not in NOT_FOR_CONVERSION:
            _check_tag(wanted)
            return ModelSource(name=f"timm:{wanted}", args=args)
    if prefix == "torchvision" or not colon:
        wanted = rest if colon else name
        if wanted in _torchvision_models().list_models():
            if pretrained and num_classes is not None:
                raise ModelError(
                    f"torchvision:{wanted}: its pretrained weights have a fixed number of classes; leave --num-classes"
                )
            if in_chans is not None:
                raise ModelError(f"torchvision:{wanted} has a fixed number of input channels; --in-chans is for timm")
            return ModelSource(name=f"torchvision:{wanted}", args=args)
    if colon and prefix not in ("timm", "torchvision"):
        if pretrained:
            raise ModelError(f"{name}: --pretrained is for timm and torchvision; let the factory load, or --checkpoint")
        return ModelSource(name=name, args=args)
    raise ModelError(f"no model {name!r}{did_you_mean(rest if colon else name, _known_models(prefix, colon), 3)}")


def build_model(
    source: ModelSource, *, pretrained: bool = False, device: str = "cpu", seed: int = 0, offline: bool = False
) -> nn.Module:
    """Build the model, in eval mode as far as its own factory does not say otherwise.

    Args:
        source: From `resolve_model`.
        pretrained: Load the weights that timm or torchvision know for it.
        device: "meta" builds without weights; a model that cannot be built there is built on the CPU all the same.
        seed: For its random initialisation; the global generator is left as it was.
        offline: Refuse what would have to be downloaded.

    Raises:
        ModelError: It cannot be built, or its weights cannot be had.
    """
    with torch.random.fork_rng(devices=[]), _quietly():
        if device == "meta" and not pretrained:
            for hollow in (torch.device("meta"), _WeightsOnMeta()):
                # Whatever fails here fails again below, with the message that matters, unless meta was the reason.
                with contextlib.suppress(ModelError), hollow:
                    return _build(source, pretrained=False, offline=offline)
        torch.manual_seed(seed)
        model = _build(source, pretrained=pretrained, offline=offline)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(f"{source.name}: was built on the meta device, without weights; build it on the CPU")
    return model


def build_hollow(source: ModelSource) -> nn.Module | None:
    """The model of timm or torchvision as `build_model` gives it, but what its layers keep for weights is on meta.

    It is for weights that are read from a file, which then take the hollow tensors' place: none are drawn before, and
    there is no second copy of the network in memory. What a constructor calculates (relative positions, blur kernels,
    anchors) has its values.

    Returns:
        None where the model has to be built on the CPU: of the user's own, not possible in this way, or drawing random
        numbers for more than its weights, which then would be other numbers.
    """
    kind = source.name.partition(":")[0]
    if kind not in ("timm", "torchvision", *FOREIGN_SOURCES):
        return None
    with torch.random.fork_rng(devices=[]), _quietly(), contextlib.suppress(ModelError):
        before = torch.get_rng_state()
        with _WeightsOnMeta():
            model = _build(source, pretrained=False, offline=False)
        return model if torch.equal(before, torch.get_rng_state()) else None
    return None


def registry_names() -> list[str]:
    """Every model of both registries: "timm:..." and then "torchvision:...", each sorted."""
    return [
        *(f"timm:{name}" for name in sorted(_known_models("timm", ":"))),
        *(f"torchvision:{name}" for name in sorted(_known_models("torchvision", ":"))),
    ]


def stated_input_size(source: ModelSource, model: nn.Module) -> tuple[int, ...] | None:
    """The input (channels, *spatial) that a model is made for; None where it says so itself, as timm's models do.

    torchvision states sizes with its weights: that of the default weights is taken, without downloading them. Clips
    are (channels, frames, rows, columns).
    """
    kind, _, name = source.name.partition(":")
    if kind == "timm" or kind in FOREIGN_SOURCES or getattr(model, "pretrained_cfg", None):
        return None
    return _torchvision_input_size(name, model) if kind == "torchvision" else USUAL_INPUT_SIZE


def rebuildable_source(model: nn.Module, source: ModelSource) -> ModelSource:
    """Where to get the model from without the hub or a folder: its architecture in timm's registry, and its arguments.

    timm notes on a model what it was built with; names that mean something by themselves stay.
    """
    if source.name.partition(":")[0] not in FOREIGN_SOURCES:
        return source
    return known_source(model) or source


def known_source(model: nn.Module) -> ModelSource | None:
    """The source that a model built by `timm.create_model` carries with it; None for any other module."""
    config = getattr(model, "pretrained_cfg", None)
    architecture = config.get("architecture") if isinstance(config, dict) else None
    if not architecture or not _timm().is_model(architecture):
        return None
    args = dict(getattr(model, "_model_args", {}))
    try:
        json.dumps(args)
    except (TypeError, ValueError):  # a layer class as an argument, say: only its user can build the model again
        return None
    return ModelSource(name=f"timm:{architecture}", args=args)


def with_names_of(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the model's own names, where timm can translate it, as files in the original ConvNeXt naming.

    Args:
        model: timm's, for anything to happen; the function that timm passes its own downloads through is taken.
        state: Returned as it is where the translation fits no better.
    """
    own, module = model.state_dict().keys(), type(model).__module__
    translate = getattr(sys.modules.get(module), "checkpoint_filter_fn", None) if module.startswith("timm.") else None
    if translate is None or own == state.keys():
        return dict(state)
    try:
        translated = translate(dict(state), model)
        fits_better = len(own ^ translated.keys()) < len(own ^ state.keys())
        has_data = all(isinstance(tensor, Tensor) and not tensor.is_meta for tensor in translated.values())
    except Exception:  # on names that it does not know; loading then says what does not fit
        return dict(state)
    return dict(translated) if fits_better and has_data else dict(state)


def _build(source: ModelSource, *, pretrained: bool, offline: bool) -> nn.Module:
    kind, _, name = source.name.partition(":")
    try:
        if kind == "timm" or kind in FOREIGN_SOURCES:
            if kind == "hf-hub" and offline:
                _check_cached(name)
            if kind == "local-dir":
                _check_folder(Path(name))
            target = name if kind == "timm" else source.name
            model = _timm().create_model(target, pretrained=pretrained, **source.args)
        elif kind == "torchvision":
            model = _build_torchvision(name, source.args, pretrained)
        else:
            model = _build_own(source)
    except DclsConvertError:
        raise
    except SystemExit as error:
        raise ModelError(f"{source.name}: its factory leaves the program (SystemExit {error.code})") from error
    except Exception as error:  # what timm, torchvision, the hub or the user's factory raise has no common base
        what = "its pretrained weights cannot be had" if pretrained else "cannot be built"
        raise ModelError(f"{source.name}: {what}: {type(error).__name__}: {one_line(error)[:300]}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source.name}: gives a {type(model).__name__}, not a torch.nn.Module")
    return model


def _build_torchvision(name: str, args: dict[str, Any], pretrained: bool) -> nn.Module:
    models = _torchvision_models()
    known = inspect.signature(models.get_model_builder(name)).parameters
    options = dict(args)
    if "weights_backbone" in known:
        options["weights_backbone"] = None  # torchvision downloads a backbone by default
    return models.get_model(name, weights="DEFAULT" if pretrained else None, **options)  # type: ignore[no-any-return]


def _torchvision_input_size(name: str, model: nn.Module) -> tuple[int, ...]:
    models = _torchvision_models()
    family = models.get_model_builder(name).__module__.removeprefix(models.__name__ + ".").partition(".")[0]
    if family == "detection":  # these scale what they are given; so images of the size that they scale to
        scaling: Any = model.transform
        side = scaling.min_size[-1]
        return (3, *(scaling.fixed_size or (side, side)))
    if isinstance(side := getattr(model, "image_size", None), int):  # transformers are built for one size alone
        return (3, side, side)
    weights = getattr(models.get_model_weights(name), "DEFAULT", None)
    transforms = weights.transforms() if weights is not None else None
    stated = getattr(transforms, "crop_size", None) or getattr(transforms, "resize_size", None)
    if not stated:
        return USUAL_INPUT_SIZE
    rows, columns = (stated * 2)[:2]  # one number is for both sides
    return (3, VIDEO_FRAMES, rows, columns) if family == "video" else (3, rows, columns)


def _build_own(source: ModelSource) -> nn.Module:
    module_name, _, attribute = source.name.partition(":")
    with _folder_on_path(os.getcwd()):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ModelError(
                f"{source.name}: module {module_name!r} cannot be imported: {one_line(error)}"
                + did_you_mean(module_name, ("timm", "torchvision", *FOREIGN_SOURCES))
            ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"{source.name}: module {module_name!r} has no function {attribute!r}")
    return factory(**source.args)  # type: ignore[no-any-return]


def _check_cached(repository: str) -> None:
    import huggingface_hub

    name, _, revision = repository.partition("@")
    if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision or None), str):
        raise ModelError(f"hf-hub:{repository}: its config is not in the local cache, and a dry run downloads nothing")


def _check_folder(folder: Path) -> None:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"local-dir:{folder}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"local-dir:{folder}: {path} is not JSON: {one_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise ModelError(f"local-dir:{folder}: {path} names no architecture; it is not a config of timm")


def _check_tag(name: str) -> None:
    architecture, dot, tag = name.partition(".")
    if dot:
        tags = [known.partition(".")[2] for known in _timm().list_pretrained(architecture + ".*")]
        if tag not in tags:
            raise ModelError(f"timm:{architecture} has no weights tagged {tag!r}; tags: {', '.join(tags) or 'none'}")


def _known_models(prefix: str, colon: str) -> list[str]:
    known: list[str] = []
    if prefix == "timm" or not colon:
        known += _timm().list_models()
    if prefix == "torchvision" or not colon:
        known += _torchvision_models().list_models()
    return [name for name in known if name not in NOT_FOR_CONVERSION]


class _WeightsOnMeta(TorchFunctionMode):
    """The layers' weights are hollow, other tensors are real: for factories that calculate with tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _timm() -> ModuleType:
    return _import("timm")


def _torchvision_models() -> ModuleType:
    return _import("torchvision.models")


def _import(name: str) -> ModuleType:
    """Import timm or torchvision; a torch and a torchvision that do not fit together become one line."""
    try:
        with _quietly():
            return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ModelError(f"{name} cannot be imported: {one_line(error)[:200]}; {INSTALL_HINT}") from error


@contextlib.contextmanager
def _folder_on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, str(Path(folder)))
    try:
        yield
    finally:
        sys.path.remove(str(Path(folder)))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings that libraries give about themselves; the user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
