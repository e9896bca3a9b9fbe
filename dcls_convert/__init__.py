"""Convolutions with learnable element positions (DCLS) for any timm or torchvision model.

    import dcls_convert
    report = dcls_convert.convert_(model, dilated_size=17)

Names resolve on first use, so that the command line answers without importing torch. Importing the package registers
the architecture `dcls` with timm, at once or as soon as timm is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .timm_plugin import register_when_timm_is_imported

__version__ = "0.1.0"

_HOMES = {
    "surgery.convert": ("convert_", "convert_from_authors_"),
    "fitting.calibration": ("calibrate",),
    "checkpoints.folder": ("load_converted", "save_converted"),
    "layers.conv_classes": ("register_conv",),
    "errors": (
        "CheckpointError",
        "DclsConvertError",
        "ModelError",
        "NothingMatchesError",
        "PlanError",
        "RuleError",
    ),
    "surgery.fold": ("fold_to_dense_",),
    "layers.construction": ("construct_kernel",),
    "layers.dcls_conv": ("DclsConv1d", "DclsConv2d", "DclsConv3d"),
    "planning.planner": ("plan_conversion",),
    "planning.plan": ("ConversionPlan",),
    "reports.report": ("ConversionReport", "measure_report", "predict_report"),
    "planning.rules": ("RuleSet", "load_rules"),
    "networks.sites": ("find_convs",),
    "surgery.place": ("apply_plan_",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("tuning",)
__all__ = ["__version__", *sorted([*_HOME_OF, *_MODULES])]

if TYPE_CHECKING:
    from . import tuning as tuning
    from .checkpoints.folder import load_converted as load_converted
    from .checkpoints.folder import save_converted as save_converted
    from .errors import CheckpointError as CheckpointError
    from .errors import DclsConvertError as DclsConvertError
    from .errors import ModelError as ModelError
    from .errors import NothingMatchesError as NothingMatchesError
    from .errors import PlanError as PlanError
    from .errors import RuleError as RuleError
    from .fitting.calibration import calibrate as calibrate
    from .layers.construction import construct_kernel as construct_kernel
    from .layers.conv_classes import register_conv as register_conv
    from .layers.dcls_conv import DclsConv1d as DclsConv1d
    from .layers.dcls_conv import DclsConv2d as DclsConv2d
    from .layers.dcls_conv import DclsConv3d as DclsConv3d
    from .networks.sites import find_convs as find_convs
    from .planning.plan import ConversionPlan as ConversionPlan
    from .planning.planner import plan_conversion as plan_conversion
    from .planning.rules import RuleSet as RuleSet
    from .planning.rules import load_rules as load_rules
    from .reports.report import ConversionReport as ConversionReport
    from .reports.report import measure_report as measure_report
    from .reports.report import predict_report as predict_report
    from .surgery.convert import convert_ as convert_
    from .surgery.convert import convert_from_authors_ as convert_from_authors_
    from .surgery.fold import fold_to_dense_ as fold_to_dense_
    from .surgery.place import apply_plan_ as apply_plan_


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__


register_when_timm_is_imported()
