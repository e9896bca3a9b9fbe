"""The command line: read arguments, call the library, print, choose the exit code. Imports no torch by itself."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import DclsConvertError, one_line, shown
from ..options import AUTO, DEFAULT_BUDGET, AuthorsVersion, Init, Interpolation, Positions, Scope, Tie
from .arguments import HELP_OPTIONS, MOST_CHANNELS, MOST_SEED, parse_count, parse_input_size, parse_integer, parse_size
from .checkpoints import add_checkpoint_commands
from .models import models
from .rules import rules_app

EXIT_BUG = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
TRACEBACK_VARIABLE = "DCLS_CONVERT_TRACEBACK"
DEFAULT_COMMAND = "convert"
# Whatever the parser finds wrong with an argument; the class's home differs between versions of typer.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def _wants_completion() -> bool:
    """Whether the shell asks for completions, or the user for the options that install them."""
    return any(name.startswith("_DCLS_CONVERT_") for name in os.environ) or sys.argv[1:2] in (
        ["--help"],
        ["-h"],
        ["--install-completion"],
        ["--show-completion"],
    )


app = typer.Typer(
    name="dcls-convert",
    # A help without rich, and completion only where it is asked for: each would double the time of every answer.
    add_completion=_wants_completion(),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
    help="Give a network's convolutions learnable element positions (DCLS, arXiv:2112.03740).\n\n"
    "\b\n  dcls-convert convnext_tiny --dilated-size 17\n\n"
    "converts a timm or torchvision model, reports parameters and MACs, and writes a checkpoint that timm loads. "
    "'convert' is the default command; its options: dcls-convert convert --help",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dcls-convert {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(context_settings=HELP_OPTIONS)
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, hf-hub:REPO, "
            "local-dir:FOLDER, or package.module:factory, which imports and runs your own code.",
        ),
    ],
    dilated_size: Annotated[
        str | None,
        typer.Option(metavar="N|HxW", help="Window in which elements move; 17 or 17x17."),
    ] = None,
    kernel_count: Annotated[str, typer.Option(metavar="N|auto", help="Elements in a kernel.")] = AUTO,
    budget: Annotated[
        str,
        typer.Option(metavar="PERCENT", help="Of the replaced weights, for the new kernels."),
    ] = f"{DEFAULT_BUDGET:g}",
    scope: Annotated[Scope, typer.Option(help="For what one count is solved.")] = "model",
    tie: Annotated[Tie, typer.Option(help="Which layers share their positions.")] = "stage",
    interpolation: Annotated[
        Interpolation | None,
        typer.Option(help="How an element spreads over cells.  [default: bilinear]"),
    ] = None,
    rules: Annotated[str, typer.Option(metavar="FILE|NAME|auto", help="Rule file, or a built-in set.")] = AUTO,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where a layer cannot take the size.")] = False,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Start from timm's or torchvision's weights.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start from a safetensors or torch file, also one of DCLS's authors."),
    ] = None,
    authors_version: Annotated[
        AuthorsVersion | None,
        typer.Option(help="Of the authors' layers, for such a file without SIG.  [default: v0, as released]"),
    ] = None,
    init: Annotated[
        Init,
        typer.Option(
            help="Elements: random; fit, closest to the old kernels; largest, their largest cells; exact, all cells "
            "(the same outputs, at more parameters). auto: random without weights, else fit.",
        ),
    ] = "auto",
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Images: fit what comes out of the kernels for such, not the kernels."),
    ] = None,
    positions: Annotated[Positions, typer.Option(help="Random positions: N(0, 0.5 cells), or uniform.")] = "normal",
    num_classes: Annotated[str | None, typer.Option(metavar="N", help="Classes of the model's head.")] = None,
    in_chans: Annotated[str | None, typer.Option(metavar="N", help="Input channels.")] = None,
    input_size: Annotated[
        str | None,
        typer.Option(metavar="CxHxW", help="For MACs; the model's own without it."),
    ] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="Of all random values.")] = "0",
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint folder.  [default: ./MODEL-dclsSIZE]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only: no weights, no download.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A row for every layer.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and no report either.")] = False,
) -> None:
    """Replace a model's convolutions, report, and write a checkpoint."""
    from .convert import ConvertOptions, run_convert

    run_convert(
        ConvertOptions(
            model=model,
            dilated_size=parse_size("--dilated-size", dilated_size),
            kernel_count=parse_count(kernel_count),
            budget=budget,
            scope=scope,
            tie=tie,
            interpolation=interpolation,
            rules=rules,
            strict=strict,
            pretrained=pretrained,
            checkpoint=checkpoint,
            authors_version=authors_version,
            init=init,
            calibrate=calibrate,
            positions=positions,
            num_classes=parse_integer("--num-classes", num_classes, least=0, most=MOST_CHANNELS),
            in_chans=parse_integer("--in-chans", in_chans, least=1, most=MOST_CHANNELS),
            input_size=parse_input_size(input_size),
            seed=parse_integer("--seed", seed, least=0, most=MOST_SEED) or 0,
            output=output,
            force=force,
            dry_run=dry_run,
            json=json_,
            verbose=verbose,
            quiet=quiet,
        )
    )


app.command(context_settings=HELP_OPTIONS)(models)
add_checkpoint_commands(app)
app.add_typer(rules_app, name="rules")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: whatever happens ends in one line and the documented exit code."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _interrupt)
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except _USAGE_ERROR as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        _fail(f"{' '.join(message.split()).rstrip('.')}. Try 'dcls-convert --help'.", EXIT_MISTAKE)
    except DclsConvertError as error:
        _fail(one_line(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        sys.exit(EXIT_BUG)
    except OSError as error:  # the disk, a permission, a name that no file system takes: not ours to mend
        about = f"{shown(error.filename)!r}: " if error.filename else ""
        _fail(f"{about}{error.strerror or one_line(error)}", EXIT_MISTAKE)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _fail(
            f"this is a bug in dcls-convert: {type(error).__name__}: {one_line(error)[:300]} "
            f"(set {TRACEBACK_VARIABLE}=1 for a traceback to report)",
            EXIT_BUG,
        )
    if code == EXIT_INTERRUPTED:  # typer makes this code of a KeyboardInterrupt
        _fail("interrupted; nothing was left behind", EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _run(arguments: list[str]) -> object:
    """`dcls-convert MODEL` is `dcls-convert convert MODEL`: whatever is no command and no option of the program."""
    program = typer.main.get_command(app)
    own = {option for parameter in program.params for option in parameter.opts} | {"--help", "-h"}
    commands = program.commands  # type: ignore[attr-defined]
    if arguments in ([], ["rules"]):
        arguments = [*arguments, "--help"]
    if arguments[0] in own or "_DCLS_CONVERT_COMPLETE" in os.environ:
        return program.main(args=arguments, prog_name="dcls-convert", standalone_mode=False)
    if arguments[0] not in commands:
        arguments = [DEFAULT_COMMAND, *arguments]
    name, *rest = arguments
    return commands[name].main(args=rest, prog_name=f"dcls-convert {name}", standalone_mode=False)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> None:
    typer.secho(f"error: {message}", fg="red", err=True)
    sys.exit(code)
