"""Register converted models with timm, and timm's convolutions with this package.

This module imports neither timm nor torch before the user does.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def dcls_convert(pretrained: bool = False, **kwargs: Any) -> Any:
    """Create the model of a folder, for `timm.create_model("local-dir:FOLDER")`.

    timm registers it under this function's name, which the folder's `config.json` states.
    """
    from .checkpoints.timm_model import create_converted

    return create_converted(pretrained=pretrained, **kwargs)


def register_when_timm_is_imported() -> None:
    """Register `dcls_convert` with timm: now if timm is imported already, else when it is."""
    if sys.modules.get("timm") is not None:
        _register()
        return
    # timm has no plug-in mechanism. Do not import timm here: it imports torch, which would slow
    # down every command by seconds.
    if not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())


def _register() -> None:
    from timm.models import is_model, register_model

    from .layers.conv_classes import register_timm_convs

    register_timm_convs()
    if not is_model(dcls_convert.__name__):
        register_model(dcls_convert)


class _TimmFinder:  # importlib.abc, which has the base class, is slow to import
    """Finds timm through the other finders, and calls `_register` after timm has been executed.

    Merely looking timm up, as `importlib.util.find_spec` does, registers nothing.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "timm":
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(fullname, path, target)
                if spec:
                    break
        if spec is None or spec.loader is None:
            return spec
        exec_timm = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            exec_timm(module)
            if module.__name__ == "timm":
                _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
