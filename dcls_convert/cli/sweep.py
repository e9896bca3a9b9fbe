"""`dcls-convert sweep`: compare sizes and counts, and print the recommended command."""

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cli import console, options
from ..errors import PlanError
from ..options import AUTO
from .parsing import parse_budgets, parse_counts, parse_keywords, parse_sizes
from .shell_command import shell_command

if TYPE_CHECKING:
    from ..choosing.sweep import Combination
    from ..conversion.request import NetworkRequest
    from ..planning.plan_options import PlanOptions

Sizes = Annotated[
    Any,
    options.elements_option(
        metavar="A..B|N,N",
        help="Windows: 7..23 tries 7, 9, ..., 23 (odd kernels need odd windows); 7..23..4 tries "
        "7, 11, ..., 23; +2,+4 are growths.",
        parser=parse_sizes,
    ),
]
Counts = Annotated[
    Any,
    options.elements_option(
        metavar="N,N",
        help="Elements per kernel: 20,34 or 20..40..5 (default: as many as the budget allows).",
        parser=parse_counts,
    ),
]
Budgets = Annotated[
    Any,
    options.elements_option(
        metavar="P,P",
        help="Budgets in percent of the weights replaced: 60%,80%,100%.",
        parser=parse_budgets,
    ),
]


def sweep_command(
    model: options.Model,
    pretrained: options.Pretrained = False,
    weights: options.WeightsFile = None,
    checkpoint_key: options.CheckpointKey = None,
    num_classes: options.NumClasses = None,
    in_chans: options.InChans = None,
    model_kwargs: options.ModelKwargs = None,
    rules: options.Rules = AUTO,
    strict: options.Strict = False,
    sizes: Sizes = None,
    counts: Counts = None,
    budgets: Budgets = None,
    tie: options.TieOption = "stage",
    interpolation: options.InterpolationOption = None,
    input_size: options.InputSize = None,
    json_: options.Json = False,
) -> None:
    """Compare windows, and counts or budgets, by parameters and MACs.

    Each combination has a row; the last line is the command for the recommended size.
    """
    from ..conversion.request import NetworkRequest
    from ..planning.plan_options import PlanOptions

    network = NetworkRequest(
        model=model,
        pretrained=pretrained,
        weights=weights,
        checkpoint_key=checkpoint_key,
        num_classes=num_classes,
        in_chans=in_chans,
        model_kwargs=parse_keywords(model_kwargs),
        input_size=input_size,
    )
    planning = PlanOptions(rules=rules, strict=strict, tie=tie, interpolation=interpolation)
    with console.steps(model, "planning") as notify:
        from ..choosing.sweep import make_sweep

        result = make_sweep(
            network,
            planning,
            sizes,
            counts,
            budgets,
            command=functools.partial(_command, network, planning),
            notify=notify,
            note=console.note,
        )
    if json_:
        console.write(result.to_json())
    else:
        console.show(result, wide=True)
        if result.choice.command is not None:
            console.show("", f"    {result.choice.command}")
    if all(row.reason is not None for row in result.rows[1:]):
        console.error(f"no size fits; the first problem: {result.rows[1].reason}")
        raise typer.Exit(PlanError.exit_code)


def _command(network: "NetworkRequest", planning: "PlanOptions", combination: "Combination") -> str:
    """Return the command that converts with a row's combination."""
    budget = None
    if combination.budget is not None:
        budget = f"{combination.budget:.12g}%"
    return shell_command(
        network,
        planning,
        dilated_size=combination.size,
        kernel_count=combination.kernel_count,
        budget=budget,
    )
