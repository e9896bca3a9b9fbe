"""The plan as data: to JSON and back, and never read where it is damaged or contradicts itself."""

import copy
import json
import re
import xml.etree.ElementTree
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from operator import getitem

import pytest

from dcls_convert.errors import CheckpointError, PlanError
from dcls_convert.planning.plan import ConversionPlan
from dcls_convert.tables import span

from .nets import Net, Shared, plan_of

PLANS = {
    "tied": lambda: plan_of(Net()),
    "gaussian, per stage, share": lambda: plan_of(Net(), interpolation="gaussian", scope="stage", budget="233.333333"),
    "untied, without MACs": lambda: plan_of(Net(), None, tie="none", scope="layer"),
    "shared": lambda: plan_of(Shared(), kernel_count=4),
    "with arguments": lambda: plan_of(Net(), model="timm:x", model_args={"depths": [1, 2], "drop": 0.1, "act": None}),
    "with a tuple among the arguments": lambda: plan_of(Net(), model="timm:x", model_args={"img_size": (9, 14)}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_survives_json(name):
    plan = PLANS[name]()
    again = ConversionPlan.from_json(plan.to_json(), "plan.json")
    assert again == plan
    assert (again.hash, again.to_json()) == (plan.hash, plan.to_json())

    assert ConversionPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("name", PLANS)
def test_a_notebook_shows_the_counts_of_each_stage(name):
    plan = PLANS[name]()
    odd = "<script>\x1b]0;x\x07"
    layers = [replace(layer, stage=odd if layer.stage is None else layer.stage) for layer in plan.layers]
    page = replace(plan, layers=tuple(layers), model=odd)._repr_html_()
    assert all(character.isprintable() or character == "\n" for character in page)
    text = "".join(xml.etree.ElementTree.fromstring(page).itertext())
    assert f"{sum(unit.used for unit in plan.budget):,} of {sum(unit.limit for unit in plan.budget):,}" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "→" in line}
    for stage in {layer.stage for layer in plan.layers} - {None}:
        members = [layer for layer in plan.layers if layer.stage == stage]
        assert rows[stage][0] == str(len(members))
        assert rows[stage][-2] == span({layer.kernel_count for layer in members})


def test_the_hash_is_that_of_the_content():
    plan = plan_of(Net(), model="timm:x", model_args={"a": 1, "b": 2})
    assert plan_of(Net(), model="timm:x", model_args={"b": 2, "a": 1}).hash == plan.hash
    changes = [
        {"rules": "other"},
        {"share": Fraction(1, 3)},
        {"model_args": {"a": 1}},
        {"layers": (replace(plan.layers[0], kernel_count=plan.layers[0].kernel_count + 1), *plan.layers[1:])},
        {"skipped": ()},
    ]
    assert len({plan.hash, *(replace(plan, **change).hash for change in changes)}) == 1 + len(changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), print])
def test_arguments_that_json_cannot_hold_are_refused(value):
    with pytest.raises(PlanError, match="model_args cannot be kept in a JSON file"):
        plan_of(Net(), model="timm:x", model_args={"drop": value})


# Damage.

PLAN = plan_of(Net(), scope="stage", interpolation="gaussian", model="timm:x").to_dict()
FREE = [("model_args",)]  # a mapping of whatever the model takes


def nodes(value, path=()):
    """Every mapping and every leaf of a JSON value, with the path to it."""
    if not isinstance(value, list):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes(inner, (*path, key))


def changed(path, value):
    """PLAN with another value at that place; `...` takes it out."""
    data = copy.deepcopy(PLAN)
    inner = reduce(getitem, path[:-1], data)
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    return data


def accepted(data):
    """Whether such a plan is read; where it is not, one line is to name the file."""
    message = None
    try:
        ConversionPlan.from_json(json.dumps(data), "folder/plan.json")
    except CheckpointError as error:
        message = str(error)
    assert message is None or re.fullmatch("folder/plan.json: [^\n]+", message)
    return message is None


def test_an_unknown_or_missing_field_is_refused_wherever_it_stands():
    assert accepted(PLAN)
    mappings = [(path, value) for path, value in nodes(PLAN) if isinstance(value, dict) and path not in FREE]
    assert len(mappings) > 10
    # What a tie group shares is a mapping of names: its keys are checked with the layers.
    assert not any(accepted(changed((*path, "comment"), 1)) for path, _ in mappings)
    fields = [(*path, key) for path, value in mappings if "parameters" not in path for key in value]
    assert [path for path in fields if accepted(changed(path, ...))] == [("format",), ("model_args",)]  # have defaults


@pytest.mark.parametrize(
    ("of", "into"),
    [
        (int, str),
        (int, lambda value: value + 0.5),
        (int, bool),
        (int, lambda value: None),
        (bool, int),
        (str, lambda value: 3),
        (str, lambda value: [value]),
        (str, lambda value: {}),
    ],
    ids=["number as text", "half", "number as truth", "no number", "truth as number", "number", "list", "mapping"],
)
def test_a_value_of_another_type_is_refused_wherever_it_stands(of, into):
    leaves = [(path, value) for path, value in nodes(PLAN) if type(value) is of]
    assert leaves
    # A fraction may be written as a number, and what need not be known may be missing.
    optional = {"share", "exact_count", "output_positions", "macs", "kernel_count"}
    assert [path for path, value in leaves if path[-1] not in optional and accepted(changed(path, into(value)))] == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"plan"', "{}", '{"format": 2}', "\0", b"\xff\xfe"])
def test_what_is_no_plan_is_refused_in_one_line(text):
    with pytest.raises(CheckpointError, match=r"^folder/plan.json: [^\n]+$"):
        ConversionPlan.from_json(text, "folder/plan.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("layers", -1, "tie_group"), "nowhere"),
        (("layers", -1, "kernel_count"), -1),
        (("layers", 0, "kernel_count"), 1),  # its group has another
        (("layers", -1, "dilated_size"), [8, 8]),
        (("layers", -1, "dense_axes"), [5]),
        (("layers", -1, "interpolation"), "cubic"),
        (("layers", -1, "groups"), 3),
        (("layers", -1, "names"), []),
        (("tie_groups", -1, "layers"), ["layer2.1"]),
        (("tie_groups", -1, "parameters"), {"positions": "dcls_positions"}),  # but not sigma
        (("tie_groups",), []),
        (("tie_groups", -1, "name"), "\x1b]0;title\x07"),
    ],
    ids=str,
)
def test_a_plan_that_contradicts_itself_is_refused(path, value):
    with pytest.raises(PlanError) as error:
        check_plan(ConversionPlan.from_json(json.dumps(changed(path, value)), "plan.json"))
    with pytest.raises(CheckpointError, match=r"^the plan: "):
        ConversionPlan.from_dict(changed(path, value))
    assert str(error.value).isprintable()


# Differences.


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_does_not_differ_from_itself(name):
    assert PLANS[name]().diff(PLANS[name]()) == ()


def test_every_change_is_a_difference_and_the_other_way_round():
    plan = plan_of(Net())
    first, *rest = plan.layers
    assert len(rest) > 1
    wider = tuple(replace(layer, dilated_size=(9, 9)) for layer in plan.layers)
    cases = {
        "share": (replace(plan, share=Fraction(1, 3)), ()),
        "kernel_count": (replace(plan, layers=(replace(first, kernel_count=2), *rest)), (first.name,)),
        "dilated_size": (replace(plan, layers=wider), tuple(layer.name for layer in plan.layers)),
        "layers": (replace(plan, layers=tuple(rest)), (first.name,)),
    }
    for what, (other, layers) in cases.items():
        (found,), (back,) = plan.diff(other), other.diff(plan)
        assert (found.what, found.layers) == (back.what, back.layers) == (what, layers)
        assert (found.one, found.other) == (back.other, back.one)
        assert found.one != found.other
