"""The formats of `dcls-convert fold`: each is one row of FORMATS.

Imports no torch, so that help is fast.
"""

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["timm", "onnx", "pt2"]
# Kind of output: a file, a folder that timm loads by itself, or a folder that needs this package.
OutputFormat = Literal["onnx", "pt2", "stock timm", "dcls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """An export format: the kind of output, and the function that writes it."""

    # Noun for the file, in messages. Empty for a folder, which `ExportReport.kind` describes.
    file: str
    # End of the default output's name. Every output of a file format must end in it.
    suffix: str
    # "module:function", by name because it imports torch. It turns a FoldedModel into an
    # ExportReport.
    writer: str
    packages: tuple[str, ...] = ()  # needed in addition; in the extra `export`


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
