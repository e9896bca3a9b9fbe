"""The table of formats of `dcls-convert fold`.

Imports no torch, so that help is fast.
"""

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["timm", "onnx", "pt2"]
# What was written: a file, or a folder that timm loads by itself, or one that needs this package.
OutputKind = Literal["onnx", "pt2", "stock timm", "dcls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A format that a folded model can be written in."""

    # "package.module:function", imported when it is called: (FoldedModel) -> ExportReport.
    writer: str
    suffix: str  # of the default output's name; every output of a file format must end in it
    noun: str  # for messages: "ONNX model"
    packages: tuple[str, ...] = ()  # packages that must be installed

    @property
    def is_file(self) -> bool:
        """Whether a file is written, not a folder."""
        return self.suffix.startswith(".")


EXPORT_FORMATS: dict[FormatName, ExportFormat] = {
    "timm": ExportFormat(
        writer="dcls_convert.export.stock_timm:write_timm_folder",
        suffix="-folded",
        noun="folder for timm",
    ),
    "onnx": ExportFormat(
        writer="dcls_convert.export.program:write_onnx",
        suffix=".onnx",
        noun="ONNX model",
        packages=("onnxscript", "onnxruntime"),
    ),
    "pt2": ExportFormat(
        writer="dcls_convert.export.program:write_pt2",
        suffix=".pt2",
        noun="torch.export program",
    ),
}
