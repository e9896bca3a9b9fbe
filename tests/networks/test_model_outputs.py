"""Outputs of any structure are compared tensor by tensor; what cannot be compared is an error."""

import collections
import copy
import dataclasses
import math
import types

import pytest
import torch

from dcls_convert.networks.model_outputs import (
    ComparisonError,
    check_close,
    compare_outputs,
    max_relative_error,
    relative_error,
    tensors_in,
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
        (
            [torch.zeros(2), None],
            [torch.zeros(2), torch.zeros(2)],
            r"output\[1\] is a NoneType and a Tensor",
        ),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), "not finite"),
        (["text"], ["text"], "no tensor"),
    ],
)
def test_what_cannot_be_compared_is_an_error(a, b, says):
    with pytest.raises(ComparisonError, match=says):
        max_relative_error(a, b)


def test_the_error_of_a_network_is_over_all_floating_tensors_or_none_if_it_is_not_defined():
    a = [torch.tensor([3.0]), {"n": torch.tensor([4.0]), "text": "x"}, torch.tensor([7])]
    b = [torch.tensor([3.0]), {"n": torch.tensor([5.0])}, torch.tensor([8])]
    assert compare_outputs(a, b).output_error == 1 / 5
    for others in ([torch.zeros(1)], [torch.tensor([math.nan]), torch.zeros(1)]):
        assert compare_outputs(a[:2], others).output_error is None
    huge = torch.full((2,), 1e200, dtype=torch.float64)
    assert relative_error([(huge, torch.ones(2))]) == math.inf


def test_the_bound_is_the_largest_error_allowed():
    a = torch.tensor([8.0, 0.0])
    b = torch.tensor([8.0, 1.0])
    assert check_close(a, b, bound=1 / 8, what="it") == 1 / 8
    with pytest.raises(ComparisonError, match=r"it: .* is 1\.2e-01; at most 1e-01 is allowed"):
        check_close(a, b, bound=0.12, what="it")


@pytest.mark.parametrize(
    ("shapes", "are_scores"),
    [
        ([(4, 10), (2, 10)], True),
        ([(4, 10, 8, 8)], False),  # masks
        ([(4, 1)], False),  # a number for each image
        ([(4, 10), (4, 3)], False),  # two heads
    ],
)
def test_only_class_scores_have_a_top1_agreement_and_a_divergence(shapes, are_scores):
    old = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
    result = compare_outputs(old, [2 * output for output in old])
    assert result.output_error == 1
    assert (result.same_top1 is not None) == (result.kl is not None) == are_scores


@dataclasses.dataclass
class Detections:
    boxes: torch.Tensor
    scores: list
    name: str = "boxes"


@dataclasses.dataclass(slots=True)
class Slotted:
    logits: torch.Tensor


def other_objects(tensor):
    """The same tensor, in objects of many kinds."""
    return {
        "dataclass": Detections(torch.zeros(1), [tensor]),
        "object": types.SimpleNamespace(inner=types.SimpleNamespace(tensor=tensor)),
        "slots": Slotted(tensor),
        "queue": collections.deque([tensor]),
        "mapping": types.MappingProxyType({"a": tensor}),
        "array": [tensor.numpy()],
        "number of NumPy": (tensor.numpy()[0], tensor.numpy()[1]),
    }


@pytest.mark.parametrize("kind", other_objects(torch.ones(2)))
def test_objects_are_compared_by_their_fields(kind):
    value = other_objects(torch.tensor([4.0, 3.0]))[kind]
    same = other_objects(torch.tensor([4.0, 3.0]))[kind]
    other = other_objects(torch.tensor([4.0, 4.0]))[kind]
    assert max_relative_error(value, same) == 0
    assert max_relative_error(value, other) == (1 / 3 if kind == "number of NumPy" else 1 / 5)


def test_what_has_no_tensors_to_compare_is_never_the_same():
    tensor = torch.ones(2)
    endless = [tensor]
    endless.append(endless)
    with pytest.raises(ComparisonError, match="contain themselves"):
        max_relative_error(endless, endless)
    for build in (lambda: iter([tensor]), lambda: (part for part in [tensor]), object):
        with pytest.raises(ComparisonError, match="which cannot be compared"):
            max_relative_error(build(), build())
        assert tensors_in(build()) == []
