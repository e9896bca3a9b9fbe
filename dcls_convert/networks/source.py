"""Find the model that a name such as "timm:convnext_tiny" means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..input import SAFETENSORS_SUFFIX, TORCH_SUFFIXES
from ..text import did_you_mean
from .registries import REGISTRIES, is_registered, registered_models

OTHER_TIMM_KINDS = ("hf-hub", "local-dir")  # timm itself loads these
# Pretrained, they expect that they themselves normalise their inputs a second time.
INCEPTIONS = ("torchvision:googlenet", "torchvision:inception_v3")
# Sources whose models are built by a library's code; all others run the user's code.
LIBRARY_KINDS = (*REGISTRIES, *OTHER_TIMM_KINDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """How to build a model again."""

    # "timm:convnext_tiny", "torchvision:resnet50", "hf-hub:repo", "local-dir:folder" or
    # "package.module:factory"
    name: str
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments for the factory

    @property
    def kind(self) -> str:
        """The part before the colon: "timm", "hf-hub", or a module of the user's."""
        return self.name.partition(":")[0]

    @property
    def is_from_registry(self) -> bool:
        """True if a registry, timm's or torchvision's, builds the model."""
        return self.kind in REGISTRIES


def resolve_model(
    name: str,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> ModelSource:
    """Find the source that MODEL on the command line means; a bare name is looked up in timm first.

    Args:
        name: The model.
        num_classes, in_chans: Arguments of its factory; None for the factory's defaults.
        model_kwargs: More arguments of its factory.
        pretrained: Whether the user wants the weights that its library offers.

    Raises:
        ModelError: There is no such model, or it does not take one of the options.
    """
    stated = {"num_classes": num_classes, "in_chans": in_chans}
    args = {key: value for key, value in stated.items() if value is not None}
    for key, value in (model_kwargs or {}).items():
        if key in args:
            raise ModelError(f"model kwargs: {key} is stated twice")
        args[key] = value
    prefix, colon, rest = name.partition(":")
    if (colon and not rest) or not name.strip():
        raise ModelError(f"model {name!r} has no name")
    if not colon or prefix in REGISTRIES:
        if colon:
            full_name = _registered_name(name, rest, (prefix,))
        else:
            full_name = _registered_name(name, name, REGISTRIES)
        if pretrained and full_name in INCEPTIONS:
            args.setdefault("transform_input", True)
        return ModelSource(name=full_name, args=args)
    if prefix.endswith(".py"):
        module = prefix.removesuffix(".py").replace("/", ".")
        raise ModelError(f"{name}: name the module, not its file: {module}:{rest}")
    if pretrained and prefix not in OTHER_TIMM_KINDS:
        raise ModelError(
            f"{name}: pretrained weights are for models of timm and torchvision; "
            "let the factory load its own, or give a checkpoint"
        )
    return ModelSource(name=name, args=args)


def _registered_name(name: str, bare_name: str, kinds: Sequence[str]) -> str:
    """Return the name with the first of these registries that has it: "timm:convnext_tiny".

    Raises:
        ModelError: None has it. The message quotes `name`, which is what the user gave.
    """
    for kind in kinds:
        if is_registered(kind, bare_name):
            return f"{kind}:{bare_name}"
    _explain_wrong_model(name)
    known = [known_name for kind in kinds for known_name in registered_models(kind)]
    raise ModelError(f"no model {name!r}{did_you_mean(bare_name, known, 3)}")


def _explain_wrong_model(name: str) -> None:
    """Raise ModelError if `name` looks like a folder, a weights file or a name on the hub.

    The message says how to pass it instead.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        raise ModelError(
            f"{name}: is a folder, not a model's name. If dcls-convert wrote it, inspect, verify "
            "and fold take it, and dcls_convert.load_converted loads it; "
            f"a folder in timm's own format is local-dir:{name}"
        )
    if path.suffix in (SAFETENSORS_SUFFIX, *TORCH_SUFFIXES):
        raise ModelError(
            f"{name}: is a weights file; name the model, and give the file as checkpoint"
        )
    if "/" in name:
        raise ModelError(f"no model {name!r}; a model on the hub is hf-hub:{name}")
    module, dot, function = name.rpartition(".")
    package = module.partition(".")[0]
    if dot and (Path(package).is_dir() or Path(f"{package}.py").is_file()):
        raise ModelError(f"no model {name!r}; a function of your own is {module}:{function}")
