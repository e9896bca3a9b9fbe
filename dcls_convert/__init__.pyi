from . import depthwise as depthwise
from . import tuning as tuning
from .checkpoints.load import load_converted as load_converted
from .checkpoints.save import convert_and_save_ as convert_and_save_
from .checkpoints.save import save_converted as save_converted
from .errors import CheckpointError as CheckpointError
from .errors import DclsConvertError as DclsConvertError
from .errors import ModelError as ModelError
from .errors import NothingMatchesError as NothingMatchesError
from .errors import PlanError as PlanError
from .errors import RuleError as RuleError
from .fitting.images import Calibration as Calibration
from .fitting.images import calibrate as calibrate
from .layers.construction import construct_kernel as construct_kernel
from .layers.conv_classes import register_conv as register_conv
from .layers.dcls_conv import DclsConv1d as DclsConv1d
from .layers.dcls_conv import DclsConv2d as DclsConv2d
from .layers.dcls_conv import DclsConv3d as DclsConv3d
from .networks.sites import find_convs as find_convs
from .pipeline import convert_ as convert_
from .pipeline import convert_from_authors_ as convert_from_authors_
from .planning.plan import ConversionPlan as ConversionPlan
from .planning.planner import plan_conversion as plan_conversion
from .planning.rules import RuleSet as RuleSet
from .planning.rules import load_rules as load_rules
from .reports.report import ConversionReport as ConversionReport
from .reports.report import measure_report as measure_report
from .reports.report import predict_report as predict_report
from .surgery.fold import fold_to_dense_ as fold_to_dense_
from .surgery.start import apply_plan_ as apply_plan_

__version__: str
__all__ = [
    "Calibration",
    "CheckpointError",
    "ConversionPlan",
    "ConversionReport",
    "DclsConv1d",
    "DclsConv2d",
    "DclsConv3d",
    "DclsConvertError",
    "ModelError",
    "NothingMatchesError",
    "PlanError",
    "RuleError",
    "RuleSet",
    "__version__",
    "apply_plan_",
    "calibrate",
    "construct_kernel",
    "convert_",
    "convert_and_save_",
    "convert_from_authors_",
    "depthwise",
    "find_convs",
    "fold_to_dense_",
    "load_converted",
    "load_rules",
    "measure_report",
    "plan_conversion",
    "predict_report",
    "register_conv",
    "save_converted",
    "tuning",
]
