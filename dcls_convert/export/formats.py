"""The formats of `dcls-convert fold`: the one table of them.

Imports no torch, so that --help is quick.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A format that a folded model can be written in."""

    # "package.module:function", imported when it is called: (FoldedModel) -> ExportReport.
    writer: str
    suffix: str  # of the default output's name; a file's begins with a dot, and each output has it
    noun: str  # for messages: "ONNX model"
    help: str  # for --help: what is written
    packages: tuple[str, ...] = ()  # that must be installed
    flat_outputs: bool = False  # whether outputs must be tensors, without structure
    has_opset: bool = False  # whether --opset is for it

    @property
    def is_file(self) -> bool:
        """Whether one file is written, and no folder."""
        return self.suffix.startswith(".")


EXPORT_FORMATS = {
    "timm": ExportFormat(
        writer="dcls_convert.export.stock_timm:write_timm_folder",
        suffix="-folded",
        noun="folder for timm",
        help="a folder, which timm loads by itself where its architecture allows",
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
        noun="program of torch.export",
        help="one file",
    ),
}
