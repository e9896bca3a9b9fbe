"""The program: its commands, and how it ends, with one line at most and the documented exit code. Imports no torch."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import DclsConvertError, one_line, shown
from . import console
from .arguments import Command, CommandGroup
from .compare import compare
from .convert import convert
from .diff import diff
from .fold import fold
from .inspect import inspect
from .models import models
from .rules import rules_app
from .sweep import sweep
from .verify import verify

EXIT_BUG = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 a bug, or stdout could not be written; 2 a mistake in what was given, or no disk or memory "
    "left; 3 nothing in the model matches the rules; 130 interrupted."
)
# Packages that some install by themselves, and pip may have left out.
NETWORKS = (
    "torch",
    "torchvision",
    "timm",
)
# In messages of torch, C++ and the loader.
NO_MEMORY = (
    "allocate memory",
    "bad_alloc",
    "failed to map segment",
    "out of memory",
)
ALIASES = {
    "size": "dilated-size",
    "window": "dilated-size",
    "weights": "checkpoint",
    "count": "kernel-count",
}
COMPLETION_VARIABLE = "_DCLS_CONVERT_COMPLETE"
TRACEBACK_VARIABLE = "DCLS_CONVERT_TRACEBACK"
SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


def _completion_asked() -> bool:
    """Whether to add the options for completion; with them, typer imports pydantic for every command."""
    if (
        COMPLETION_VARIABLE in os.environ
    ):  # a shell asks what to complete, and has half the time of a command
        from typer.completion import get_completion_inspect_parameters

        get_completion_inspect_parameters()  # makes the shells known, which typer else does as it adds the options
        return False
    first = sys.argv[1:2] or ["--help"]
    return first[0].startswith(("--install", "--show", "--help", "-h"))


app = typer.Typer(
    name="dcls-convert",
    add_completion=_completion_asked(),
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    epilog=EXIT_CODES,
    help="Give a network's convolutions learnable element positions (DCLS, arXiv:2112.03740).\n\n"
    "dcls-convert convnext_tiny --dilated-size 17\n\n"
    "converts a timm or torchvision model, reports parameters and MACs, and writes a checkpoint that timm loads. "
    "`convert` is the default command; its options: dcls-convert convert --help",
)


def _version(wanted: bool) -> None:
    if wanted:
        console.show(f"dcls-convert {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


EXAMPLES = {
    convert: ("convnext_tiny --dilated-size 17", "resnet18 --pretrained --calibrate photos"),
    models: ("'convnext_*'", "--kind dense --sort macs"),
    sweep: ("convnext_tiny", "efficientnet_b0 --sizes 5..13 --time --device cuda"),
    compare: (
        "convnext_tiny --data photos --minutes 600",
        "resnet18 --pretrained --data photos --sizes 5,7 --html",
    ),
    inspect: ("convnext_tiny-dcls17", "convnext_tiny-dcls17 --html positions.html"),
    diff: ("convnext_tiny-dcls17 convnext_tiny-dcls13", "one two --json"),
    fold: ("convnext_tiny-dcls17", "convnext_tiny-dcls17 --format onnx"),
    verify: ("convnext_tiny-dcls17", "mine-dcls9 --trust-code"),
}
_command: Any
for _command, _examples in EXAMPLES.items():
    _lines = [
        f"dcls-convert{'' if _command is convert else f' {_command.__name__}'} {one}"
        for one in _examples
    ]
    app.command(cls=Command, epilog="\n\n".join(["Examples:", *_lines]))(_command)
app.add_typer(rules_app, name="rules")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process, with one line at most of what went wrong."""
    _raise_interrupts()
    console.set_up()
    try:
        code, line = _run(list(sys.argv[1:] if arguments is None else arguments))
        if console.interrupts and code:  # of which a library made another error
            code = EXIT_INTERRUPTED
            line = "interrupted"
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        line = "interrupted"
    for number in SIGNALS:  # all is done but for the last line
        signal.signal(number, signal.SIG_IGN)
    if line:
        console.message(f"error: {line}", style="red")
    console.finish()
    sys.exit(code)


def _run(arguments: list[str]) -> tuple[int, str | None]:
    """The exit code, and what went wrong, in one line."""
    try:
        console.log_if_asked()
        result = typer.main.get_command(app).main(
            arguments, prog_name="dcls-convert", standalone_mode=False
        )
    except typer.TyperException as error:  # the parser's
        option = getattr(error, "option_name", None)  # of one that there is not
        if option and option.strip("-") in ALIASES:
            error.possibilities = [f"--{ALIASES[option.strip('-')]}"]  # type: ignore[attr-defined]
        message = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
        command = getattr(getattr(error, "ctx", None), "command_path", "dcls-convert")
        end = "" if message.endswith("?") else "."
        return EXIT_MISTAKE, f"{message}{end} Try '{command} --help'."
    except DclsConvertError as error:
        return error.exit_code, error.on_command_line
    except OSError as error:  # the disk, a permission, a name that no file system takes
        about = f"'{shown(error.filename)}': " if error.filename else ""
        return EXIT_MISTAKE, f"{about}{error.strerror or one_line(error)}"
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in NETWORKS:
            return EXIT_MISTAKE, f"{error.name} is not installed: pip install {' '.join(NETWORKS)}"
        if isinstance(error, MemoryError) or any(words in one_line(error) for words in NO_MEMORY):
            return EXIT_MISTAKE, "out of memory"
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return EXIT_BUG, (
            f"this is a bug in dcls-convert: {type(error).__name__}: {one_line(error)[:300]} "
            f"(set {TRACEBACK_VARIABLE}=1 for a traceback to report)"
        )
    # The code of typer.Exit; typer makes 130 of a KeyboardInterrupt.
    code = result if isinstance(result, int) else 0
    return code, "interrupted" if code == EXIT_INTERRUPTED else None


def _raise_interrupts() -> None:
    """Let each signal that nobody ignored raise KeyboardInterrupt; `console.interrupts` will hold those that came."""
    console.interrupts.clear()

    def interrupt(number: int, _frame: object) -> None:
        console.interrupts.append(number)
        raise KeyboardInterrupt

    for number in SIGNALS:
        if (
            signal.getsignal(number) != signal.SIG_IGN
        ):  # by nohup, or for a shell's job in the background
            signal.signal(number, interrupt)
