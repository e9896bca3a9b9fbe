"""`dcls-convert rules`: show and check rule files."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..input import builtin_rules
from ..planning.plan_options import PlanOptions
from ..text import count_text
from . import console, options

if TYPE_CHECKING:
    from ..planning.rules import RuleSet

RulesArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A built-in set, or a file.",
        autocompletion=options.complete_rules,
        show_default=False,
    ),
]
ModelToCheck = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Also check that every rule claims something in this model.",
        autocompletion=options.complete_models,
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
def rules_check(
    file: RulesArgument, model: ModelToCheck = None, json_: options.Json = False
) -> None:
    """Check a rule file, and with --model whether it fits the model, as a conversion would."""
    from ..planning.rule_files import load_rules

    rules = load_rules(file)
    claims = None if model is None else _claims(rules, model)
    if json_:
        names = [rules.label(index) for index in range(len(rules.rules))]
        _write_json({"file": file, "rules": names, "model": model, "claims": claims})
        return
    valid = f"{file}: valid, {count_text(len(rules.rules), 'rule')}"
    if claims is None:
        console.show(f"{valid}; add --model MODEL to check that they fit a model")
    else:
        console.show(f"{valid}; in {model}:", *_lines(rules, claims))


@rules_app.command("schema")
def rules_json_schema() -> None:
    """Print the JSON Schema of rule files, for an editor."""
    from ..planning.rule_files import rules_schema

    console.write(json.dumps(rules_schema(), indent=2) + "\n")


def _write_json(values: dict[str, Any]) -> None:
    from ..records import write_json

    console.write(write_json({"format": 1, **values}))


def _claims(rules: "RuleSet", model_name: str) -> dict[str, Any]:
    """Count the model's convolutions by what becomes of them.

    Raises:
        DclsConvertError: The rules do not fit the model.
    """
    with console.steps(model_name, "reading", lines=False):
        from ..conversion.load import load
        from ..conversion.plan_network import plan_network
        from ..conversion.request import ConversionRequest
        from ..planning.claims import match_rules

        request = ConversionRequest(
            model=model_name, options=PlanOptions(rules=rules), dry_run=True
        )
        loaded = load(request)
        plan = plan_network(loaded, request.options)  # may raise, as a conversion would
        rule_of, unclaimed = match_rules(rules, loaded.convs.sites)
    converted = Counter(layer.rule for layer in plan.layers)
    claimed = Counter(rule_of.values())
    counts = []
    for index, rule in enumerate(rules.rules):
        counts.append(claimed[index] if rule.skip else converted[rules.label(index)])
    return {
        "convolutions": len(loaded.convs.sites),
        "by_rule": counts,
        "no_rule": len(unclaimed),
        "not_convertible": len(loaded.convs.skipped) + len(rule_of) - sum(counts),
    }


def _lines(rules: "RuleSet", claims: dict[str, Any]) -> list[str]:
    """Return a line for every rule, and one for the convolutions that no rule claims."""
    lines = []
    for index, rule in enumerate(rules.rules):
        action = "converts" if rule.skip is None else "skips"
        count = f"{claims['by_rule'][index]} of {count_text(claims['convolutions'], 'convolution')}"
        lines.append(f"  {rules.label(index)}: {action} {count}")
    lines.append(
        f"  no rule: {claims['no_rule']}, cannot be converted: {claims['not_convertible']}"
    )
    return lines
