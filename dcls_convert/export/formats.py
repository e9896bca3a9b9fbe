"""The formats of `dcls-convert fold`: each is one row of FORMATS.

Imports no torch, so that help is fast.
"""

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["timm", "onnx", "pt2"]
# What was written: a file, or a folder that timm loads by itself, or one that needs this package.
OutputFormat = Literal["onnx", "pt2", "stock timm", "dcls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format: what is written, and by what."""

    # What its file is, in words; empty if a folder is written, which `ExportReport.kind` describes.
    file: str
    # End of the default output's name. Every output of a file format must end in it.
    suffix: str
    # "module:function", as it imports torch; from a FoldedModel to an ExportReport.
    writer: str
    packages: tuple[str, ...] = ()  # what it needs besides the requirements; of the extra `export`


FORMATS: dict[FormatName, Format] = {
    "timm": Format(
        file="",
        suffix="-folded",
        writer="dcls_convert.export.stock_timm:write_timm_folder",
    ),
    "onnx": Format(
        file="ONNX model",
        suffix=".onnx",
        writer="dcls_convert.export.program:write_onnx",
        packages=("onnxscript", "onnxruntime"),
    ),
    "pt2": Format(
        file="torch.export program",
        suffix=".pt2",
        writer="dcls_convert.export.program:write_pt2",
    ),
}
