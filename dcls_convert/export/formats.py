"""The formats of `dcls-convert fold`.

Imports no torch, so that help is fast.
"""

from typing import Literal

FormatName = Literal["timm", "onnx", "pt2"]
# What was written: a file, or a folder that timm loads by itself, or one that needs this package.
OutputFormat = Literal["onnx", "pt2", "stock timm", "dcls"]
# End of the default output's name. Every output of a file format must end in it.
SUFFIXES: dict[FormatName, str] = {"timm": "-folded", "onnx": ".onnx", "pt2": ".pt2"}
