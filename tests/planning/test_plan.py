"""A plan survives JSON, and is refused if it is damaged or contradicts itself."""

import copy
import json
import re
from dataclasses import replace
from functools import reduce
from operator import getitem

import pytest

from dcls_convert.errors import CheckpointError, PlanError
from dcls_convert.planning.plan import ConversionPlan
from dcls_convert.running.input_spec import TensorSpec, image_inputs

from .nets import Net, plan_of

IDS = TensorSpec(name="ids", shape=(1, 9), dtype="int64", range=(0, 4))
ARGUMENTS = {"model": "timm:x", "model_args": {"size": (9, 14), "drop": 0.1, "act": None}}


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(Net(), interpolation="gaussian", budget="233.333333", **ARGUMENTS),
        replace(plan_of(Net(), None, tie="none"), example_inputs=(IDS, *image_inputs((4,)))),
    ],
)
def test_a_plan_survives_json(plan):
    again = ConversionPlan.from_json(plan.to_json(), "plan.json")
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert ConversionPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("value", [float("nan"), print])
def test_arguments_that_json_cannot_hold_are_refused(value):
    with pytest.raises(PlanError, match="model_args cannot be kept in a JSON file"):
        plan_of(Net(), model="timm:x", model_args={"drop": value})


# Damage.

PLAN = plan_of(Net(), interpolation="gaussian", model="timm:x").to_dict()
INTEGERS = {"name": "ids", "shape": [1, 9], "dtype": "int64", "range": [0, 4]}


def changed(path, value):
    """PLAN with another value at that place; `...` removes it."""
    data = copy.deepcopy(PLAN)
    inner = reduce(getitem, path[:-1], data)
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    return data


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', b"\xff\xfe"])
def test_anything_but_a_plan_is_refused_in_one_line(text):
    with pytest.raises(CheckpointError, match=r"^folder/plan.json: [^\n]+$"):
        ConversionPlan.from_json(text, "folder/plan.json")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("layers", 0, "comment"), 1, "comment"),
        (("tie",), ..., "tie"),
        (("layers", 0, "kernel_count"), True, "kernel_count"),
        (("layers", 0, "kernel_count"), 1, "its layers have 2 different shapes"),
        (("layers", -1, "dilated_size"), [100_001, 100_001], "at most 268,435,456 are allowed"),
        (("layers", -1, "dense_axes"), [5], "are not axes of a 2-D kernel"),
        (("layers", -1, "interpolation"), "no such", "'no such' is not known"),
        (("layers", -1, "groups"), 3, "must be a positive multiple of its groups, 3"),
        (("share",), "1e999999999", "share: Value error, is not a fraction"),
        (("input_size",), [3, 0, 9], "must be channels and spatial sizes"),
        (("example_inputs",), [INTEGERS, INTEGERS], "two of one name"),
        (("example_inputs",), [{**INTEGERS, "range": [0, 2**63]}], "impossible range"),
    ],
    ids=str,
)
def test_a_plan_that_is_damaged_or_contradicts_itself_is_refused(path, value, says):
    with pytest.raises(CheckpointError, match=f"^the plan: .*{re.escape(says)}") as error:
        ConversionPlan.from_dict(changed(path, value))
    assert str(error.value).isprintable()


# A plan without some layers.


def test_a_plan_without_some_layers_is_the_same_for_all_others():
    whole = plan_of(Net())
    part = whole.without("layer2.*")
    assert part.layers == whole.layers[:3] == whole.without("layer2").layers
    assert part.budget.limit == sum(layer.dense_weights for layer in part.layers)
    assert ConversionPlan.from_json(part.to_json()) == part
    reasons = {skip.name: skip.reason for skip in part.skipped}
    assert reasons["layer2.1"] == "left out of the plan by layer2.*"
    # A layer that is left alone in its tie group gets its own positions.
    alone = whole.without(["layer1.1", "layer2"])
    assert [layer.tie_group for layer in alone.layers] == [None, None]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("layer3", "the plan has no layer layer3; the nearest are layer2, layer1"),
        (["layer1", "layer2"], "without layer1, layer2, no layer of the plan would remain"),
    ],
)
def test_unknown_layers_and_all_layers_at_once_cannot_be_left_out(paths, message):
    with pytest.raises(PlanError, match=message):
        plan_of(Net()).without(paths)
