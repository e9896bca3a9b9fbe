"""Trained weights are loaded from files and the hub, and survive the conversion."""

import shutil

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from dcls_convert import load_converted, save_converted
from dcls_convert.conversion.convert import carry_out
from dcls_convert.conversion.open_network import give_values_, open_network
from dcls_convert.conversion.request import NetworkRequest
from dcls_convert.errors import CheckpointError
from dcls_convert.progress import ignore_messages
from dcls_convert.weights.loading import differing_classifier, load_weights_

from ..command_line import NET, net, run
from ..conftest import TINY
from ..requests import request_of

SMALL = ("--dilated-size", 9, "--input-size", "3x32x32", "--quiet")


def request_for(name, **options):
    """Return a request to convert a network without a fit, which would take seconds."""
    return request_of(name, init="largest", input_size=(3, 32, 32), **options)


def converted(name, *, note=ignore_messages, **options):
    return carry_out(request_for(name, **options), note=note)


def network_of(name, *, note=ignore_messages, **options):
    """Return the network of a request, with its values."""
    request = NetworkRequest(model=name, **options)
    network, weights = open_network(request, offline=False, notify=ignore_messages, note=note)
    lacking = () if weights is None else weights.new_classifier
    return give_values_(network, request, weights, lacking=lacking, notify=ignore_messages)


def test_the_number_of_classes_is_that_of_the_file_if_none_is_stated(tmp_path):
    model = timm.create_model(TINY, num_classes=10)
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    notes = []
    plan_alone = converted(
        TINY, weights=tmp_path / "own.safetensors", dry_run=True, note=notes.append
    ).report.plan
    assert plan_alone.model_args == {"num_classes": 10}
    assert ["has 10 classes, so the model is built" in note for note in notes] == [True]
    done = converted(TINY, weights=tmp_path / "own.safetensors")
    assert done.report.plan == plan_alone
    assert torch.equal(done.model.head.fc.weight, model.head.fc.weight)


def test_a_users_model_needs_the_number_of_classes_of_its_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(net(num_classes=5).state_dict(), "five.pth")
    _, err = run(NET, "--checkpoint", "five.pth", "--dilated-size", 9, code=2)
    assert "build the model with 5 classes" in err
    run(NET, "--checkpoint", "five.pth", "--num-classes", 5, "--init", "largest", *SMALL)
    with pytest.raises(CheckpointError, match="build the model with 5 classes"):
        carry_out(request_of(net(), weights=net(5).state_dict()))


def test_a_classifier_that_the_file_lacks_or_has_otherwise_is_new_if_classes_are_stated(tmp_path):
    own = timm.create_model("test_resnet", num_classes=0).state_dict()
    projector = {f"fc.{i}.weight": torch.ones(4, 4) for i in (0, 2)}
    path = tmp_path / "weights.pth"
    for entries in ({}, projector, timm.create_model("test_resnet").state_dict()):
        torch.save(own | entries, path)
        notes = []
        network = network_of("test_resnet", weights=path, num_classes=5, note=notes.append)
        assert network.fc.weight.shape[0] == 5
        assert all(
            torch.equal(tensor, (own | entries)[name])
            for name, tensor in network.state_dict().items()
            if not name.startswith("fc.")
        )
        new = "no weights fit the classifier, which starts from random values: fc.weight, fc.bias"
        assert new in notes
        assert network_of("test_resnet", weights=path, num_classes=0).num_classes == 0
    torch.save(own | projector, path)
    with pytest.raises(CheckpointError, match="state the number of classes"):
        network_of("test_resnet", weights=path)
    torch.save(own | {"fc.bias": torch.ones(5)}, path)
    with pytest.raises(CheckpointError, match=r"missing: fc\.weight"):
        network_of("test_resnet", weights=path, num_classes=5)


def test_masks_and_counters_of_a_model_are_loaded():
    model = torch.nn.BatchNorm2d(2)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    state["mask"] = model.mask.T.clone()
    load_weights_(model, state, "file")
    assert model.num_batches_tracked == 1
    assert torch.equal(model.mask, torch.full((2, 2), -torch.inf).tril(-1))
    with pytest.raises(CheckpointError, match="weight has 1 of 2 values"):
        load_weights_(model, state | {"weight": torch.tensor([0.0, -torch.inf])}, "file")


def test_a_layer_whose_name_begins_like_the_classifiers_is_not_the_classifier():
    model = torch.nn.Sequential()
    model.head_conv = torch.nn.Linear(3, 2)
    model.head = torch.nn.Linear(2, 5)
    larger = {"head_conv.weight": (2, 4), "head.weight": (7, 2), "head.bias": (7,)}
    state = model.state_dict() | {name: torch.ones(shape) for name, shape in larger.items()}
    assert differing_classifier(model, state) == ["head.weight", "head.bias"]


def test_pretrained_weights_come_from_timm_or_a_folder_which_is_not_needed_later(
    tmp_path, monkeypatch, trained
):
    timm.models.save_for_hf(trained, folder := tmp_path / "folder", safe_serialization=True)
    requested = []
    monkeypatch.setattr(
        "timm.models._hub.hf_hub_download",
        lambda repo_id, filename, **_: (
            requested.append(f"{repo_id}/{filename}") or str(folder / filename)
        ),
    )
    network = network_of(f"timm:{TINY}", pretrained=True)
    assert requested == [
        f"timm/{trained.pretrained_cfg['hf_hub_id'].removeprefix('timm/')}/model.safetensors"
    ]
    assert torch.equal(network.stem[0].weight, trained.stem[0].weight)
    done = converted(f"local-dir:{folder}", pretrained=True)
    save_converted(done.model, done.report.plan, tmp_path / "out")
    shutil.rmtree(folder)
    assert done.report.plan.model == f"timm:{TINY}"
    assert torch.equal(load_converted(tmp_path / "out").stem[0].weight, trained.stem[0].weight)


def test_torchvision_weights_come_through_its_own_loader(monkeypatch):
    """mnasnet reads a version in the state dict."""
    state = torchvision.models.get_model("mnasnet0_5").state_dict()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *_args, **_options: state
    )
    new = ("classifier.1.weight", "classifier.1.bias")
    for options, not_loaded in (({}, ()), ({"num_classes": 3}, new)):
        network = network_of("torchvision:mnasnet0_5", pretrained=True, **options)
        for key, tensor in network.state_dict().items():
            assert key in not_loaded or torch.equal(tensor, state[key])
        assert network.classifier[1].out_features == options.get("num_classes", 1000)


def test_torchvision_weights_of_another_structure_fill_the_plain_model(monkeypatch):
    """With weights, torchvision gives this model a second head, which its plan does not have."""
    torch.manual_seed(3)
    with_weights = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, aux_loss=True, num_classes=21
    )
    state = with_weights.state_dict()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *_args, **_options: state
    )
    network = network_of("torchvision:deeplabv3_mobilenet_v3_large", pretrained=True)
    assert network.aux_classifier is None
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
