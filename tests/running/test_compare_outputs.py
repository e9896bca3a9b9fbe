"""Outputs of any structure are compared tensor by tensor; what cannot be compared is an error."""

import collections
import copy
import dataclasses
import math
import types

import pytest
import torch

from dcls_convert.running.agreement import Agreement
from dcls_convert.running.compare_outputs import (
    ComparisonError,
    compare_outputs,
    max_relative_error,
    relative_error,
)


def test_the_largest_relative_error_is_that_of_the_worst_tensor():
    a = {
        "x": [torch.tensor([1.0, -4.0]), torch.tensor(100.0)],
        "n": (torch.tensor([3, 4]), "text", None),
    }
    b = copy.deepcopy(a)
    assert max_relative_error(a, b) == 0
    b["x"][1] += 10
    b["n"][0][1] = 6
    assert max_relative_error(a, b) == 2 / 5
    assert max_relative_error(torch.zeros(2), torch.tensor([0.0, 1e-30])) == math.inf
    assert max_relative_error(torch.tensor([3 + 4j]), torch.tensor([3 + 3j])) == 1 / 5


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (torch.zeros(2), torch.zeros(3), r"output has shape \(2,\) and \(3,\)"),
        (
            {"a": [torch.zeros(2)]},
            {"a": [torch.zeros(2), 1]},
            r"output\['a'\]\[1\] is in only one",
        ),
        ({"a": [torch.zeros(2), 1]}, {"a": [torch.zeros(2), 2]}, r"output\['a'\]\[1\] is"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), "not finite"),
        (["text"], ["text"], "no tensor"),
        (iter([1]), iter([1]), "which cannot be compared"),
    ],
)
def test_what_cannot_be_compared_is_an_error(a, b, says):
    with pytest.raises(ComparisonError, match=says):
        max_relative_error(a, b)


@pytest.mark.parametrize("outputs", [[], [torch.tensor([7])], [torch.zeros(0, 4)]])
def test_where_nothing_is_compared_nothing_is_stated(outputs):
    assert compare_outputs(outputs, outputs) == Agreement()


def test_the_error_of_a_network_is_over_all_floating_tensors_or_none_if_it_is_not_defined():
    a = [torch.tensor([3.0]), {"n": torch.tensor([4.0]), "text": "x"}, torch.tensor([7])]
    b = [torch.tensor([3.0]), {"n": torch.tensor([5.0])}, torch.tensor([8])]
    assert compare_outputs(a, b).output_error == 1 / 5
    for others in ([torch.zeros(1)], [torch.tensor([math.nan]), torch.zeros(1)]):
        assert compare_outputs(a[:2], others).output_error is None
    huge = torch.full((2,), 1e200, dtype=torch.float64)
    assert relative_error([(huge, torch.ones(2))]) == math.inf


@pytest.mark.parametrize(
    ("shapes", "num_classes", "defined"),
    [
        ([(4, 10), (2, 10)], 10, ["same_top1", "kl"]),
        ([(4, 10), (2, 10)], None, ["same_largest"]),  # scores, an embedding, or anything else
        ([(4, 10), (2, 10)], 0, []),  # features
        ([(4, 10), (2, 10)], 9, []),  # not the classifier's outputs
        ([(4, 1)], None, []),
        ([(4, 10, 8, 8)], None, []),  # masks
        ([(4, 10), (4, 3)], None, []),  # two heads
    ],
)
def test_only_a_classifier_has_a_top1_agreement_and_a_divergence(shapes, num_classes, defined):
    old = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    result = compare_outputs(old, [2 * output for output in old], num_classes=num_classes)
    numbers = {key: value for key, value in dataclasses.asdict(result).items() if value is not None}
    assert [*numbers] == [*defined, "output_error"]
    assert numbers["output_error"] == 1
    assert numbers.get("same_top1", 1) == numbers.get("same_largest", 1) == 1


@dataclasses.dataclass(slots=True)
class Slotted:
    logits: torch.Tensor


KINDS = {
    "object": lambda tensor: types.SimpleNamespace(inner=types.SimpleNamespace(tensor=tensor)),
    "slots": Slotted,
    "queue": lambda tensor: collections.deque([tensor]),
    "mapping": lambda tensor: types.MappingProxyType({"a": tensor}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_compared_by_their_fields(kind):
    build = KINDS[kind]
    value, other = torch.tensor([[4.0, 3.0], [4.0, 4.0]])
    assert max_relative_error(build(value), build(value.clone())) == 0
    assert max_relative_error(build(value), build(other)) == 1 / 5
