"""`dcls-convert rules`: show and check rule files."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ..input_files import builtin_rules
from ..options import PlanOptions
from ..text import count_text
from . import console
from .completion import complete_models, complete_rules
from .typer_commands import Command, CommandGroup
from .typer_options import argument

if TYPE_CHECKING:
    from ..planning.rules import RuleSet

CLAIMS_HELP = "Also check that every rule claims something in this model."


rules_app = typer.Typer(
    cls=CommandGroup, help="Show and check rule files, which say what is replaced, and how."
)


@rules_app.command("list", cls=Command)
def rules_list() -> None:
    """List the built-in rule sets."""
    from ..planning.rule_files import load_rules

    console.show(*[f"{name:12} {load_rules(name).description}" for name in builtin_rules()])


@rules_app.command("show", cls=Command)
def rules_show(
    name: Annotated[str, argument("NAME|FILE", "A built-in set, or a file.", complete_rules)],
) -> None:
    """Print a rule set as YAML."""
    from ..planning.rule_files import load_rules

    console.write(load_rules(name).text)


@rules_app.command("check", cls=Command)
def rules_check(
    file: Annotated[str, argument("FILE", "A rule file, or a built-in set.", complete_rules)],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help=CLAIMS_HELP, autocompletion=complete_models)
    ] = None,
) -> None:
    """Check a rule file, and with --model whether it fits the model, as a conversion would."""
    from ..planning.rule_files import load_rules

    rules = load_rules(file)
    count = f"{file}: valid, {count_text(len(rules.rules), 'rule')}"
    if model is None:
        console.show(f"{count}; add --model MODEL to check that they fit a model")
    else:
        console.show(f"{count}; in {model}:", *_claims(rules, model))


@rules_app.command("schema", cls=Command)
def rules_json_schema() -> None:
    """Print the JSON Schema of rule files, for an editor."""
    from ..planning.rule_files import rules_schema

    console.write(json.dumps(rules_schema(), indent=2) + "\n")


def _claims(rules: "RuleSet", model_name: str) -> list[str]:
    """Return a line for every rule, and one for the convolutions that no rule claims.

    Raises:
        DclsConvertError: The rules do not fit the model.
    """
    with console.steps(model_name, "reading", lines=False):
        from ..conversion.loaded import LoadedNetwork
        from ..conversion.request import ConversionRequest
        from ..conversion.resolved import resolve
        from ..planning.claims import match_rules

        request = ConversionRequest(
            model=model_name, options=PlanOptions(rules=rules), offline=True
        )
        loaded = LoadedNetwork(request)
        resolve(loaded)  # raises if the rules do not fit the model, as a conversion would
        rule_of, reasons = match_rules(rules, loaded.convs.sites)
    counts = Counter(rule_of.values())
    all_sites = count_text(len(loaded.convs.sites), "convolution")
    lines = []
    for index, rule in enumerate(rules.rules):
        action = "converts" if rule.skip is None else "skips"
        lines.append(f"  {rules.label(index)}: {action} {counts[index]} of {all_sites}")
    lines.append(f"  no rule: {len(reasons)}, cannot be converted: {len(loaded.convs.skipped)}")
    return lines
