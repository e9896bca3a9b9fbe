"""The command-line program: its commands, error messages and exit codes.

An error is reported in one line. Importing this module imports no torch.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import DclsConvertError, is_out_of_memory
from ..text import one_line, shortened
from . import console
from .convert import convert
from .default_command import Commands
from .fold import fold
from .inspect import inspect as inspect_checkpoint
from .models import models
from .rules import rules_app
from .sweep import sweep_command
from .verify import verify

EXIT_BUG = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130  # by Ctrl-C; for another signal, 128 plus its number, as in shells
EXIT_CODES = (
    "Exit codes: 0 done; 1 a bug, or stdout could not be written; "
    "2 a mistake in the input, or no disk space or memory left; "
    "3 nothing in the model matches the rules; 130 interrupted, 143 terminated."
)
# Dependencies that some users install by hand; they may be missing.
NETWORK_LIBRARIES = ("torch", "torchvision", "timm")
# For an option that users guess: the option that is suggested instead.
ALIASES = {
    "size": "dilated-size",
    "window": "dilated-size",
    "weights": "checkpoint",
    "count": "kernel-count",
}
TRACEBACK_VARIABLE = "DCLS_CONVERT_TRACEBACK"
SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # not on Windows
    SIGNALS.append(signal.SIGHUP)


app = typer.Typer(
    name="dcls-convert",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    epilog=EXIT_CODES,
    help="Give a network's convolutions learnable element positions (DCLS, arXiv:2112.03740).\n\n"
    "dcls-convert convnext_tiny --dilated-size 17\n\n"
    "converts a timm or torchvision model, reports parameters and MACs, "
    "and writes a checkpoint that timm loads. "
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


# The commands, and arguments of each as examples for its help.
COMMANDS = {
    convert: ("convnext_tiny --dilated-size 17", "resnet18 --pretrained --calibrate photos"),
    models: ("'convnext_*'", "'torchvision:*' --dilated-size +2 --json"),
    sweep_command: ("convnext_tiny", "efficientnet_b0 --sizes +2,+4,+6 --budgets 80%,100%"),
    inspect_checkpoint: ("convnext_tiny-dcls17", "convnext_tiny-dcls17 --picture positions.png"),
    fold: ("convnext_tiny-dcls17", "convnext_tiny-dcls17 --format onnx"),
    verify: ("convnext_tiny-dcls17", "mine-dcls9 --trust-code"),
}


def _add_commands() -> None:
    command: Any
    for command, examples in COMMANDS.items():
        name = command.__name__.removesuffix("_command")
        program = f"dcls-convert {name}"
        if command is convert:
            program = "dcls-convert"  # the default command
        epilog = "Examples:"
        for arguments in examples:
            epilog += f"\n\n{program} {arguments}"
        app.command(name, epilog=epilog)(command)


_add_commands()
app.add_typer(rules_app, name="rules")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, print at most one line of error, and end the process."""
    if arguments is None:
        arguments = sys.argv[1:]
    if list(arguments) in ([], ["rules"]):
        arguments = [*arguments, "--help"]
    _install_signal_handlers()
    console.set_up()
    try:
        code, line = _run(list(arguments))
        # A library may have turned the KeyboardInterrupt into another error.
        interrupted = bool(console.interrupts) and code != 0
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        code = EXIT_INTERRUPTED
        if console.interrupts:
            code = 128 + console.interrupts[0]
        line = "interrupted"
    # Only the last line is left to print; a signal must not interrupt that.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if line:
        console.message(f"error: {line}", style="red")
        if "--json" in arguments:
            console.show_error(line, code)
    console.finish()
    sys.exit(code)


def _run(arguments: list[str]) -> tuple[int, str | None]:
    """Run a command. Return its exit code and, if it failed, one line that says why."""
    try:
        console.log_if_asked()
        result = typer.main.get_command(app).main(
            arguments, prog_name="dcls-convert", standalone_mode=False, obj=arguments
        )
    except typer.TyperException as error:
        return EXIT_MISTAKE, _parser_message(error)
    except DclsConvertError as error:
        return error.exit_code, str(error)
    except OSError as error:  # full disk, missing permission, invalid file name
        reason = error.strerror or one_line(error)
        if error.filename:
            reason = f"'{shortened(error.filename)}': {reason}"
        return EXIT_MISTAKE, reason
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in NETWORK_LIBRARIES:
            install = f"pip install {' '.join(NETWORK_LIBRARIES)}"
            return EXIT_MISTAKE, f"{error.name} is not installed: {install}"
        if is_out_of_memory(error):
            return EXIT_MISTAKE, "out of memory"
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return EXIT_BUG, (
            f"this is a bug in dcls-convert: {type(error).__name__}: {one_line(error)[:300]} "
            f"(set {TRACEBACK_VARIABLE}=1 for a traceback to report)"
        )
    if not isinstance(result, int):
        return 0, None
    # The code of a typer.Exit, or 130 if typer caught a KeyboardInterrupt.
    if result == EXIT_INTERRUPTED:
        return result, "interrupted"
    return result, None


def _parser_message(error: typer.TyperException) -> str:
    """Return what typer says about the arguments, in one line that ends with the help command."""
    unknown_option = getattr(error, "option_name", None) or ""
    option = ALIASES.get(unknown_option.strip("-"))
    if option is not None:
        error.possibilities = [f"--{option}"]  # type: ignore[attr-defined]
    message = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    if not message.endswith("?"):
        message += "."
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "dcls-convert")
    return f"{message} Try '{command} --help'."


def _install_signal_handlers() -> None:
    """Make signals raise KeyboardInterrupt, and record each in `console.interrupts`.

    Signals that the parent process ignores stay ignored (nohup, a shell's background job).
    """
    console.interrupts.clear()

    def interrupt(number: int, _frame: object) -> None:
        console.interrupts.append(number)
        raise KeyboardInterrupt

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
