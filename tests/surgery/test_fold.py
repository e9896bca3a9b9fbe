"""A folded model gives the outputs of the model that it was made from: in place, in folders, and in other formats."""

import copy
import io
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.utils import ModelEmaV3, reparameterize_model
from torch import nn

import dcls_convert.export
from dcls_convert import (
    apply_plan_,
    convert_,
    find_convs,
    fold_to_dense_,
    load_converted,
    measure_report,
    plan_conversion,
    predict_report,
    save_converted,
)
from dcls_convert.checkpoints.folder import CARD, CONFIG, FILES, REPORT, WEIGHTS
from dcls_convert.errors import DclsConvertError
from dcls_convert.export.formats import fold_checkpoint
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.networks.outputs import relative_error
from dcls_convert.planning.rules import parse_rules
from dcls_convert.surgery.fold import REPARAMETERIZING, FoldFirst

from ..cli.test_bad_input import snapshot
from ..conftest import TINY

FLOAT64_ERROR = 1e-12  # relative: some thousand roundings of 2e-16
FLOAT32_ERROR = 1e-5  # relative: other kernels, other orders of summation
IMAGE = (3, 32, 32)
LATE_STAGES = """
format: 1
rules:
- match: {stage: 'stages.[23]', kind: depthwise}
  dilated_kernel_size: 9
- match: {stage: stages.1, kind: depthwise}
  dilated_kernel_size: 11
"""


def trained(model, seed=0):
    """Positions anywhere in the window, no layer scale of 1e-6, other weights and statistics than at the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
                tensor.copy_(drawn.abs() + 0.5 if "running_var" in name else tensor + 0.2 * drawn)
    return model.eval()


def outputs(model, size=IMAGE, batch=2):
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return model(
            torch.randn(batch, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        )


def positions_in(model):
    return [name for name in model.state_dict() if "dcls_" in name or "positions" in name]


def tiny(**options):
    """A converted model and its plan."""
    model = timm.create_model(TINY)
    report = convert_(model, input_size=IMAGE, init="random", positions="uniform", **{"dilated_size": 9, **options})
    return trained(model), report.plan


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by name; not to be written to."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_converted(*tiny(), folder / "convnext")
    model = timm.create_model("test_efficientnet")
    plan = convert_(model, dilated_size=9, input_size=IMAGE, init="random").plan
    save_converted(trained(model), plan, folder / "efficientnet")
    before = snapshot(folder)
    yield folder
    assert snapshot(folder) == before


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# In place.


class Stage(nn.Module):
    def __init__(self, dims):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first = conv(4, 4, 3, padding=1, stride=2, groups=4)
        self.others = nn.Sequential(conv(4, 4, 3, padding="same", groups=4, bias=False), nn.Tanh())
        self.last = conv(4, 4, 3, padding=1, groups=4, padding_mode="circular")

    def forward(self, x):
        return self.last(self.others(self.first(x)))


@pytest.mark.parametrize("interpolation", ["bilinear", "triangle", "gaussian"])
@pytest.mark.parametrize("tie", ["stage", "none"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_folding_and_a_folded_plan_keep_outputs_and_books(dims, tie, interpolation):
    size = (4, 17, 16, 15)[: dims + 1]
    model = nn.Sequential(nn.Sequential(Stage(dims), Stage(dims)), nn.Tanh()).double()
    source = copy.deepcopy(model)
    plan = plan_conversion(find_convs(model, size), dilated_size=7, tie=tie, interpolation=interpolation)
    assert bool(plan.tie_groups) is (tie == "stage")
    apply_plan_(model, plan, init="random", positions="uniform")
    wanted = outputs(trained(model), size)
    assert fold_to_dense_(model) == 6
    assert relative_error(wanted, outputs(model, size)) < FLOAT64_ERROR
    assert not positions_in(model)
    folded_plan = replace(plan, folded=True)
    apply_plan_(source, folded_plan)
    source.load_state_dict(model.state_dict())
    assert torch.equal(outputs(source.eval(), size), outputs(model, size))
    report = measure_report(model, folded_plan)
    assert report == predict_report(folded_plan) == measure_report(source, folded_plan)
    assert report.params.after == sum(p.numel() for p in model.parameters())
    assert report.params.positions == 0
    assert report.params.weights == 6 * 4 * 7**dims
    assert report.macs == predict_report(plan).macs


def test_a_folded_plan_works_on_the_meta_device():
    _, plan = tiny()
    with torch.device("meta"):
        model = timm.create_model(TINY)
    apply_plan_(model, replace(plan, folded=True))
    assert not any(isinstance(module, DclsConvNd) for module in model.modules())
    assert model.stages[0].blocks[0].conv_dw.weight.shape == (24, 1, 9, 9)
    assert all(p.is_meta for p in model.parameters())


def test_timms_saver_writes_a_folded_model_that_timm_loads(tmp_path):
    model, _ = tiny()
    wanted = outputs(model)
    save_for_hf(model, tmp_path / "before", safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'before'}", pretrained=True).eval()
    for number, folded in enumerate([model, loaded]):
        fold_to_dense_(folded)
        save_for_hf(folded, tmp_path / str(number), safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path / str(number)}", pretrained=True)
        assert not positions_in(again)
        assert torch.equal(outputs(again.eval()), outputs(folded))
        assert relative_error(wanted, outputs(again)) < FLOAT32_ERROR


# By timm's function.


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "through",
    [lambda m: m, copy.deepcopy, through_pickle, through_torch, lambda m: ModelEmaV3(m).module, nn.Sequential],
    ids=["itself", "deepcopy", "pickle", "torch.save", "ema", "in another module"],
)
@pytest.mark.parametrize("inplace", [True, False])
def test_reparameterize_model_folds_all(through, inplace):
    model, _ = tiny()
    model.double()
    wanted, names = outputs(model), positions_in(model)
    carried = through(model)
    folded = reparameterize_model(carried, inplace=inplace)
    assert names
    assert not positions_in(folded)
    assert not any(isinstance(module, DclsConvNd) for module in folded.modules())
    assert relative_error(wanted, outputs(folded.eval())) < FLOAT64_ERROR
    assert hooked(folded) in ([], [""])  # timm does not call its argument's own
    if not inplace:
        assert torch.equal(outputs(carried.eval()), wanted)
    if through not in (nn.Sequential,) and carried is not model:
        assert positions_in(model) == names
        assert torch.equal(outputs(model), wanted)


def hooked(model):
    return [
        name
        for name, module in model.named_modules()
        if any(isinstance(vars(module).get(hook), FoldFirst) for hook in REPARAMETERIZING)
    ]


def test_what_timm_calls_stands_on_the_model_and_its_children_and_goes_with_folding():
    model, _ = tiny()
    assert hooked(model) == ["", "stages"]
    assert "reparameterize" not in str(model.state_dict().keys())
    fold_to_dense_(model)
    assert hooked(model) == []
    assert not hasattr(model, "reparameterize")


def test_a_part_copied_alone_folds_itself_alone():
    model, _ = tiny()
    part = copy.deepcopy(model.stages)
    part.reparameterize()
    assert not any(isinstance(module, DclsConvNd) for module in part.modules())
    assert sum(isinstance(module, DclsConvNd) for module in model.modules()) == 9


def test_timm_fuses_the_rest_of_its_own_models_too():
    model = timm.create_model("repvgg_a0")
    convert_(model, dilated_size=7, input_size=IMAGE, init="random")
    trained(model).double()
    wanted = outputs(model)
    folded = reparameterize_model(model)
    assert not positions_in(folded)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert relative_error(wanted, outputs(folded)) < FLOAT64_ERROR


class Fusable(nn.Sequential):
    """A convolution and its scale, which timm's function fuses by a method of the class."""

    def __init__(self, name):
        super().__init__(nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Conv2d(3, 3, 3, padding=1, groups=3))
        self.scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale

    def fuse(self):
        last = copy.deepcopy(self[1])
        last.weight.data *= self.scale  # of a kernel; of a few elements it would be so too, but not their shape
        last.bias.data *= self.scale
        assert type(last) is nn.Conv2d
        return nn.Sequential(self[0], last)


def test_a_fuse_of_the_class_gets_plain_convolutions():
    model = nn.Sequential(Fusable("a"), Fusable("b")).double()
    model[1].scale = 3.0
    convert_(model, dilated_size=5, input_size=IMAGE)
    wanted = outputs(trained(model))
    folded = reparameterize_model(model)
    assert not any(isinstance(module, Fusable) for module in folded.modules())
    assert relative_error(wanted, outputs(folded)) < FLOAT64_ERROR


def test_positions_tied_across_the_models_children_go_with_the_last_layer():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 3, groups=3)), nn.Sequential(nn.Conv2d(3, 3, 3, groups=3)))
    plan = plan_conversion(find_convs(nn.Sequential(model), IMAGE), dilated_size=5)
    (group,) = plan.tie_groups
    model = nn.Sequential(model)
    apply_plan_(model, replace(plan, tie_groups=(replace(group, owner=""),)))
    model = model.double()
    wanted = outputs(trained(model))
    assert positions_in(model) == ["dcls_positions"]
    assert fold_to_dense_(model[0][0]) == 1
    assert positions_in(model) == ["dcls_positions"]
    assert relative_error(wanted, outputs(model)) < FLOAT64_ERROR
    assert not positions_in(reparameterize_model(model, inplace=True))
    assert relative_error(wanted, outputs(model)) < FLOAT64_ERROR


def test_a_layer_that_also_stands_elsewhere_keeps_its_positions():
    blocks = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1, groups=3) for _ in range(2)])
    model = nn.Sequential(nn.Sequential(blocks), nn.Sequential(nn.Tanh())).double()
    convert_(model, dilated_size=5, input_size=IMAGE)
    model[1].append(model[0][0][1])
    wanted = outputs(trained(model))
    folded = reparameterize_model(model)
    assert not any(isinstance(module, DclsConvNd) for module in folded.modules())
    assert relative_error(wanted, outputs(folded)) < FLOAT64_ERROR


def test_compiled_whole_with_what_timm_calls_in_place():
    model, _ = tiny()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert relative_error(outputs(model), outputs(compiled)) < FLOAT32_ERROR


# Folders.

STOCK_TIMM = """
import sys

sys.modules["dcls_convert"] = None  # as where it is not installed
try:
    import dcls_convert
except ImportError:
    pass
else:
    sys.exit("dcls_convert can be imported")

import timm
import torch

torch.set_num_threads(1)
model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
assert not timm.is_model("dcls_convert")
with torch.no_grad():
    torch.save(model(torch.load("images.pt")), "outputs.pt")
"""


def by_stock_timm(folder, images):
    """Outputs of the folder's model in a process that has timm and torch, but not this package."""
    torch.save(images, "images.pt")
    code = STOCK_TIMM.format(folder=folder)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load("outputs.pt")


def test_stock_timm_loads_a_folded_convnext(checkpoints):
    found = fold_checkpoint(checkpoints / "convnext", "timm")
    assert (found.kind, found.output, found.kernel_args) == ("stock timm", "convnext-folded", {"kernel_sizes": 9})
    folder = Path("convnext-folded")
    assert {path.name for path in folder.iterdir()} == {CONFIG, WEIGHTS, CARD}
    images = torch.randn(2, *IMAGE)
    original = load_converted(checkpoints / "convnext")
    with torch.no_grad():
        wanted = original(images)
    assert relative_error(wanted, by_stock_timm(folder.resolve(), images)) < FLOAT32_ERROR
    card = (folder / CARD).read_text()
    assert "folded" in card
    assert "import dcls_convert" not in card
    assert f"{found.params_after:,}" in card
    assert found.params_before == sum(p.numel() for p in original.parameters())
    config = json.loads((folder / CONFIG).read_text())
    assert (config["architecture"], config["model_args"]) == (TINY, {"kernel_sizes": 9})
    assert config["pretrained_cfg"] == json.loads((checkpoints / "convnext" / CONFIG).read_text())["pretrained_cfg"]


def test_stock_timm_gets_a_size_a_stage_and_the_models_own_arguments(tmp_path):
    model = timm.create_model(TINY, num_classes=7, in_chans=1)
    plan = convert_(model, rules=parse_rules(LATE_STAGES), input_size=(1, 32, 32)).plan
    save_converted(trained(model), plan, tmp_path / "in")
    found = fold_checkpoint(tmp_path / "in", "timm", tmp_path / "out")
    assert (found.kind, found.kernel_args) == ("stock timm", {"kernel_sizes": [7, 11, 9, 9]})
    loaded = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert outputs(loaded, (1, 32, 32)).shape == (2, 7)
    assert relative_error(outputs(model, (1, 32, 32)), outputs(loaded, (1, 32, 32))) < FLOAT32_ERROR


@pytest.mark.parametrize("window", [9, 3])
def test_windows_of_the_kernels_size_need_no_argument(tmp_path, window):
    model = timm.create_model("test_resnet")
    plan = convert_(model, dilated_size=window, input_size=IMAGE, init="random").plan
    save_converted(trained(model), plan, tmp_path / "in")
    found = fold_checkpoint(tmp_path / "in", "timm", tmp_path / "out")
    assert (found.kind, found.kernel_args) == (("stock timm", {}) if window == 3 else ("dcls", None))


def test_shapes_that_fit_are_not_enough_for_stock_timm(tmp_path, monkeypatch, checkpoints):
    """What timm makes of the folder is run: here it is another network of the same shapes."""
    load = dcls_convert.export.stock_timm.load_as_timm_does

    def another_network(folder):
        model = load(folder)
        model.stages[1].blocks[0].gamma.data.mul_(2)
        return model

    monkeypatch.setattr(dcls_convert.export.stock_timm, "load_as_timm_does", another_network)
    found = fold_checkpoint(checkpoints / "convnext", "timm", tmp_path / "out")
    assert found.kind == "dcls"
    assert "kernel_sizes=9: the outputs' relative error is" in found.note
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(FILES)


def test_other_architectures_become_a_folded_checkpoint(tmp_path, checkpoints):
    found = fold_checkpoint(checkpoints / "efficientnet", "timm", tmp_path / "out")
    assert found.kind == "dcls"
    assert "stem_kernel_size" in found.note
    original = load_converted(checkpoints / "efficientnet")
    loaded = load_converted(tmp_path / "out")
    by_timm = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    for model in (loaded, by_timm):
        assert not any(isinstance(module, DclsConvNd) for module in model.modules())
        assert relative_error(outputs(original), outputs(model)) < FLOAT32_ERROR
    plan = dcls_convert.checkpoints.folder.read_plan(tmp_path / "out")
    assert plan.folded
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report == predict_report(plan).with_output(".").to_dict()
    assert report["folded"] is True
    assert report["params"]["after"] == found.params_after == sum(p.numel() for p in loaded.parameters())
    assert report["params"]["positions"] == 0
    card = (tmp_path / "out" / CARD).read_text()
    assert "The model is folded" in card
    assert "positions," not in card.partition("## Loading")[0].partition("| total |")[2]


def test_features_of_a_folded_checkpoint(tmp_path, checkpoints):
    fold_checkpoint(checkpoints / "efficientnet", "timm", tmp_path / "out")
    features, wanted = (
        timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True).eval()
        for folder in (tmp_path / "out", checkpoints / "efficientnet")
    )
    assert not any(isinstance(module, DclsConvNd) for module in features.modules())
    assert relative_error(outputs(wanted), outputs(features)) < FLOAT32_ERROR


def test_folders_of_both_kinds_are_replaced_by_force(tmp_path, checkpoints):
    for first, second in [("convnext", "efficientnet"), ("efficientnet", "convnext")]:
        fold_checkpoint(checkpoints / first, "timm", tmp_path / first)
        with pytest.raises(DclsConvertError, match="already exists"):
            fold_checkpoint(checkpoints / second, "timm", tmp_path / first)
        kind = fold_checkpoint(checkpoints / second, "timm", tmp_path / first, force=True).kind
        assert (kind == "stock timm") is (second == "convnext")
        assert (tmp_path / first / REPORT).exists() is (second == "efficientnet")
    assert {path.name for path in tmp_path.iterdir()} == {"convnext", "efficientnet"}


def test_a_folder_of_weights_by_another_program_is_not_replaced(tmp_path, checkpoints):
    save_for_hf(timm.create_model(TINY), tmp_path / "out", safe_serialization=True)
    before = snapshot(tmp_path)
    with pytest.raises(DclsConvertError, match="is not of this program"):
        fold_checkpoint(checkpoints / "convnext", "timm", tmp_path / "out", force=True)
    assert snapshot(tmp_path) == before
