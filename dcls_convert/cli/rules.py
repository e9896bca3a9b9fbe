"""`dcls-convert rules`: show and check rule files."""

import json
from typing import Annotated, Any

import typer

from ..cli import console, options
from ..file_checks import builtin_rules
from ..text import count_text

RulesArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A built-in set, or a file.",
        show_default=False,
    ),
]

rules_app = typer.Typer(help="Show and check rule files, which say what is replaced, and how.")


@rules_app.command("list")
def rules_list(json_: options.Json = False) -> None:
    """List the built-in rule sets."""
    from ..planning.rule_files import load_rules

    descriptions = {name: load_rules(name).description for name in builtin_rules()}
    if json_:
        _write_json({"rules": descriptions})
    else:
        console.show(*[f"{name:12} {text}" for name, text in descriptions.items()])


@rules_app.command("show")
def rules_show(name: RulesArgument) -> None:
    """Print a rule set as YAML."""
    from ..planning.rule_files import load_rules

    console.write(load_rules(name).text)


@rules_app.command("check")
def rules_check(file: RulesArgument, json_: options.Json = False) -> None:
    """Check a rule file; whether it fits a model is checked by a conversion with --dry-run."""
    from ..planning.rule_files import load_rules

    rules = load_rules(file)
    if json_:
        names = [rules.label(index) for index in range(len(rules.rules))]
        _write_json({"file": file, "rules": names})
    else:
        valid = f"{file}: valid, {count_text(len(rules.rules), 'rule')}"
        console.show(
            f"{valid}; whether they fit a model: dcls-convert MODEL --rules FILE --dry-run"
        )


@rules_app.command("schema")
def rules_json_schema() -> None:
    """Print the JSON Schema of rule files, for an editor."""
    from ..planning.rule_files import rules_schema

    console.write(json.dumps(rules_schema(), indent=2) + "\n")


def _write_json(values: dict[str, Any]) -> None:
    from ..records import write_json

    console.write(write_json({"format": 1, **values}))
