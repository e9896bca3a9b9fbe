"""What a plan skips, and which options it refuses."""

import pytest

from dcls_convert.errors import PlanError

from ..rules import rules_of
from .nets import Net, depthwise, plan_of


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"dilated_size": size}, "dilated size .* must be a positive integer, one for each")
            for size in [0, "7x7", True, (7, 0)]
        ),
        ({"dilated_size": "+3"}, r"growth \+3 must be even, .* use \+2 or \+4$"),
        ({"dilated_size": 8}, "layer1.0: .* must be odd as the kernel 3 is.* use 7 or 9"),
        ({"dilated_size": (7,)}, "layer1.0: the size 7 is for 1-D, this convolution is 2-D"),
        ({"rules": rules_of({"dense_axes": [0, 1]})}, "all its axes are dense"),
        ({"scope": "stage"}, "scope=.* must be one of"),
        *(
            ({"kernel_count": count}, "must be a positive integer, auto or exact")
            for count in (0, True, "34")
        ),
        ({"scope": "error"}, "needs the trained kernels, which are not given here"),
        ({"kernel_count": 50}, "layer1.0: kernel count 50 is more than the 49 cells"),
        ({"kernel_count": 5, "budget": 50}, "kernel count states the count"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_impossible_option_is_refused(options, says):
    with pytest.raises(PlanError, match=says):
        plan_of(Net(), **{"strict": True, **options})


@pytest.mark.parametrize(
    ("build", "size", "reason"),
    [
        (lambda: depthwise(4), 9, "must be even"),
        (
            lambda: depthwise(3, padding_mode="reflect"),
            19,
            "reflect padding of 9 does not fit its input of 9",
        ),
        (
            lambda: depthwise(3, padding_mode="circular"),
            21,
            "circular padding of 10 does not fit its input of 9",
        ),
    ],
)
def test_a_layer_that_cannot_take_the_size_is_skipped_with_the_reason_or_refused_if_strict(
    build, size, reason
):
    model = Net(lambda: [depthwise(), build()])
    plan = plan_of(model, dilated_size=size)
    assert [layer.name for layer in plan.layers] == ["layer1.0", "layer2.0"]
    skipped = {skip.name: skip.reason for skip in plan.skipped}
    assert list(skipped) == ["stem", "layer1.1", "layer2.1"], "in the order of the model"
    assert reason in skipped["layer1.1"]
    with pytest.raises(PlanError, match=f"^layer1.1: .*{reason}.* \\(and 1 more layer\\)$"):
        plan_of(model, dilated_size=size, strict=True)
    with pytest.raises(PlanError, match=reason):  # nothing is left
        plan_of(Net(lambda: [build()]), dilated_size=size)


def test_a_growth_converts_kernels_of_both_parities():
    plan = plan_of(Net(lambda: [depthwise(3), depthwise(4)]), dilated_size="+2", strict=True)
    assert {layer.dilated_size for layer in plan.layers} == {(5, 5), (6, 6)}
    assert plan.growth_of_mixed_kernels == 2
