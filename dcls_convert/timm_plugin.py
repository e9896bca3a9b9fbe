"""Our entry in timm's registry, and timm's convolutions in ours, without importing timm or torch early."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def dcls_convert(pretrained: bool = False, **kwargs: Any) -> Any:
    """The model of one of our folders. `timm.create_model("local-dir:FOLDER")` calls this, with its config's arguments.

    timm takes this function's name for its registry: without `import dcls_convert`, timm says "Unknown model
    (dcls_convert)".
    """
    from .checkpoints.timm_model import create_converted

    return create_converted(pretrained=pretrained, **kwargs)


def register_when_timm_is_imported() -> None:
    """Register `dcls_convert` with timm, now if timm is there, else as soon as it is imported.

    timm has no plug-in mechanism, and importing it here would cost every command the seconds that torch takes.
    """
    if sys.modules.get("timm") is not None:
        _register()
    elif not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())


def _register() -> None:
    from timm.models import is_model, register_model

    from .layers.conv_classes import register_timm_convs

    register_timm_convs()
    if not is_model(dcls_convert.__name__):
        register_model(dcls_convert)


class _TimmFinder(importlib.abc.MetaPathFinder):
    """Finds timm by the other finders, and has it registered after it was executed.

    It stays: timm can be looked up any number of times before it is executed.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "timm":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == "timm":
                _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
