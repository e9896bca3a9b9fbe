"""`dcls-convert rules ...`. Imports no torch by itself."""

from typing import Annotated

import typer

from .arguments import HELP_OPTIONS

rules_app = typer.Typer(
    context_settings=HELP_OPTIONS, help="Show and check rule files, which say what is replaced, and how."
)


@rules_app.command("list")
def rules_list() -> None:
    """The built-in rule sets."""
    from ..planning.rules import builtin_rules, load_rules

    for name in builtin_rules():
        typer.echo(f"{name:12} {load_rules(name).description}")


@rules_app.command("show")
def rules_show(name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A built-in set, or a file.")]) -> None:
    """Print a rule set as YAML."""
    from ..planning.rules import load_rules

    typer.echo(load_rules(name).text, nl=False)


@rules_app.command("check")
def rules_check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A rule file, or a built-in set.")],
    model: Annotated[str | None, typer.Option(help="Also say what each rule claims in this model.")] = None,
) -> None:
    """Check a rule file, and with --model, what it would claim."""
    from ..planning.rules import load_rules

    ruleset = load_rules(file)
    typer.echo(f"{file}: ok, {len(ruleset.rules)} rule{'s' * (len(ruleset.rules) != 1)}")
    if model is not None:
        from .convert import print_claims

        print_claims(ruleset, model)


@rules_app.command("schema")
def rules_schema_() -> None:
    """Print the JSON Schema of rule files, for an editor."""
    import json

    from ..planning.rules import rules_schema

    typer.echo(json.dumps(rules_schema(), indent=2))
