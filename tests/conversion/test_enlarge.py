"""A converted network gets larger windows: the same elements, outputs, ties and parameters."""

import copy
import json

import pytest
import timm
import torch
from torch import nn

import dcls_convert
from dcls_convert import DclsConvertError, convert_, load_converted, save_converted
from dcls_convert.conversion.provenance import provenance_of
from dcls_convert.placing.place import noted_plan

from ..command_line import run, run_to_end
from ..layers.common import close, randn
from ..rules import rules_of

SIZE = (3, 64, 64)


def scattered_(model):
    """Move the elements anywhere in their windows, as a training does, and return the model.

    Layer scales are set to 1: small ones hide the layers.
    """
    for layer in model.modules():
        if isinstance(layer, dcls_convert.DclsConv2d) and not layer.is_tied:
            nn.init.uniform_(layer.positions, -4, 4)
        if hasattr(layer, "gamma"):
            nn.init.ones_(layer.gamma)
    return model


@pytest.fixture
def converted():
    """A network with windows of 9x9, in float64 and in eval mode."""
    torch.manual_seed(0)
    model = timm.create_model("test_convnext").double()
    convert_(model, dilated_size=9, input_size=SIZE, init="random")
    return scattered_(model).eval()


def test_a_larger_window_has_the_same_elements_and_outputs(converted):
    """The oracle is a plain network that is converted at once, and gets the elements."""
    images = randn(2, *SIZE)
    expected = converted(images)
    parameters = list(converted.parameters())
    state = copy.deepcopy(converted.state_dict())
    provenance = provenance_of(converted)
    report = convert_(converted, dilated_size=13)
    close(converted(images), expected)
    assert [id(one) for one in converted.parameters()] == [id(one) for one in parameters]
    assert report.plan.dilated_sizes == ((13, 13),)
    assert max(layer.fit_error for layer in report.layers) < 1e-6
    assert provenance.items() < provenance_of(converted).items()
    at_once = timm.create_model("test_convnext").double()
    (count,) = report.plan.kernel_counts
    planned = convert_(at_once, dilated_size=13, kernel_count=count, input_size=SIZE, init="random")
    at_once.load_state_dict(state)
    close(at_once.eval()(images), expected)
    assert report.params == planned.params
    assert report.macs == planned.macs
    groups = [layer.tie_group for layer in report.layers]
    assert groups == [layer.tie_group for layer in planned.layers]


def test_it_is_saved_and_loaded_and_enlarged_again(converted, tmp_path):
    images = randn(2, *SIZE)
    converted.float()  # the dtype of the loaded network
    expected = copy.deepcopy(converted).double()(images)
    report = convert_(converted, dilated_size="+4")
    assert report.plan.dilated_sizes == ((11, 11),)
    save_converted(converted, report.plan, tmp_path / "saved")
    loaded = load_converted(tmp_path / "saved").double().eval()
    convert_(loaded, dilated_size=13)
    close(loaded(images), expected)


def test_a_window_of_a_causal_network_grows_further_back():
    net = nn.Sequential(*[nn.Sequential(nn.ZeroPad1d((2, 0)), nn.Conv1d(2, 2, 3)) for _ in "ab"])
    net.double()
    options = {"kernel_count": 3, "init": "random", "positions": "uniform"}
    convert_(net, dilated_size=6, input_size=(2, 40), **options)
    signal = randn(1, 2, 40)
    expected = net(signal)
    report = convert_(net, dilated_size=11)
    close(net(signal), expected)
    assert {layer.grow for layer in report.layers} == {("back",)}
    assert "as many as the window has" in report.notes[0]


def test_elements_with_a_sigma_spread_into_new_cells_and_the_error_says_how_much():
    torch.manual_seed(0)
    model = timm.create_model("test_convnext").double()
    convert_(model, dilated_size=9, interpolation="gaussian", input_size=SIZE, init="random")
    scattered_(model)
    old = model.stages[0].blocks[0].conv_dw.kernel().detach()
    report = convert_(model, dilated_size=13)
    new = model.stages[0].blocks[0].conv_dw.kernel().detach()
    difference = new.clone()
    difference[..., 2:-2, 2:-2] -= old
    assert report.layers[0].fit_error == pytest.approx(float(difference.norm() / old.norm()))
    assert report.layers[0].fit_error > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dilated_size": (13,)}, r"stages.0.blocks.0.conv_dw: the size 13 is for 1-D"),
        ({"dilated_size": 13, "input_size": 32}, "omit input size"),
        ({}, "state a dilated size"),
        ({"dilated_size": 13, "kernel_count": 20, "tie": "none"}, "omit kernel count and tie"),
        ({"dilated_size": 13, "input_size": (3, 32, 32)}, "omit input size"),
        ({"dilated_size": 7}, r"lie from -.* a window of 7 has cells from -3 to 3; use a larger"),
        ({"dilated_size": 12}, "must be odd"),
    ],
)
def test_other_changes_are_refused_and_change_nothing(converted, options, message):
    before = copy.deepcopy(converted.state_dict())
    with pytest.raises(DclsConvertError, match=message):
        convert_(converted, **options)
    assert converted.stages[0].blocks[0].conv_dw.dilated_kernel_size == (9, 9)
    assert all(map(torch.equal, before.values(), converted.state_dict().values()))


def test_what_timm_notes_of_a_loaded_network_stays(tmp_path, converted):
    save_converted(converted, noted_plan(converted), tmp_path / "nine")
    options = {"num_classes": 7, "drop_path_rate": 0.3, "pretrained": True}
    model = timm.create_model(f"local-dir:{tmp_path}/nine", **options)
    convert_(model, dilated_size=13)
    save_converted(model, noted_plan(model), tmp_path / "thirteen")
    loaded = load_converted(tmp_path / "thirteen")
    assert loaded.num_classes == 7
    rates = [network.stages[3].blocks[0].drop_path.drop_prob for network in (model, loaded)]
    assert rates[0] == rates[1] > 0
    convert_(loaded, dilated_size=15)
    assert provenance_of(loaded)["enlarged"] == [{"dilated_size": 13}, {"dilated_size": 15}]


def test_records_and_inspections_see_no_move_where_only_the_centre_moved(tmp_path):
    net = nn.Sequential(*[nn.Sequential(nn.ZeroPad1d((2, 0)), nn.Conv1d(2, 2, 3)) for _ in "ab"])
    options = {"kernel_count": 3, "init": "random", "positions": "uniform"}
    plan = convert_(net, dilated_size=6, input_size=(2, 40), **options).plan
    save_converted(net, plan, tmp_path / "six")
    tracker = dcls_convert.tuning.PositionTracker(net)
    tracker.update(0)
    plan = convert_(net, dilated_size=11).plan
    assert max(row.speed for row in tracker.update(1).positions.values()) < 1e-6
    save_converted(net, plan, tmp_path / "eleven")
    out, _ = run("inspect", tmp_path / "eleven", "--since", tmp_path / "six", "--json")
    assert max(row["largest_move"] for row in json.loads(out)["positions"]) < 1e-6


def test_a_models_name_has_precedence_over_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("test_convnext", "--dilated-size", 9, "--kernel-count", 20, "--output", "test_convnext")
    out, err = run("test_convnext", "--dilated-size", 11, "--dry-run")
    assert "26 elements in 11x11" in out
    assert "the folder is ./test_convnext" in err
    out, _ = run("./test_convnext", "--dilated-size", 11, "--dry-run")
    assert "20 elements in 11x11" in out


def test_a_layer_with_a_dense_axis_keeps_it(tmp_path):
    net = nn.Sequential(nn.Conv2d(2, 2, (1, 7), padding="same"))
    rules = rules_of({"dilated_size": [3, 9], "match": {}})
    convert_(net, rules=rules, kernel_count=3, init="random", input_size=(2, 16, 16))
    assert convert_(net, dilated_size="+4").plan.dilated_sizes == ((5, 11),)
    narrow = nn.Sequential(nn.Conv2d(2, 2, (1, 7), padding="same"))
    convert_(narrow, rules=rules_of({"match": {}}), dilated_size=9, init="random", kernel_count=3)
    assert convert_(narrow, dilated_size=13).plan.dilated_sizes == ((1, 13),)
    with pytest.raises(DclsConvertError, match=r"nothing is learnt along axis 0.*use 1x15"):
        convert_(narrow, dilated_size=(9, 15))


def test_the_command_takes_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("test_convnext", "--dilated-size", 9, "--input-size", "3x64x64", "--quiet")
    out, _ = run("test_convnext-dcls9", "--dilated-size", 13, "--json")
    report = json.loads(out)
    assert report["output"] == "test_convnext-dcls9-dcls13"
    images = torch.randn(2, *SIZE)
    expected = load_converted("test_convnext-dcls9").eval()(images)
    torch.testing.assert_close(load_converted(report["output"]).eval()(images), expected)
    inspected, _ = run("inspect", report["output"])
    command = '"command": "dcls-convert test_convnext-dcls9 --dilated-size 13 --json"'
    assert command in " ".join(inspected.split())
    costly, _ = run("test_convnext-dcls9", "--dilated-size", 31, "--dry-run")
    assert "dcls-convert sweep timm:test_convnext --input-size 3x64x64" in costly
    for arguments, message in {
        ("test_convnext-dcls9", "--dilated-size", 13, "--pretrained"): "omit pretrained",
        ("local-dir:test_convnext-dcls9",): "state a dilated size",
    }.items():
        code, out, err = run_to_end(*arguments)
        assert (code, out) == (2, "")
        assert message in err
