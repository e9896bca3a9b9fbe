"""Damaged checkpoint folders: `verify` names the damage, and no wrong model is loaded silently."""

import copy
import json
import os

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from dcls_convert import (
    apply_plan_,
    convert_,
    find_convs,
    load_converted,
    plan_conversion,
    save_converted,
)
from dcls_convert.checkpoints.folder import CARD, CONFIG, REPORT, WEIGHTS, open_folder
from dcls_convert.checkpoints.verify import verify_folder as verify
from dcls_convert.errors import CheckpointError
from dcls_convert.export.fold import fold_folder

from ..command_line import run
from ..dispatch_modes import AllocatedMemory
from .folders import edit_json, edit_stamp, edit_tensors, outputs, problems, save, seal

POSITIONS = "stages.2.blocks.0.conv_dw.positions"  # shared by four layers
WEIGHT = "stages.1.blocks.0.conv_dw.weight"
CHANGED = "model.safetensors: its tensors differ from the tensors that were written"


def write_config(content):
    return lambda folder: (folder / CONFIG).write_bytes(content)


def damage_config(change):
    return lambda folder: edit_json(folder / CONFIG, change)


def damage_plan(change):
    return damage_config(lambda data: change(data["model_args"]["plan"]))


def damage_layer(index, **changes):
    return damage_plan(lambda plan: plan["layers"][index].update(changes))


def damage_tensors(change):
    return lambda folder: edit_tensors(folder, change)


def flip_bit(folder, index=-50_000):
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[index] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def set_value(name, index, value):
    def change(tensors):
        tensors[name].view(-1)[index] = value

    return change


def rename_weight(tensors):
    tensors["renamed"] = tensors.pop(WEIGHT)


def set_num_classes(count):
    def change(data):
        for args in (data["model_args"], data["model_args"]["plan"]["model_args"]):
            args["num_classes"] = count

    return damage_config(change)


# By name: the damage, and what `verify` must say about it. None of these folders can be loaded.
DAMAGES = {
    # Weights
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "model.safetensors: there is no such file",
    ),
    "cut off": (
        lambda folder: os.truncate(folder / WEIGHTS, 60_000),
        "model.safetensors: not a readable safetensors file",
    ),
    "outside the window": (
        damage_tensors(set_value(POSITIONS, 7, 14.0)),
        CHANGED,
        "has elements up to 10 cells outside of the window 9x9",
    ),
    "a tensor renamed": (
        damage_tensors(rename_weight),
        CHANGED,
        f"missing: {WEIGHT}; unexpected: renamed",
    ),
    "metadata of a newer format": (
        lambda folder: edit_stamp(folder, lambda stamp: stamp | {"format": 7}),
        "has format 7, but this dcls-convert reads format 2 at most; install a newer one",
    ),
    # Config and plan
    "no config": (lambda folder: (folder / CONFIG).unlink(), "config.json: cannot be read"),
    "a huge config": (
        lambda folder: os.truncate(folder / CONFIG, 100 << 20),
        "has 104,857,600 bytes",
    ),
    "config of deep lists": (write_config(b"[" * 100_000), "config.json: is not JSON"),
    "another count": (
        damage_layer(0, kernel_count=25),
        "stages.0.blocks.0.conv_dw.positions has shape",
    ),
    "a name with control characters": (
        damage_layer(0, names=["\x1b[31mred\nline"]),
        r"model: the plan does not fit timm:test_convnext: \x1b[31mred\nline: ",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_no_wrong_model_loads(folder, name):
    damage, *messages = DAMAGES[name]
    damage(folder)
    verified = verify(folder)
    assert not verified.ok
    for message in messages:
        assert any(message in line for line in problems(verified)), (
            f"{message!r} is not in {problems(verified)}"
        )
    with pytest.raises(CheckpointError) as refused:
        load_converted(folder)
    assert str(refused.value).isprintable()


# Other networks in a folder's place, which load. `verify` finds them by their outputs.
OTHER_NETWORKS = {
    "other arguments": damage_config(lambda c: c["model_args"].update(act_layer="relu")),
    "other weights": damage_tensors(set_value(WEIGHT, 0, 1e6)),
}


@pytest.mark.parametrize("name", OTHER_NETWORKS)
def test_another_network_in_a_folders_place_is_found_by_its_outputs(folder, name):
    OTHER_NETWORKS[name](folder)
    seal(folder)
    load_converted(folder)
    (problem,) = problems(verify(folder))
    assert problem.startswith("outputs: do not match the stored ones (difference")


def test_values_that_are_not_finite_are_found_even_if_the_hash_fits_them(folder):
    edit_tensors(folder, set_value(WEIGHT, 0, torch.nan))
    seal(folder)
    (problem,) = problems(verify(folder))
    assert problem == f"model: {WEIGHT} has 1 of 832 values that are NaN or infinite"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_layer(0, dilated_size=[9001, 9001]), "window 9001x9001 for "),
        (set_num_classes(900_000), "the model needs (900000,"),
        (set_num_classes(20_000_000), "num_classes is 20000000; at most 1,000,000 is allowed"),
        (
            damage_plan(lambda plan: plan.update(input_size=[3, 20001, 20001])),
            "images of more than 4,194,304",
        ),
    ],
)
def test_sizes_are_checked_before_they_take_memory(folder, damage, message):
    damage(folder)
    seal(folder)
    with AllocatedMemory() as memory:
        lines = problems(verify(folder))
    assert any(message in line for line in lines), lines
    assert sum(tensor.nbytes for tensor in memory.kept.values() if not tensor.is_meta) < 100 << 20


@pytest.mark.parametrize("kind", ["good", "gauss"])
def test_an_undamaged_folder_is_ok(folders, kind):
    verified = verify(folders / kind)
    assert problems(verified) == []
    assert {check.name: check.detail for check in verified.checks}["outputs"].startswith(
        "match the stored ones (difference 0.0e+00, "
    )


# --- What users may do to folders


def test_users_may_edit_preprocessing_labels_layout_report_card_and_other_files(folder, tmp_path):
    right = outputs(load_converted(folder))
    data = json.loads((folder / CONFIG).read_text())
    edits = {"mean": [0.1, 0.2, 0.3], "license": "mine", "label_names": ["cat", "dog"]}
    data["pretrained_cfg"] |= edits | {"url": "http://a.org"}
    data |= {"label_names": ["cat", "dog"], "num_features": None}
    (folder / CONFIG).write_text(json.dumps(dict(reversed(data.items())), indent=7) + "\r\n")
    (folder / REPORT).write_text("{}")
    (folder / CARD).unlink()
    (folder / "my notes\x1b.txt").write_text("mine")
    assert verify(folder).ok
    loaded = load_converted(folder)
    assert torch.equal(outputs(loaded), right)
    assert torch.equal(outputs(timm.create_model(f"local-dir:{folder}", pretrained=True)), right)
    # They stay with the loaded model.
    assert "a.org" not in str(loaded.pretrained_cfg["url"])
    save(tmp_path / "again", loaded, open_folder(folder).plan)
    saved = json.loads((tmp_path / "again" / CONFIG).read_text())["pretrained_cfg"]
    assert {name: saved[name] for name in edits} == edits


def fine_tuned(folder, **options):
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model.eval()


def test_what_timm_saves_after_fine_tuning_loads(folder, tmp_path):
    model = fine_tuned(folder, num_classes=5)
    save_for_hf(model, tmp_path / "tuned", safe_serialization=True)
    save_for_hf(model, folder, safe_serialization=True)  # over the folder that it came from
    for path in (tmp_path / "tuned", folder):
        by_timm = timm.create_model(f"local-dir:{path}", pretrained=True)
        for loaded in (by_timm, load_converted(path)):
            assert torch.equal(outputs(loaded), outputs(model))
        assert verify(path).ok
        assert problems(verify(path)) == [
            f"{WEIGHTS}: not checked: another program wrote it, without a hash",
            "outputs: not checked: none are stored",
        ]
    save_for_hf(model, tmp_path / "as torch.save does")  # timm's default
    assert torch.equal(outputs(load_converted(tmp_path / "as torch.save does")), outputs(model))


@pytest.mark.parametrize("place", ["num_classes", "pretrained_cfg.num_classes"])
@pytest.mark.parametrize("is_argument", [True, False])
def test_an_edited_number_of_classes_loads_no_random_head(folder, place, is_argument):
    right = outputs(load_converted(folder))
    *above, last = place.split(".")

    def edit(config):
        if is_argument:  # as of a network that was built with it
            config["model_args"]["num_classes"] = 1000
        for key in above:
            config = config[key]
        config[last] = 5

    edit_json(folder / CONFIG, edit)
    (problem,) = problems(verify(folder))
    assert problem == f"{CONFIG}: {place} is 5, but the network has 1,000 classes"
    name = f"local-dir:{folder}"
    if is_argument:
        assert torch.equal(outputs(timm.create_model(name, pretrained=True)), right)
    else:
        with pytest.raises(CheckpointError, match="size mismatch"):
            timm.create_model(name, pretrained=True)
    assert torch.equal(outputs(load_converted(folder)), right)
    assert timm.create_model(name, pretrained=True, num_classes=10).num_classes == 10


def test_a_head_of_timms_reset_classifier_is_saved_by_timm_and_loads(folder, tmp_path):
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    model.reset_classifier(5)
    save_for_hf(model, tmp_path / "reset", safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'reset'}", pretrained=True)
    assert torch.equal(outputs(loaded), outputs(model))
    assert verify(tmp_path / "reset").ok


def test_old_weights_are_not_loaded_for_a_new_config(folder):
    """timm prefers model.safetensors to the pytorch_model.bin that its saver writes by default."""
    save_for_hf(fine_tuned(folder), folder)
    for load in (
        load_converted,
        lambda path: timm.create_model(f"local-dir:{path}", pretrained=True),
    ):
        with pytest.raises(CheckpointError, match=r"another program wrote config"):
            load(folder)


def test_a_missing_tensor_is_noticed_with_a_new_head_too(folder, tmp_path):
    """If the number of classes differs, timm alone would keep random values for such tensors."""
    save_for_hf(fine_tuned(folder), tmp_path / "tuned", safe_serialization=True)
    name = f"local-dir:{tmp_path / 'tuned'}"
    timm.create_model(name, pretrained=True, num_classes=5)
    edit_tensors(tmp_path / "tuned", rename_weight)
    with pytest.raises(
        CheckpointError, match=f"lacks {WEIGHT} of the model that config.json describes"
    ):
        timm.create_model(name, pretrained=True, num_classes=5)


def test_a_model_that_only_its_user_can_build_is_ok_only_with_it(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4))
    unconverted = copy.deepcopy(model)
    plan = plan_conversion(find_convs(model, (3, 8, 8)), dilated_size=5)
    apply_plan_(model, plan)
    folder = save_converted(model, plan, tmp_path / "own")
    verified = verify(folder)
    assert verified.ok is None
    assert [check.name for check in verified.checks if check.ok is None] == ["model"]
    out, err = run("verify", folder, "--json", code=4)
    assert json.loads(out)["ok"] is None
    assert "not checked; name the unconverted network: --model package.module:factory" in err
    verified = verify(folder, model=unconverted)
    assert problems(verified) == []
    assert verified.ok
    assert "outputs" in {check.name for check in verified.checks}
    flip_bit(folder, -1)
    assert verify(folder).ok is False


def test_a_folder_for_timm_alone_is_checked(folder, tmp_path):
    fold_folder(folder, "timm", tmp_path / "stock")
    verified = verify(tmp_path / "stock")
    assert problems(verified) == []
    assert "outputs" in {check.name for check in verified.checks}
    flip_bit(tmp_path / "stock", -1)
    edit_json(tmp_path / "stock" / CONFIG, lambda c: c["model_args"].update(act_layer="relu"))
    failed = [check.name for check in verify(tmp_path / "stock").checks if check.ok is False]
    assert failed == [WEIGHTS, "outputs"]


# --- The command


def test_the_command_prints_all_checks(folder):
    out, _ = run("verify", folder)
    assert {line.split()[0] for line in out.splitlines()} == {"ok"}
    assert "match the stored ones (difference 0.0e+00, tolerance " in out
    DAMAGES["outside the window"][0](folder)
    out, err = run("verify", folder, "--json", code=2)
    data = json.loads(out)
    assert (data["format"], data["folder"], data["ok"]) == (1, str(folder), False)
    assert all(check.keys() == {"name", "ok", "detail"} for check in data["checks"])
    failed = {check["name"] for check in data["checks"] if check["ok"] is False}
    assert failed == {WEIGHTS, "model"}
    assert err.splitlines()[-1] == f"error: {folder}: 2 problems found"


def test_without_the_check_nothing_runs_and_the_folder_says_so(converted, tmp_path, monkeypatch):
    model, plan = converted
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", lambda *_: pytest.fail("must not run"))
        folder = save(tmp_path / "out", model, plan, check=False)
        verified = verify(folder)
    assert verified.ok
    assert problems(verified) == ["outputs: not checked: none are stored (saved with check=False)"]


class DrawsByItself(nn.Module):
    """Draws numbers that no seed of torch's or NumPy's decides."""

    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 3, padding=1))
        self.generator = torch.Generator()

    def forward(self, x):
        return self.convs(x) + torch.randn(3, 1, 1, generator=self.generator)


def test_outputs_that_differ_from_run_to_run_are_not_stored(tmp_path):
    model = DrawsByItself()
    report = convert_(model, dilated_size=5, input_size=(3, 16, 16), rules="conv3x3")
    save_converted(model, report.plan, tmp_path / "out")
    verified = verify(tmp_path / "out", model=DrawsByItself())
    assert verified.ok
    assert "its outputs differ from run to run" in verified.checks[-1].detail
