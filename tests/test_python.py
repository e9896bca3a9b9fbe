"""The user's own network in Python: what a notebook shows, step by step."""

import warnings
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dcls_convert
from dcls_convert import DclsConvertError, PlanError, convert_

from .model_state import state_of

SIZE = (3, 16, 16)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    )
    return model.eval()


def shown(record):
    """Return what a notebook shows as text; its HTML must say the same."""
    text = str(record)
    page = "".join(xml.etree.ElementTree.fromstring(record._repr_html_()).itertext())
    assert page.split() == text.split()
    return " ".join(text.split())


def test_a_report_gives_no_advice_for_a_shell_and_says_why_macs_are_missing():
    text = shown(convert_(network(), dilated_size=7))
    assert "MACs were not counted: no input size is known" in text
    assert "A calibration with some images would keep the outputs closer" in text
    assert "skipped says why" in text
    assert "dcls_convert.sweep" in shown(convert_(network(), dilated_size=9, input_size=SIZE))
    for advice in ("dcls-convert", "-v ", "--"):
        assert advice not in text


def test_batches_are_compared_by_outputs_and_masks_have_no_class():
    """Batches of images and masks, as a loader yields them; held-out images give the error."""
    photos = torch.rand(10, *SIZE, generator=torch.Generator().manual_seed(0))
    model = network()
    held_out = photos[4::5]
    with torch.no_grad():
        before = model(held_out)
    batches = [(photos[:6], torch.zeros(6)), (photos[6:], torch.zeros(4))]
    report = convert_(model, dilated_size=5, input_size=SIZE, calibration=batches)
    with torch.no_grad():
        error = float((model(held_out) - before).norm() / before.norm())
    outcome = report.outcome
    assert (outcome.images, outcome.fitted_images) == (2, 8)
    assert outcome.output_error == pytest.approx(error, rel=1e-3)
    text = shown(report)
    assert f"On 2 held-out images: relative error of the outputs {error:.3f}" in text
    assert "class" not in text
    assert "calibration=images" not in text


def test_a_sweep_leaves_the_model_alone_and_recommends_what_convert_does():
    model = network()
    before = state_of(model)
    result = dcls_convert.sweep(model, [3, 5, (7, 7), 4], input_size=SIZE, tie="none")
    assert state_of(model) == before
    assert [row.status for row in result.rows] == ["original", *["done"] * 3, "does not fit"]
    text = shown(result)
    for row in result.rows[:4]:
        assert row.window in text
        assert f"{row.params:,}" in text
    recommended = result.rows[result.choice.row]
    report = convert_(network(), input_size=SIZE, tie="none")
    assert (report.params.after, report.macs.after) == (recommended.params, recommended.macs)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"dilated_size": np.array([5, 5])}, {"dilated_size": (5, 5)}),
        ({"kernel_count": np.int64(3)}, {"kernel_count": 3}),
        ({"seed": np.int64(3), "budget": np.float32(90)}, {"seed": 3, "budget": 90}),
    ],
    ids=str,
)
def test_numbers_of_numpy_are_numbers(options, same):
    default = {"dilated_size": 5, "input_size": SIZE, "init": "random"}
    of_numpy, plain = network(), network()
    report = convert_(of_numpy, **{**default, **options})
    assert report.plan == convert_(plain, **{**default, **same}).plan
    assert torch.equal(of_numpy[1].positions, plain[1].positions)
    assert report.plan.from_json(report.plan.to_json(), "plan") == report.plan


def test_a_sweep_takes_numbers_of_numpy():
    sizes, counts = np.array([5, 7]), np.array([2, 3])
    result = dcls_convert.sweep(network(), sizes, counts=counts, input_size=np.array(SIZE))
    assert result == dcls_convert.sweep(network(), [5, 7], counts=[2, 3], input_size=SIZE)


def test_a_size_at_which_the_model_does_not_run_is_an_error_and_changes_nothing():
    model = network()
    with pytest.raises(PlanError, match=r"^input size 16x16x3, as \(channels, \*spatial\): "):
        convert_(model, dilated_size=7, input_size=(16, 16, 3))
    assert isinstance(model[1], nn.Conv2d)


def test_a_warning_names_the_users_file_and_as_an_error_leaves_the_model_as_it_was():
    with pytest.warns(UserWarning, match="not measured") as caught:
        convert_(network(), dilated_size=5)
    assert [warning.filename for warning in caught] == [__file__]
    model = network()
    with warnings.catch_warnings(action="error"):
        with pytest.raises(UserWarning, match="not measured"):
            convert_(model, dilated_size=5)
    assert not any(isinstance(module, dcls_convert.DclsConv2d) for module in model.modules())


WRONG_MODELS = {
    "a OrderedDict": lambda: network().state_dict(),
    "the class Sequential": lambda: nn.Sequential,
    "the text 'folder'": lambda: Path("folder"),  # a network built for a name would be lost
}
FRONT_DOORS = {
    "convert_": convert_,
    "sweep": dcls_convert.sweep,
    "find_convs": dcls_convert.find_convs,
    "convert_from_authors_": lambda model: dcls_convert.convert_from_authors_(model, {}),
    "apply_plan_": lambda model: dcls_convert.apply_plan_(model, None),
    "read_calibration_images": lambda model: dcls_convert.read_calibration_images(model, None, ()),
    "fold_to_dense_": dcls_convert.fold_to_dense_,
    "save_converted": lambda model: dcls_convert.save_converted(model, "plan", "out"),
    "param_groups": lambda model: dcls_convert.tuning.param_groups(model, lr=1e-3),
    "clamp_positions_": dcls_convert.tuning.clamp_positions_,
    "repulsive_loss": dcls_convert.tuning.repulsive_loss,
    "no_weight_decay": dcls_convert.tuning.no_weight_decay,
    "PositionTracker": dcls_convert.tuning.PositionTracker,
}


@pytest.mark.parametrize("front_door", FRONT_DOORS)
def test_what_is_no_model_is_refused_by_every_front_door(front_door):
    for found, make in WRONG_MODELS.items():
        with pytest.raises(DclsConvertError, match=f"^model: found {found}; give a torch.nn.Mod"):
            FRONT_DOORS[front_door](make())


def test_what_is_given_in_place_of_a_plan_or_a_folder_is_refused():
    model = network()
    report = convert_(network(), dilated_size=9, init="random")
    from_report = "plan: found a ConversionReport; give a ConversionPlan, such as plan_conversion"
    with pytest.raises(DclsConvertError, match=from_report):
        dcls_convert.apply_plan_(model, report)
    with pytest.raises(DclsConvertError, match=from_report):
        dcls_convert.predict_report(report)
    with pytest.raises(DclsConvertError, match="convs: found a Sequential; give a ModelConvs"):
        dcls_convert.plan_conversion(model)
    with pytest.raises(DclsConvertError, match="folder: found a ConversionPlan; give a Path"):
        dcls_convert.save_converted(model, "out", report.plan)
