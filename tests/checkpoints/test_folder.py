"""Checkpoint folders: whole or not at all, equal bytes for equal input, and loaded by timm without loss."""

import json
import shutil

import pytest
import timm
import torch
from safetensors import safe_open
from torch import nn

import dcls_convert
from dcls_convert import apply_plan_, find_convs, load_converted, plan_conversion, predict_report, save_converted
from dcls_convert.checkpoints.fingerprint import take_fingerprint
from dcls_convert.checkpoints.folder import FILES, check_output
from dcls_convert.checkpoints.stamp import tensors_hash
from dcls_convert.errors import CheckpointError
from dcls_convert.networks.source import ModelSource, build_model
from dcls_convert.planning.rules import builtin_rules, parse_rules

from ..conftest import TINY


def converted(name: str, size: int, init: str = "random", **args) -> tuple[nn.Module, dcls_convert.ConversionPlan]:
    source = ModelSource(name=name, args=args)
    model = build_model(source)
    plan = plan_conversion(find_convs(model, IMAGE_OF.get(name)), dilated_size=size, model=name, model_args=args)
    apply_plan_(model, plan, init=init, positions="uniform")
    return model.eval(), plan


IMAGE_OF = {"torchvision:shufflenet_v2_x0_5": (3, 64, 64), "torchvision:resnet18": (3, 64, 64)}
FAMILIES = [
    (f"timm:{TINY}", 17),
    ("timm:test_efficientnet", 9),
    ("timm:resnet18", 7),
    ("timm:coat_tiny", 9),  # modules that stand in several places
    ("torchvision:shufflenet_v2_x0_5", 9),
]


def outputs(model: nn.Module, channels: int = 3) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.randn(1, channels, 64, 64, generator=torch.Generator().manual_seed(0)))


def assert_equal_states(first: nn.Module, second: nn.Module) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("name", "size"), FAMILIES)
def test_loaded_model_is_the_saved_one(tmp_path, name, size):
    args = {"img_size": 64} if "coat" in name else {}
    model, plan = converted(name, size, **args)
    save_converted(model, plan, tmp_path / "out")
    loaded = load_converted(tmp_path / "out")
    assert_equal_states(loaded, model)
    assert torch.equal(outputs(loaded), outputs(model))
    by_timm = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert torch.equal(outputs(by_timm), outputs(model))
    assert not loaded.training


def test_folder_holds_what_the_design_says(tmp_path):
    model, plan = converted(f"timm:{TINY}", 17)
    folder = save_converted(model, plan, tmp_path / "deep" / "er" / "out")
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert list((tmp_path / "deep" / "er").iterdir()) == [folder]
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "dcls"
    assert config["model_args"]["base"] == f"timm:{TINY}"
    assert config["model_args"]["plan"] == json.loads((folder / "plan.json").read_text()) == plan.to_dict()
    assert config["pretrained_cfg"]["mean"] == list(model.pretrained_cfg["mean"])
    report = json.loads((folder / "report.json").read_text())
    assert report == predict_report(plan).with_output(".").to_dict()
    assert (folder / "rules.yaml").read_text() == builtin_rules()["depthwise"].read_text()
    card = (folder / "README.md").read_text()
    assert f"{report['params']['after']:,}" in card
    assert "timm.create_model(" in card
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        metadata = json.loads(file.metadata()["dcls_convert"])
        parameters = {name for name, _ in model.named_parameters()}
        counted = sum(file.get_tensor(name).numel() for name in parameters)
        hashed = tensors_hash((name, file.get_tensor(name)) for name in file.keys())
    assert names == set(model.state_dict())
    own = {"format": 1, "version": dcls_convert.__version__, "plan": plan.hash, "tensors": hashed}
    assert metadata == own | {"fingerprint": take_fingerprint(model, plan.input_size).to_dict()}
    assert counted == report["params"]["after"]


def test_convnext_tiny_has_the_same_parameters_in_report_model_and_file(tmp_path):
    model, plan = converted("timm:convnext_tiny", 17)
    report = dcls_convert.measure_report(model, plan)
    folder = save_converted(model, plan, tmp_path / "out", report=report)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        in_file = sum(file.get_tensor(name).numel() for name in file.keys())  # no buffers in ConvNeXt
    in_model = sum(p.numel() for p in model.parameters())
    assert report.params.after == in_model == in_file == 28_587_688


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(tmp_path, dtype):
    model, plan = converted(f"timm:{TINY}", 9)
    save_converted(model.to(dtype), plan, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}


def test_channels_last_weights_are_saved_and_loaded(tmp_path):
    model, plan = converted("timm:resnet18", 7)
    model = model.to(memory_format=torch.channels_last)
    save_converted(model, plan, tmp_path / "out")
    assert_equal_states(load_converted(tmp_path / "out"), model)


def test_timm_loads_with_another_head_and_other_input_channels(tmp_path):
    model, plan = converted(f"timm:{TINY}", 17)
    folder = f"local-dir:{save_converted(model, plan, tmp_path / 'out')}"
    fine = timm.create_model(folder, pretrained=True, num_classes=10, drop_path_rate=0.1)
    assert outputs(fine).shape == (1, 10)
    state = model.state_dict()
    changed = [key for key, value in fine.state_dict().items() if not torch.equal(state[key], value)]
    assert changed == ["head.fc.weight", "head.fc.bias"] or set(changed) == {"head.fc.weight", "head.fc.bias"}
    grey = timm.create_model(folder, pretrained=True, in_chans=1)
    assert outputs(grey, channels=1).shape == (1, 1000)
    torch.testing.assert_close(grey.stem[0].weight, model.stem[0].weight.sum(1, keepdim=True))
    headless = timm.create_model(folder, pretrained=True, num_classes=0)
    assert torch.equal(
        headless.forward_features(torch.ones(1, 3, 64, 64)), model.forward_features(torch.ones(1, 3, 64, 64))
    )


def test_a_model_built_with_arguments_is_rebuilt_with_them(tmp_path):
    model, plan = converted(f"timm:{TINY}", 9, num_classes=7, in_chans=1)
    assert plan.input_size[0] == 1
    folder = save_converted(model, plan, tmp_path / "out")
    assert torch.equal(outputs(load_converted(folder), 1), outputs(model, 1))
    by_timm = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(outputs(by_timm, 1), outputs(model, 1))
    assert by_timm.num_classes == 7


@pytest.mark.parametrize(
    ("name", "size"), [(TINY, 17), ("test_efficientnet", 9), ("resnet18", 7), ("mobilenetv3_small_050", 9)]
)
def test_features_only_gives_the_features_of_the_whole_model(tmp_path, name, size):
    model, plan = converted(f"timm:{name}", size)
    folder = f"local-dir:{save_converted(model, plan, tmp_path / 'out')}"
    features = timm.create_model(folder, pretrained=True, features_only=True)
    dense = timm.create_model(name, features_only=True).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        found, shapes = features.eval()(x), [tuple(f.shape) for f in dense(x)]
        wanted = model.forward_intermediates(x, intermediates_only=True)
    assert [tuple(f.shape) for f in found] == shapes
    assert torch.equal(found[-1], wanted[-1])
    first = timm.create_model(folder, pretrained=True, features_only=True, out_indices=(0, 1))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(first.eval()(x), found[:2], strict=True))


def test_same_input_gives_the_same_bytes(tmp_path):
    for name in ("first", "second"):
        model, plan = converted(f"timm:{TINY}", 17)
        save_converted(model, plan, tmp_path / name)
    for file in FILES:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_existing_folders_are_refused_and_replaced_on_demand_alone(tmp_path):
    model, plan = converted(f"timm:{TINY}", 9)
    folder = save_converted(model, plan, tmp_path / "out")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        save_converted(model, plan, folder)
    other, other_plan = converted(f"timm:{TINY}", 11)
    save_converted(other, other_plan, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() != before
    assert torch.equal(outputs(load_converted(folder)), outputs(other))
    (folder / "my_notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"my_notes\.txt"):
        save_converted(model, plan, folder, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("bug")])
def test_a_failure_leaves_nothing_behind_and_the_old_folder_untouched(tmp_path, monkeypatch, error):
    model, plan = converted(f"timm:{TINY}", 9)
    folder = save_converted(model, plan, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_args):
        raise error

    monkeypatch.setattr(dcls_convert.checkpoints.folder, "_model_card", fail)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        save_converted(model, plan, folder, force=True)
    with pytest.raises(expected):
        save_converted(model, plan, tmp_path / "new" / "out")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_module_of_the_users_own_needs_the_module_to_load(tmp_path):
    def build() -> nn.Module:
        return nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)])

    model = build()
    plan = plan_conversion(find_convs(model), dilated_size=5)
    apply_plan_(model, plan)
    folder = save_converted(model, plan, tmp_path / "out", report=predict_report(plan))
    with pytest.raises(CheckpointError, match="pass the unconverted one"):
        load_converted(folder)
    loaded = load_converted(folder, model=build())
    assert_equal_states(loaded, model)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f), "is not a folder"),
        (lambda f: (f / "plan.json").unlink(), r"plan\.json: cannot be read"),
        (lambda f: (f / "plan.json").write_text("{"), r"plan\.json"),
        (
            lambda f: (f / "plan.json").write_text(
                (f / "plan.json").read_text().replace("[\n        9,", "[\n        11,")
            ),
            "plan",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "no such file"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "not a readable",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a readable"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, damage, message):
    model, plan = converted(f"timm:{TINY}", 9)
    folder = save_converted(model, plan, tmp_path / "out")
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_converted(folder)
    assert "\n" not in str(caught.value)


def test_weights_of_another_plan_are_refused(tmp_path):
    folders = [save_converted(*converted(f"timm:{TINY}", size), tmp_path / str(size)) for size in (9, 11)]
    shutil.copy(folders[0] / "model.safetensors", folders[1])
    with pytest.raises(CheckpointError, match=r"was not written with the plan\.json beside it"):
        load_converted(folders[1])


def test_dcls_by_itself_is_no_model():
    with pytest.raises(ValueError, match="not a model by itself"):
        timm.create_model("dcls")


def test_output_in_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not a folder"):
        check_output(tmp_path / "file" / "out", force=False)


def test_rules_given_as_an_object_are_kept_in_the_folder(tmp_path):
    text = "# mine\nformat: 1\nrules:\n- match: {kind: depthwise}\n  dilated_kernel_size: 9\n"
    model = timm.create_model(TINY)
    report = dcls_convert.convert_(model, rules=parse_rules(text))
    folder = save_converted(model, report.plan, tmp_path / "out")
    assert (folder / "rules.yaml").read_text() == text
