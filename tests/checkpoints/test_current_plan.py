"""What is saved is what is loaded: edits after the conversion, heads, wrappers around and inside.

An edit is found by loading what was saved: most leave no trace in names and shapes.
"""

import copy
import functools
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchvision.ops import StochasticDepth

import dcls_convert
from dcls_convert import convert_, load_converted, save_converted
from dcls_convert.checkpoints.folder import open_folder
from dcls_convert.checkpoints.verify import verify_folder
from dcls_convert.errors import DclsConvertError

from ..model_state import state_of
from .folders import outputs, problems, same_states

NAME = "test_resnet"


def network(**arguments):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model(NAME, **arguments).eval()


def converted(**options):
    model = network()
    options = {"init": "random", "dilated_size": 7, "input_size": (3, 64, 64), **options}
    return model, convert_(model, **options).plan


def by_timm(folder, **arguments):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments)


def replace_all(model, old, make):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, old):
                setattr(module, name, make(child))


EDITS = {
    "activation": lambda m: replace_all(m, nn.ReLU, lambda _: nn.SiLU()),
    "a deeper head": lambda m: setattr(m, "fc", nn.Sequential(nn.Dropout(), nn.Linear(96, 5))),
    "one more module": lambda m: m.add_module("extra", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_model_edited_after_its_conversion_is_saved_as_its_users_own(tmp_path, edit):
    model, plan = converted()
    EDITS[edit](model)
    difference = "[^;]*(; unexpected: [^;]*)?"  # and no hint for a conversion
    sentence = rf"no longer timm:test_resnet with its plan: {difference}\. It is .*model=\.\."
    with pytest.warns(UserWarning, match=sentence):
        folder = save_converted(model, plan, tmp_path / "out")
    unconverted = network()
    EDITS[edit](unconverted)
    assert open_folder(folder).plan.model is None
    assert problems(verify_folder(folder, model=copy.deepcopy(unconverted))) == []
    assert torch.equal(outputs(load_converted(folder, model=unconverted)), outputs(model))
    report = (folder / "report.json").read_text()
    assert f'"after": {sum(p.numel() for p in model.parameters())}' in report


def test_an_argument_that_a_folder_cannot_hold_is_said(tmp_path):
    model = timm.create_model(NAME, norm_layer=functools.partial(nn.BatchNorm2d, eps=1e-2))
    plan = convert_(model, dilated_size=7, init="random").plan
    with pytest.warns(UserWarning, match="that a folder cannot hold, such as a class"):
        save_converted(model, plan, tmp_path / "out")


def test_an_edit_that_a_new_layer_scale_hides_is_found(tmp_path):
    """A fresh ConvNeXt's layer scale of 1e-6 mutes all blocks."""
    model = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8))
    plan = convert_(model, dilated_size=9, init="random", input_size=(3, 64, 64)).plan
    model.stages[2].blocks[0].mlp.act = nn.ReLU()
    before = state_of(model)
    with pytest.warns(UserWarning, match="no longer timm:convnext_atto.*outputs differ by"):
        folder = save_converted(model, plan, tmp_path / "out")
    assert open_folder(folder).plan.model is None
    assert state_of(model) == before


UNCOMPARABLE = {
    # As of a detector that finds no boxes.
    "the same for every image": lambda m: nn.init.constant_(m.fc.bias, 1e6),
    "ZeroDivisionError": lambda m: m.act1.register_forward_hook(lambda *_: 1 / 0),
}


@pytest.mark.parametrize("reason", UNCOMPARABLE)
def test_outputs_that_cannot_be_compared_are_said_and_lose_no_folder(tmp_path, reason):
    model, plan = converted()
    UNCOMPARABLE[reason](model)
    with pytest.warns(UserWarning, match=f"not by its outputs: .*{reason}"):
        folder = save_converted(model, plan, tmp_path / "out")
    assert same_states(load_converted(folder), model)


@pytest.mark.parametrize("classes", [5, 0])
def test_another_number_of_classes_is_found_even_without_a_check(tmp_path, classes):
    model, plan = converted()
    model.reset_classifier(classes)
    folder = save_converted(model, plan, tmp_path / "out")
    assert open_folder(folder).plan.model == f"timm:{NAME}"
    for loaded in (load_converted(folder), by_timm(folder)):
        assert torch.equal(outputs(loaded), outputs(model))
    EDITS["activation"](model)
    folder = save_converted(model, plan, tmp_path / "unchecked", check=False)
    assert load_converted(folder).num_classes == classes


def test_a_new_first_convolution_is_found_and_timm_loads_the_folder(tmp_path):
    model, plan = converted()
    old = model.conv1[0]
    model.conv1[0] = nn.Conv2d(
        1, old.out_channels, old.kernel_size, old.stride, old.padding, bias=False
    )
    folder = save_converted(model, plan, tmp_path / "out")
    assert open_folder(folder).plan.input_size == (1, 64, 64)
    for loaded in (load_converted(folder), by_timm(folder)):
        assert torch.equal(outputs(loaded, channels=1), outputs(model, channels=1))


def test_training_and_layers_that_change_no_output_leave_the_model_what_it_is(tmp_path):
    model, plan = converted()
    model.train()(torch.randn(2, 3, 32, 32)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    replace_all(model, nn.ReLU, lambda _: nn.ReLU())
    replace_all(model, nn.Identity, lambda _: StochasticDepth(0.1, "row"))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    folder = save_converted(model, plan, tmp_path / "out")
    assert model.training
    assert same_states(load_converted(folder), model)


def test_a_model_of_torchvision_is_the_users_own_or_has_a_stated_source(tmp_path):
    model = torchvision.models.resnet18(num_classes=5)
    plan = convert_(model, init="random", dilated_size=7, input_size=(3, 64, 64)).plan
    with pytest.warns(UserWarning, match='source="torchvision:NAME"'):
        own = save_converted(model, plan, tmp_path / "own")
    stated = save_converted(model, plan, tmp_path / "stated", source="torchvision:resnet18")
    unconverted = torchvision.models.resnet18(num_classes=5)
    for loaded in (load_converted(own, model=unconverted), load_converted(stated)):
        assert same_states(loaded, model)
    with pytest.warns(UserWarning, match="no longer torchvision:resnet34 with its plan: miss"):
        wrong = save_converted(model, plan, tmp_path / "wrong", source="torchvision:resnet34")
    assert open_folder(wrong).plan.model is None
    with pytest.raises(DclsConvertError, match="no model 'torchvision:resnet19'"):
        save_converted(model, plan, tmp_path / "none", source="torchvision:resnet19")


def with_wrapped_stages(model):
    model.layer1 = checkpoint_wrapper(model.layer1)
    model.layer2 = torch.compile(model.layer2)
    return model


WRAPPERS = {
    "compiled": lambda m: torch.compile(nn.DataParallel(m)),
    "averaged": torch.optim.swa_utils.AveragedModel,
    "timm's average": ModelEmaV3,
    "wrapped stages": with_wrapped_stages,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_is_saved_under_its_plain_names(tmp_path, wrapper):
    model, plan = converted()
    plain = copy.deepcopy(model)
    folder = save_converted(WRAPPERS[wrapper](model), plan, tmp_path / "out")
    assert same_states(load_converted(folder), plain)
    assert torch.equal(outputs(load_converted(folder)), outputs(plain))


def test_a_wrapped_model_is_loaded_verified_and_folded(tmp_path):
    model, plan = converted()
    folder = save_converted(model, plan, tmp_path / "out")
    wrapped = nn.DataParallel(network())
    assert load_converted(folder, model=wrapped) is wrapped
    assert problems(verify_folder(folder, model=nn.DataParallel(network()))) == []
    assert same_states(wrapped.module, model)
    assert dcls_convert.fold_to_dense_(wrapped) == len(plan.layers)
    assert wrapped.module._model_args["plan"]["folded"]


REFUSED = {
    "inside": (
        lambda m, p: (nn.ModuleDict({"ema": m}), p),
        r"layer1\.0\.conv1: the model has no such layer\. .* give model\.get_submodule\('ema'\)",
    ),
    "plan of a folded network": (
        lambda m, p: (m, replace(p, folded=True)),
        r"layer1\.0\.conv1: is of class DclsConv2d\. .*replace\(plan, folded=False\)",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_are_not_the_plans_are_refused_with_the_way_out(tmp_path, kind):
    change, message = REFUSED[kind]
    model, plan = change(*converted(tie="stage"))
    with pytest.raises(DclsConvertError, match=message):
        save_converted(model, plan, tmp_path / "out", check=False)
    assert list(tmp_path.iterdir()) == []


# ConvNeXt's extractor has other names; EfficientNet is its own.
@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet"])
def test_a_feature_extractor_of_a_folder_is_saved_and_loaded_as_one(tmp_path, name):
    model = timm.create_model(name)
    plan = convert_(model, init="random", dilated_size="+4").plan
    folder = save_converted(model, plan, tmp_path / "out")
    features = by_timm(folder, features_only=True, out_indices=(0, 2), in_chans=1)
    with torch.no_grad():
        for parameter in features.parameters():
            parameter.mul_(0.9)
    tuned = save_converted(features, folder, tmp_path / "tuned")  # a warning would be an error
    again = save_converted(features, tuned, tmp_path / "again")
    expected = outputs(features, channels=1)
    assert len(expected) == 2
    for loaded in (load_converted(again), by_timm(tuned)):
        for new, old in zip(outputs(loaded, channels=1), expected, strict=True):
            assert torch.equal(new, old)
