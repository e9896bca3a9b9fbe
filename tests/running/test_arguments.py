"""Networks are run with what their forward takes, or it is said why not."""

import re
from dataclasses import replace

import pytest
import torch

from dcls_convert import DclsConvertError, convert_, find_convs, sweep
from dcls_convert.running.arguments import describe_inputs, random_arguments

from ..several_inputs import EXAMPLES, IMAGE, MASK, OneImage, Signal, ThreeInputs, TwoImages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_images_are_an_example_of_their_size_whatever_the_batch(dtype):
    of_size = find_convs(OneImage(), (4, 9, 8))
    for batch in (1, 4):
        images = torch.zeros(batch, 4, 9, 8, dtype=dtype)
        assert find_convs(OneImage(), example_inputs=images) == of_size


def test_several_inputs_are_traced_as_one_that_holds_them_all():
    several = find_convs(TwoImages(), example_inputs=EXAMPLES[TwoImages])
    one = find_convs(OneImage(), (IMAGE[0] + MASK[0], *IMAGE[1:]))
    assert one.macs is not None
    assert replace(several, inputs=one.inputs, input_size=one.input_size) == one
    assert [site.name for site in several.sites if site.stem] == ["stem"]


@pytest.mark.parametrize("build", EXAMPLES, ids=lambda build: build.__name__)
def test_maps_are_known_for_every_kind_of_input(build):
    convs = find_convs(build(), example_inputs=EXAMPLES[build])
    size = (98,) if build is Signal else IMAGE[1:]
    assert {site.input_extent for site in convs.sites if "stage" in site.name} == {size}
    assert convs.macs is not None
    assert convs.input_size is None


def test_inputs_like_an_example_have_its_shapes_dtypes_and_range_of_integers():
    example = {"ids": torch.tensor([[3, 7, 5]], dtype=torch.int32), "mask": torch.ones(2, 3) > 0}
    inputs = describe_inputs({**example, "x": torch.ones(1, 4)})
    made = random_arguments(inputs, dtype=torch.float64).kwargs
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in made.items()} == {
        "ids": ((1, 3), torch.int32),
        "mask": ((2, 3), torch.bool),
        "x": ((1, 4), torch.float64),
    }
    values = [random_arguments(inputs, seed=seed).kwargs["ids"] for seed in range(20)]
    assert set(torch.cat(values).flatten().tolist()) == {3, 4, 5, 6, 7}
    assert torch.equal(made["x"].float(), random_arguments(inputs).kwargs["x"])


@pytest.mark.parametrize(
    ("build", "inputs", "says"),
    [
        (TwoImages, {"input_size": IMAGE}, "missing 1 required positional argument: 'mask'"),
        (OneImage, {"example_inputs": EXAMPLES[TwoImages]}, "takes 2 positional arguments but 3"),
        (ThreeInputs, {"input_size": IMAGE}, "give example_inputs in Python"),
    ],
)
def test_inputs_that_forward_does_not_take_are_refused_with_what_it_said(build, inputs, says):
    for function in (convert_, sweep):
        with pytest.raises(DclsConvertError, match=re.escape(says)):
            function(build(), **inputs)
    assert len(convert_(build(), dilated_size=7, init="random").layers) == 2


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"example_inputs": [1, 2]}, r"found \[1, 2\]; give a tensor, a tuple"),
        ({"example_inputs": torch.zeros(1), "input_size": IMAGE}, "not both"),
        ({"example_inputs": torch.zeros(0, 4, 9, 8)}, "0x4x9x8: is empty"),
    ],
    ids=str,
)
def test_what_is_no_example_is_refused(inputs, says):
    with pytest.raises(DclsConvertError, match=says):
        find_convs(OneImage(), **inputs)
