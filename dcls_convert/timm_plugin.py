"""The entry point `dcls` in timm's registry, and timm's convolutions in ours, without importing timm or torch early."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def dcls(pretrained: bool = False, **kwargs: Any) -> Any:
    """What `timm.create_model("local-dir:FOLDER")` calls for our folders, with the `model_args` of their config."""
    from .checkpoints.timm_model import create_dcls

    return create_dcls(pretrained=pretrained, **kwargs)


def register_when_timm_is_imported() -> None:
    """Register `dcls` now if timm is there, else as soon as it is imported.

    timm has no plug-in mechanism, and importing it here would cost every command the seconds that torch takes.
    """
    if "timm" in sys.modules:
        _register()
    elif not any(isinstance(finder, _TimmWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmWatcher())


def _register() -> None:
    from timm.models import is_model, register_model

    from .layers.timm_conv_classes import register_timm_convs

    register_timm_convs()
    if not is_model(dcls.__name__):
        register_model(dcls)


class _TimmWatcher(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find timm, and runs `_register` when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # from now on, timm is as if we had not been there
        self.loader.exec_module(module)
        _register()
