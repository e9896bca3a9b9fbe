"""Our entry in timm's registry, and timm's convolutions in ours, without importing timm or torch
early."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def dcls_convert(pretrained: bool = False, **kwargs: Any) -> Any:
    """One of our folders, for `timm.create_model("local-dir:FOLDER")`; timm's registry takes this
    function's name."""
    from .checkpoints.timm_model import create_converted

    return create_converted(pretrained=pretrained, **kwargs)


def register_when_timm_is_imported() -> None:
    """Register `dcls_convert` with timm, now if timm is there, else as soon as it is imported."""
    if sys.modules.get("timm") is not None:
        _register()
    # timm has no plug-ins, and importing it here would cost every command the seconds that torch
    # takes.
    elif not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())


def _register() -> None:
    from timm.models import is_model, register_model

    from .layers.conv_classes import register_timm_convs

    register_timm_convs()
    if not is_model(dcls_convert.__name__):
        register_model(dcls_convert)


class _TimmFinder(importlib.abc.MetaPathFinder):
    """Finds timm by the other finders, and has it registered after it was executed; it may be
    looked up before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "timm":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(
            (found for finder in others if (found := finder.find_spec(fullname, path, target))),
            None,
        )
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == "timm":
                _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
