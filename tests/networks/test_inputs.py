"""Networks of several inputs are run as their forward takes them, or it is said what it takes."""

import re
from dataclasses import replace

import pytest
from torch import nn

from dcls_convert import DclsConvertError, convert_, find_convs, sweep
from dcls_convert.networks.identify_model import assumed_input_size
from dcls_convert.networks.source import ModelSource

from ..several_inputs import (
    IMAGE,
    MASK,
    SIZES,
    ByKeyword,
    InADict,
    OneImage,
    Optional,
    ThreeInputs,
    TwoImages,
)

UNCHECKED = "output sizes, shifts of maps, and uses of convolutions by other code, are not checked"


def test_several_inputs_are_traced_as_one_that_holds_them_all():
    several = find_convs(TwoImages(), (IMAGE, MASK))
    one = find_convs(OneImage(), (IMAGE[0] + MASK[0], *IMAGE[1:]))
    assert one.macs is not None
    assert several == replace(one, input_size=(IMAGE, MASK))
    assert [site.name for site in several.sites if site.stem] == ["stem"]


@pytest.mark.parametrize("build", SIZES, ids=lambda build: build.__name__)
def test_maps_are_as_large_as_the_image_whatever_the_other_inputs_are(build):
    convs = find_convs(build(), SIZES[build])
    assert {site.output_size for site in convs.sites} == {IMAGE[1:]}
    assert convs.input_size == SIZES[build]


def test_what_only_an_optional_input_costs_is_counted_if_it_is_given():
    class Net(nn.Sequential):
        def forward(self, image, other=None):
            y = self[0](image)
            return y if other is None else y + self[1](other)

    def macs(size):
        return find_convs(Net(nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)), size).macs

    assert macs((IMAGE, IMAGE)) == 2 * macs(IMAGE) == 2 * macs((IMAGE,))


@pytest.mark.parametrize(
    ("build", "size", "taken"),
    [
        (TwoImages, IMAGE, "forward takes 2 inputs (image, mask); state a size for each"),
        (TwoImages, (IMAGE, MASK, MASK), "forward takes 2 inputs (image, mask)"),
        (OneImage, (IMAGE, MASK), "forward takes 1 input (image)"),
        (Optional, (IMAGE, MASK, MASK), "forward takes 1 to 2 inputs (image, mask)"),
        (ThreeInputs, (IMAGE, MASK), "forward takes 3 inputs (image, vector, time)"),
        (ByKeyword, IMAGE, "forward takes mask by keyword alone"),
        (InADict, IMAGE, "inputs are floating-point tensors by position"),
    ],
)
def test_a_wrong_number_of_sizes_is_answered_with_what_forward_takes(build, size, taken):
    """In every mode of working; a network that is no trace's is converted without a size."""
    for function in (convert_, sweep):
        with pytest.raises(DclsConvertError, match=re.escape(taken)) as refused:
            function(build(), input_size=size)
        assert UNCHECKED in str(refused.value)
    unchecked = find_convs(build())
    assert unchecked.macs is None
    assert UNCHECKED in unchecked.macs_note
    assert len(convert_(build(), dilated_size=7, init="random").layers) == 2


def test_no_size_is_assumed_for_a_forward_of_several_inputs():
    source = ModelSource(name="mymodel:build")
    assert assumed_input_size(source, TwoImages()) is None
    assert assumed_input_size(source, ByKeyword()) is None
    assert assumed_input_size(source, Optional()) == (3, 224, 224)
    assert "forward takes 2 inputs (image, mask)" in find_convs(TwoImages()).macs_note
