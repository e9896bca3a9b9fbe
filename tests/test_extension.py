"""CONTRIBUTING.md, "What one change touches": its rows are carried out on toy examples.

Other tests carry out the rows of an interpolation (layers/test_interpolation.py), a
convolution class (layers/test_conv_classes.py), a rule predicate (planning/test_rules.py), an
export format (export/test_new_format.py).
"""

import inspect
from dataclasses import fields

import pytest

from dcls_convert import cli
from dcls_convert.cli.app import COMMANDS, app
from dcls_convert.cli.convert import convert
from dcls_convert.cli.models import models
from dcls_convert.planning.plan_options import PlanOptions

# A command: one file in cli/, and its entry in the table of the app.


def test_a_command_is_one_file_and_one_entry_in_the_app():
    commands = {command.callback for command in app.registered_commands if not command.hidden}
    assert commands == set(COMMANDS)
    for command in COMMANDS:
        assert command.__module__ == f"dcls_convert.cli.{command.__name__}"


# A planning option: its field in the record, its alias in `cli/options.py`, and the planner.


@pytest.mark.parametrize("command", [convert, models])
def test_a_planning_option_is_a_field_with_an_alias_that_commands_write_out(command):
    arguments = inspect.signature(command).parameters
    aliases = list(vars(cli.options).values())
    for option in fields(PlanOptions):
        assert arguments[option.name].default == option.default
        assert arguments[option.name].annotation in aliases
