"""CONTRIBUTING.md, "What one change touches": its rows are carried out on toy examples.

Other tests carry out the rows of an interpolation (layers/test_interpolation.py), a
convolution class (layers/test_conv_classes.py), a rule predicate (planning/test_rules.py), an
export format (export/test_new_format.py).
"""

import inspect
from dataclasses import dataclass, field, fields

import typer
from typer.testing import CliRunner

from dcls_convert.cli.app import EXAMPLES, app
from dcls_convert.cli.network_options import typer_annotations
from dcls_convert.cli.typer_commands import Command, CommandGroup
from dcls_convert.options import Argument, PlanOptions, argument_of, signature_parameters

# A command: one file in cli/, and its entry in the table of the app.


def test_a_command_is_one_file_and_one_entry_in_the_app():
    commands = {command.callback for command in app.registered_commands}
    assert commands == set(EXAMPLES)
    for command in EXAMPLES:
        assert command.__module__ == f"dcls_convert.cli.{command.__name__}"


# A planning option: a field of the record, from which the command's argument is made.


@dataclass(frozen=True, kw_only=True)
class WiderOptions(PlanOptions):
    """`PlanOptions` with two more options: a number and a flag."""

    min_count: int = field(
        default=1,
        metadata={
            "argument": Argument(
                form="integer",
                help="Least elements in a kernel.",
                group="How many elements",
                metavar="N",
                maximum=99,
                overridden_by={"kernel_count": "states the count"},
            )
        },
    )
    round_up: bool = field(
        default=False,
        metadata={"argument": Argument(form="flag", help="Round up.", group="How many elements")},
    )


def run(*arguments):
    """Run a command that has the options; return its result, and the options that it received."""
    received = {}

    def plan(**options):
        received.update(options)

    annotations = typer_annotations(WiderOptions)
    parameters = []
    for parameter in signature_parameters(WiderOptions):
        parameters.append(parameter.replace(annotation=annotations[parameter.name]))
    plan.__signature__ = inspect.Signature(parameters)
    plan.__annotations__ = annotations
    toy = typer.Typer(cls=CommandGroup)
    toy.command(cls=Command)(plan)
    toy.command(cls=Command)(lambda: None)  # one command alone would have no name
    return CliRunner().invoke(toy, ["plan", *arguments]), received


def test_a_planning_option_is_one_field_of_the_record():
    result, received = run("--min-count", "5", "--round-up")
    assert result.exit_code == 0, result.output
    assert WiderOptions(**received) == WiderOptions(min_count=5, round_up=True)
    result, _ = run("--help")
    assert "--min-count" in result.output
    assert "Least elements in a kernel." in result.output
    result, _ = run("--min-count", "100")
    assert result.exit_code == 2
    assert "is not an integer from 1 to 99" in result.output


def test_an_option_that_another_one_leaves_without_effect_is_named():
    stated = WiderOptions(min_count=5, kernel_count=7)
    message = "kernel_count states the count, so budget, min_count and scope would have no effect"
    assert stated.override_message(str) == message
    assert WiderOptions(min_count=5).override_message(str) is None
    assert WiderOptions(kernel_count=7).override_message(str) is None


def test_an_option_is_left_without_effect_by_options_that_there_are():
    names = {option.name for option in fields(PlanOptions)}
    for option in fields(PlanOptions):
        assert argument_of(option).overridden_by.keys() <= names - {option.name}
