"""Convolutions with learnable element positions (DCLS) for any timm or torchvision model.

    import dcls_convert
    report = dcls_convert.convert_(model, dilated_size=17)

Names resolve on first use, so that the command line answers without importing torch. Importing the package registers
the architecture `dcls` with timm, at once or as soon as timm is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .timm_entry import register_when_timm_is_imported

__version__ = "0.1.0"

_HOMES = {
    "api": ("convert_", "convert_from_authors_"),
    "calibration": ("calibrate",),
    "checkpoint": ("load_converted", "save_converted"),
    "convs": ("register_conv",),
    "errors": (
        "CheckpointError",
        "DclsConvertError",
        "ModelError",
        "NothingMatchesError",
        "PlanError",
        "RuleError",
    ),
    "folding": ("fold_to_dense_",),
    "interpolation": ("construct_kernel",),
    "layers": ("DclsConv1d", "DclsConv2d", "DclsConv3d"),
    "plan": ("plan_conversion",),
    "plan_data": ("ConversionPlan",),
    "report": ("ConversionReport", "measure_report", "predict_report"),
    "rules": ("RuleSet", "load_rules"),
    "sites": ("find_convs",),
    "surgery": ("apply_plan_",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("tuning",)
__all__ = ["__version__", *sorted([*_HOME_OF, *_MODULES])]

if TYPE_CHECKING:
    from . import tuning as tuning
    from .api import convert_ as convert_
    from .api import convert_from_authors_ as convert_from_authors_
    from .calibration import calibrate as calibrate
    from .checkpoint import load_converted as load_converted
    from .checkpoint import save_converted as save_converted
    from .convs import register_conv as register_conv
    from .errors import CheckpointError as CheckpointError
    from .errors import DclsConvertError as DclsConvertError
    from .errors import ModelError as ModelError
    from .errors import NothingMatchesError as NothingMatchesError
    from .errors import PlanError as PlanError
    from .errors import RuleError as RuleError
    from .folding import fold_to_dense_ as fold_to_dense_
    from .interpolation import construct_kernel as construct_kernel
    from .layers import DclsConv1d as DclsConv1d
    from .layers import DclsConv2d as DclsConv2d
    from .layers import DclsConv3d as DclsConv3d
    from .plan import plan_conversion as plan_conversion
    from .plan_data import ConversionPlan as ConversionPlan
    from .report import ConversionReport as ConversionReport
    from .report import measure_report as measure_report
    from .report import predict_report as predict_report
    from .rules import RuleSet as RuleSet
    from .rules import load_rules as load_rules
    from .sites import find_convs as find_convs
    from .surgery import apply_plan_ as apply_plan_


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__


register_when_timm_is_imported()
