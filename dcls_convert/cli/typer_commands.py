"""Commands and groups of commands, with plain help and a default command."""

import difflib
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

from ..errors import DclsConvertError

DEFAULT_COMMAND = "convert"  # the command that is run if none is named


class PlainHelp:
    """Mixin for commands whose --help shows no types in brackets for flags and arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including --help."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if isinstance(parameter, TyperArgument):
                # typer has no setting for this; a metavar only renames the argument.
                parameter.display_type_rich = _no_type  # type: ignore[method-assign]
            elif parameter.is_flag or parameter.count:
                parameter.metavar = ""
        return parameters

    def get_help_option(self, ctx: Any) -> Any:
        """Return the --help option, with the default False.

        typer's default is None. To validate None, typer imports pydantic, which doubles the time.
        """
        help_option = super().get_help_option(ctx)  # type: ignore[misc]
        help_option.default = False
        return help_option


def _no_type(ctx: Any) -> str:
    return ""


class Command(PlainHelp, TyperCommand):
    """A command with plain help."""


class CommandGroup(PlainHelp, TyperGroup):
    """A group of commands, which shows its help without arguments.

    If the group has `convert`, that is the default command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command before arguments that name no command.

        Raises:
            DclsConvertError: The first argument is nearly a command's name.
        """
        if not args:
            return super().parse_args(ctx, ["--help"])
        known = set(self.commands)
        for parameter in self.get_params(ctx):
            known.update(parameter.opts)
        first = args[0]
        if DEFAULT_COMMAND in self.commands and first not in known:
            # With a cutoff of 0.8, no registered model's name is this close to a command.
            close = difflib.get_close_matches(first, self.commands, n=1, cutoff=0.8)
            if close and not first.startswith("-"):
                raise DclsConvertError(
                    f"there is no command {first!r} (did you mean {close[0]!r}?)"
                )
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete commands and options, and the default command's model and options.

        Model names are listed only once something is typed: there are thousands.
        """
        items = super().shell_complete(ctx, incomplete)
        default = self.commands.get(DEFAULT_COMMAND)
        if not incomplete or default is None:
            return items
        completer: Any = default.params[0]  # MODEL
        if incomplete.startswith("-"):
            completer = default
        known = {item.value for item in items}
        for item in completer.shell_complete(ctx, incomplete):
            if item.value not in known:
                items.append(item)
        return items
