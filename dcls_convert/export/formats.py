"""The formats of `dcls-convert fold`: the one table of them.

Imports no torch, so that --help is quick.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """A format that a folded model can be written in."""

    # "package.module:function", imported when it is called: (FoldedModel) -> ExportReport. For a
    # file, the function calls `export_file` with what writes one and loads it again.
    writer: str
    # Of the default output's name. A file's is a dot and the format's name; all outputs have it.
    suffix: str
    noun: str  # for messages: "ONNX model"
    help: str  # for --help: what is written
    packages: tuple[str, ...] = ()  # that must be installed
    # Whether it knows no structure: the model to write then returns a tensor or a tuple of tensors,
    # and what is loaded again must return them as a tuple.
    flat_outputs: bool = False
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
