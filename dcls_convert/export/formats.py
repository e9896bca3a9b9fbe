"""The table of all formats of `dcls-convert fold`.

Imports no torch, so that help is fast.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A format that a folded model can be written in."""

    # "package.module:function", imported when it is called: (FoldedModel) -> ExportReport. For a
    # file, the function must call `export_file`.
    writer: str
    # Suffix of the default output's name. For a file, it is a dot and the format's name, and every
    # output must end in it.
    suffix: str
    noun: str  # for messages: "ONNX model"
    help: str  # what is written, for the help
    packages: tuple[str, ...] = ()  # packages that must be installed
    # Whether the format cannot store a structure of outputs. The model to write then returns a
    # tensor or a tuple of tensors, and the loaded model must return a tuple.
    flat_outputs: bool = False
    has_opset: bool = False  # whether the format takes an opset

    @property
    def is_file(self) -> bool:
        """Whether a file is written, not a folder."""
        return self.suffix.startswith(".")


EXPORT_FORMATS = {
    "timm": ExportFormat(
        writer="dcls_convert.export.stock_timm:write_timm_folder",
        suffix="-folded",
        noun="folder for timm",
        help="a folder, which timm loads by itself if the architecture allows it",
    ),
    "onnx": ExportFormat(
        writer="dcls_convert.export.onnx:write_onnx",
        suffix=".onnx",
        noun="ONNX model",
        help="one file",
        packages=("onnx", "onnxscript", "onnxruntime"),
        flat_outputs=True,
        has_opset=True,
    ),
    "pt2": ExportFormat(
        writer="dcls_convert.export.pt2:write_pt2",
        suffix=".pt2",
        noun="torch.export program",
        help="one file",
    ),
}
