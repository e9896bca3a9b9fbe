"""`dcls-convert fold`: turn the layers of a folder into plain convolutions."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..cli import console, options
from ..export.formats import FORMATS, Format, FormatName
from ..geometry import size_text
from ..text import count_text

if TYPE_CHECKING:
    from ..export.folded_model import ExportReport


FILE_FORMATS = [name for name, format in FORMATS.items() if format.file]
DEFAULT_OUTPUTS = [f"./FOLDER{format.suffix}" for format in FORMATS.values()]

FormatOption = Annotated[
    FormatName,
    options.output_option(
        metavar="|".join(FORMATS),
        help="timm: a folder, which timm loads by itself if the architecture allows it. "
        f"{', '.join(FILE_FORMATS)}: one file.",
    ),
]
OutputPath = Annotated[
    Path | None,
    options.output_option(
        "--output",
        "-o",
        metavar="PATH",
        help="Folder or file to write "
        f"(default: {', '.join(DEFAULT_OUTPUTS[:-1])} or {DEFAULT_OUTPUTS[-1]}).",
    ),
]


def fold(
    folder: options.FolderArgument,
    format: FormatOption = "timm",
    output: OutputPath = None,
    input_size: options.InputSize = None,
    model: options.Unconverted = None,
    force: options.Force = False,
    trust_code: options.TrustCode = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Turn a converted network's layers into plain convolutions, for use elsewhere.

    Positions are then no longer learnable. Outputs stay the same; this is checked before writing.
    """
    from ..export.fold import fold_folder

    with console.steps(str(folder), quiet=quiet) as notify:
        report = fold_folder(
            folder,
            format,
            output,
            input_size=input_size,
            model=model,
            force=force,
            trust_code=trust_code,
            notify=notify,
        )
    if json_:
        console.write(report.to_json())
    elif quiet:
        console.write(f"{report.output}\n")
    else:
        console.show(*_lines(report, FORMATS[format]))


def _lines(report: "ExportReport", format: Format) -> list[str]:
    """Say what was written, and how to load it."""
    if report.params_after == report.params_before:
        change = ", as before"
    else:
        reason = "since kernels are now stored with all cells of their windows"
        change = f" → {report.params_after:,}, {reason}"
    layers = f"{count_text(report.layers, 'layer')} of {report.checkpoint}"
    error = f"{report.relative_error:.1e}"
    files = report.output
    if report.data_file is not None:
        files += f" and {report.data_file}, which must stay beside it"
    return [
        f"Folded {layers}; parameters {report.params_before:,}{change}.",
        f"Outputs match those before folding (relative error {error}).",
        f"Wrote {files}: {_description(report, format)}.",
        "",
        *textwrap.indent(report.loading, "    ").splitlines(),
    ]


def _description(report: "ExportReport", format: Format) -> str:
    """Say what the output is."""
    if report.kind == "stock timm":
        arguments = ""
        if report.kernel_args:
            sizes = ", ".join(f"{name}={value}" for name, value in report.kernel_args.items())
            arguments = f", with {sizes}"
        return f"timm loads it by itself{arguments}; dcls-convert is not needed"
    if report.kind == "dcls":
        return f"a dcls-convert folder, because {report.note}"
    noun = format.file
    number = "any number at a time"
    if report.batch is not None:
        number = f"{report.batch} at a time, because the network's code fixes the number"
    if report.input_size is not None:
        noun += f" for images of {size_text(report.input_size)}"
    return f"{noun}, {number}"
