"""The command-line program: its commands, error messages and exit codes.

An error is reported in one line. Importing this module imports no torch.
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from .. import __version__
from ..cli import console
from ..errors import DclsConvertError, is_out_of_memory
from ..text import one_line, shortened
from .convert import convert
from .default_command import Commands
from .fold import fold
from .inspect import inspect
from .models import models
from .rules import rules_app
from .sweep import sweep_command
from .verify import verify

EXIT_BUG = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130  # also typer's code for Ctrl-C
EXIT_CODES = (
    "Exit codes: 0 done; 1 a bug; 2 a mistake in the input, or no disk space or memory left; "
    "3 nothing in the model can be converted; 4 verify could not check the model; "
    "130 interrupted."
)
TRACEBACK_VARIABLE = "DCLS_CONVERT_TRACEBACK"

app = typer.Typer(
    name="dcls-convert",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    epilog=EXIT_CODES,
    help="Give a network's convolutions learnable element positions (DCLS, arXiv:2112.03740).\n\n"
    "dcls-convert convnext_tiny --dilated-size 17\n\n"
    "converts a timm or torchvision model, reports parameters and MACs, "
    "and writes a folder that timm loads. "
    "`convert` is the default command; its options: dcls-convert convert --help",
)


def _print_version(requested: bool) -> None:
    if requested:
        console.show(f"dcls-convert {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


# The commands, and the examples in the help of each.
COMMANDS: dict[Any, tuple[str, str]] = {
    convert: ("convnext_tiny --dilated-size 17", "resnet18 --pretrained --calibrate photos"),
    models: ("models 'convnext_*'", "models 'torchvision:*' --dilated-size +2 --json"),
    sweep_command: (
        "sweep convnext_tiny",
        "sweep efficientnet_b0 --sizes +2,+4,+6 --budgets 80%,100%",
    ),
    inspect: (
        "inspect convnext_tiny-dcls17",
        "inspect convnext_tiny-dcls17 --picture positions.png",
    ),
    fold: ("fold convnext_tiny-dcls17", "fold convnext_tiny-dcls17 --format onnx"),
    verify: ("verify convnext_tiny-dcls17", "verify mine-dcls9 --trust-code"),
}
for command, examples in COMMANDS.items():
    name = command.__name__.removesuffix("_command")
    app.command(name, epilog="\n\ndcls-convert ".join(["Examples:", *examples]))(command)
app.add_typer(rules_app, name="rules")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a command failed. With --json, this is the object on stdout."""

    error: str  # one line
    kind: str  # of the error; see docs/errors.md
    exit_code: int = EXIT_MISTAKE


def main() -> None:
    """Run the command line, print at most one line of error, and end the process."""
    arguments = sys.argv[1:]
    # Both raise KeyboardInterrupt, so that half-written outputs are removed. Shells let the jobs of
    # scripts ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # cp1252 has no arrows
    failure = None
    try:
        code = typer.main.get_command(app).main(
            arguments or ["--help"], prog_name="dcls-convert", standalone_mode=False
        )
    except Exception as error:
        failure = _failure(error)
    else:
        if code == EXIT_INTERRUPTED:
            failure = Failure(error="interrupted", kind="interrupted", exit_code=code)
    if failure is not None:
        console.error(failure.error)
        if "--json" in arguments:
            with contextlib.suppress(OSError):  # stdout itself may have failed
                console.write(json.dumps(asdict(failure)) + "\n")
        code = failure.exit_code
    sys.exit(code or 0)


def _failure(error: Exception) -> Failure:
    """Say in one line why a command failed.

    Raises:
        Exception: The error, if it is a bug and TRACEBACK_VARIABLE asks for the traceback.
    """
    if isinstance(error, typer.TyperException):
        return Failure(error=_parser_message(error), kind="usage")
    if isinstance(error, DclsConvertError):
        return Failure(error=str(error), kind=_error_kind(error), exit_code=error.exit_code)
    if isinstance(error, OSError):  # full disk, missing permission, invalid file name
        reason = error.strerror or one_line(error)
        if error.filename:
            reason = f"'{shortened(error.filename)}': {reason}"
        return Failure(error=reason, kind="os")
    if is_out_of_memory(error):
        return Failure(error="out of memory", kind="memory")
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    return Failure(
        error=f"this is a bug in dcls-convert: {type(error).__name__}: {one_line(error)[:300]} "
        f"(set {TRACEBACK_VARIABLE}=1 for a traceback to report)",
        kind="bug",
        exit_code=EXIT_BUG,
    )


def _error_kind(error: DclsConvertError) -> str:
    """Return the error's class as a word: OutputExistsError -> "output_exists"; base -> "usage"."""
    if type(error) is DclsConvertError:
        return "usage"
    name = type(error).__name__.removesuffix("Error")
    return re.sub("(?<=.)(?=[A-Z])", "_", name).lower()


def _parser_message(error: typer.TyperException) -> str:
    """Return typer's message about the arguments in one line, with the help command at its end."""
    context = getattr(error, "ctx", None)
    program = context.command_path if context is not None else "dcls-convert"
    message = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    return f"{message}. Try '{program} --help'."
