"""Damaged checkpoint folders: `verify` names the damage, and no wrong model is loaded silently."""

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from dcls_convert import apply_plan_, find_convs, load_converted, plan_conversion, save_converted
from dcls_convert.checkpoints.folder import CARD, CONFIG, REPORT, WEIGHTS, open_checkpoint
from dcls_convert.checkpoints.verify import verify_folder as verify
from dcls_convert.errors import CheckpointError, DclsConvertError, ModelError
from dcls_convert.export.fold import fold_checkpoint
from dcls_convert.placing.fold import fold_to_dense_

from ..command_line import run
from .damages import (
    CHANGED,
    DAMAGES,
    OTHER_NETWORKS,
    WEIGHT,
    damage_config,
    damage_layer,
    damage_plan,
    flip_bit,
    rename_weight,
    set_value,
)
from .folders import (
    MemoryUse,
    edit_json,
    edit_tensors,
    outputs,
    problems,
    save,
    seal,
)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_no_wrong_model_loads(folder, folders, name):
    damage, *messages = DAMAGES[name]
    damage(folder, folders)
    verified = verify(folder)
    assert not verified.ok
    for message in messages:
        assert any(message in line for line in problems(verified)), (
            f"{message!r} is not in {problems(verified)}"
        )
    with pytest.raises(CheckpointError, match=r"^[^\n]+$"):
        load_converted(folder)


@pytest.mark.parametrize("name", OTHER_NETWORKS)
def test_another_network_in_a_folders_place_is_found_by_its_outputs(folder, name):
    OTHER_NETWORKS[name](folder, None)
    seal(folder)
    load_converted(folder)
    (problem,) = problems(verify(folder))
    assert problem.startswith("outputs: do not match the stored ones (difference")


@pytest.mark.parametrize("kind", ["good", "gauss"])
def test_an_undamaged_folder_is_ok(folders, kind):
    verified = verify(folders / kind)
    assert problems(verified) == []
    assert {check.name: check.detail for check in verified.checks}["outputs"].startswith(
        "match the stored ones (difference 0.0e+00, "
    )


def test_users_may_edit_preprocessing_labels_layout_report_card_and_other_files(folder):
    right = outputs(load_converted(folder))
    data = json.loads((folder / CONFIG).read_text())
    data["pretrained_cfg"] |= {"mean": [0.5] * 3, "license": "mine", "label_names": ["cat", "dog"]}
    data |= {"label_names": ["cat", "dog"], "num_features": None}
    (folder / CONFIG).write_text(json.dumps(dict(reversed(data.items())), indent=7) + "\r\n")
    (folder / REPORT).write_text("{}")
    (folder / CARD).unlink()
    (folder / "my notes\x1b.txt").write_text("mine")
    assert verify(folder).ok
    assert torch.equal(outputs(load_converted(folder)), right)
    assert torch.equal(outputs(timm.create_model(f"local-dir:{folder}", pretrained=True)), right)


def test_a_folders_preprocessing_and_labels_stay_with_the_loaded_model(folder, tmp_path):
    edits = {"mean": [0.1, 0.2, 0.3], "license": "mine", "label_names": ["cat", "dog"]}
    edit_json(folder / CONFIG, lambda c: c["pretrained_cfg"].update(edits, url="http://a.org"))
    model = load_converted(folder)
    assert "a.org" not in str(model.pretrained_cfg["url"])
    save(tmp_path / "again", model, open_checkpoint(folder).plan)
    saved = json.loads((tmp_path / "again" / CONFIG).read_text())["pretrained_cfg"]
    assert {name: saved[name] for name in edits} == edits


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "good",
            set_value(WEIGHT, 0, torch.nan),
            f"model: {WEIGHT} has 1 of 832 values that are NaN or infinite",
        ),
        (
            "gauss",
            set_value("stages.2.blocks.0.conv_dw.positions", 0, -9.0),
            "has elements up to 5 cells outside of the window 9x9, so they are of a larger window",
        ),
    ],
)
def test_wrong_values_are_found_even_if_the_hash_fits_them(
    folders, tmp_path, kind, change, message
):
    folder = Path(shutil.copytree(folders / kind, tmp_path / "sealed"))
    edit_tensors(folder, change)
    seal(folder)
    verified = verify(folder)
    assert next(check for check in verified.checks if check.name == WEIGHTS).ok
    assert any(message in line for line in problems(verified)), problems(verified)


def set_num_classes(count):
    def change(data):
        for args in (data["model_args"], data["model_args"]["plan"]["model_args"]):
            args["num_classes"] = count

    return damage_config(change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_layer(0, dilated_size=[9001, 9001]), "window 9001x9001 for "),
        (set_num_classes(900_000), "the model needs (900000,"),
        (
            damage_plan(lambda plan: plan.update(input_size=[3, 20001, 20001])),
            "images of more than 4,194,304",
        ),
    ],
)
def test_sizes_are_checked_before_they_take_memory(folder, damage, message):
    damage(folder, None)
    seal(folder)
    with MemoryUse() as memory:
        lines = problems(verify(folder))
    assert any(message in line for line in lines), lines
    assert memory.upper_bound < 100 << 20


def test_so_many_classes_that_timm_would_take_much_memory_are_refused(folder):
    set_num_classes(20_000_000)(folder, None)
    seal(folder)
    message = "argument num_classes is 20000000; at most 1,000,000 is allowed"
    with pytest.raises(ModelError, match=message):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_messages_are_one_printable_line_whatever_names_a_plan_has(folder):
    damage_layer(0, names=["\x1b[31mred\nline"])(folder, None)
    seal(folder)
    with pytest.raises(
        DclsConvertError, match=r"the plan does not fit .*: \\x1b\[31mred\\nline: "
    ) as refused:
        load_converted(folder)
    assert str(refused.value).isprintable()


# --- What users may do to folders


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
        assert torch.equal(
            outputs(timm.create_model(f"local-dir:{path}", pretrained=True)), outputs(model)
        )
        assert torch.equal(outputs(load_converted(path)), outputs(model))
        (skipped, outputs_too) = problems(verify(path))
        assert skipped == f"{WEIGHTS}: not checked: another program wrote it, without a hash"
        assert outputs_too == "outputs: not checked: none are stored"


def test_what_timm_saves_by_default_loads(folder, tmp_path):
    """That is a file of torch.save."""
    model = fine_tuned(folder)
    save_for_hf(model, tmp_path / "tuned")
    assert torch.equal(outputs(load_converted(tmp_path / "tuned")), outputs(model))


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


def test_a_model_that_only_its_user_can_build_is_checked_without_or_with_it(tmp_path):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), *[nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)]
    )
    unconverted = copy.deepcopy(model)
    plan = plan_conversion(find_convs(model, (3, 8, 8)), dilated_size=5)
    apply_plan_(model, plan)
    folder = save_converted(model, plan, tmp_path / "own")
    verified = verify(folder)
    assert verified.ok
    assert [check.name for check in verified.checks if check.ok is None] == ["model"]
    verified = verify(folder, model=copy.deepcopy(unconverted))
    assert problems(verified) == []
    assert "outputs" in {check.name for check in verified.checks}
    flip_bit(-1)(folder, None)
    assert not verify(folder).ok
    with pytest.raises(CheckpointError, match="not those that were written"):
        load_converted(folder, model=model)


def test_folders_of_folded_models_are_checked(converted, folder, tmp_path):
    model, plan = converted
    fold_to_dense_(model)
    save(tmp_path / "folded", model, replace(plan, folded=True))
    fold_checkpoint(folder, "timm", tmp_path / "stock")
    for name in ("folded", "stock"):
        verified = verify(tmp_path / name)
        assert problems(verified) == []
        assert "outputs" in {check.name for check in verified.checks}
        flip_bit(-1)(tmp_path / name, None)
        assert any(CHANGED in line for line in problems(verify(tmp_path / name)))
    edit_json(tmp_path / "stock" / CONFIG, lambda c: c["model_args"].update(act_layer="relu"))
    assert {"outputs", WEIGHTS} == {
        line.partition(":")[0] for line in problems(verify(tmp_path / "stock"))
    }


# --- The command


def test_the_command_prints_all_checks(folder, folders):
    out, err = run("verify", folder / "nothing", "--json", code=2)
    assert err.startswith(f"error: {folder / 'nothing'}: is not a folder")
    line = err.removeprefix("error: ").strip()
    assert json.loads(out) == {"error": line, "kind": "checkpoint", "exit_code": 2}
    out, err = run("verify", folder)
    assert err == ""
    assert {line.split()[0] for line in out.splitlines()} == {"ok"}
    assert "match the stored ones (difference 0.0e+00, tolerance " in out
    DAMAGES["outside the window"][0](folder, folders)
    out, err = run("verify", folder, "--json", code=2)
    data = json.loads(out)
    assert (data["format"], data["folder"], data["ok"]) == (1, str(folder), False)
    assert all(check.keys() == {"name", "ok", "detail"} for check in data["checks"])
    failed = {check["name"] for check in data["checks"] if check["ok"] is False}
    assert failed == {WEIGHTS, "model"}
    assert err == f"error: {folder}: 2 problems found\n"
    DAMAGES["metadata of a newer format"][0](folder, folders)
    out, _ = run("verify", folder, code=2)
    assert [line.split()[:3] for line in out.splitlines()] == [["problem", "files", f"{WEIGHTS}:"]]


OWN_MODULE = """
print("this is progress")
from torch import nn

def build():
    convs = [nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *convs)
"""


@pytest.mark.processes
def test_models_of_the_users_own_are_built_from_the_current_folder_if_trusted(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("mymodel_v.py").write_text(OWN_MODULE)
    Path("random.py").write_text("raise ImportError('not the random module that is meant')")
    run(
        "mymodel_v:build",
        "--dilated-size",
        "5",
        "--input-size",
        "3x8x8",
        "--quiet",
        "--output",
        "out",
    )
    sys.modules.pop("mymodel_v")
    checks = json.loads(run("verify", "out", "--trust-code", "--json")[0])["checks"]
    assert {"model", "outputs"} <= {check["name"] for check in checks if check["ok"]}
    out, _ = run("verify", "out", "--json")  # does not run the user's code
    (model,) = [check for check in json.loads(out)["checks"] if check["name"] == "model"]
    assert model["ok"] is None
    assert "--trust-code" in model["detail"]


def test_without_the_check_nothing_runs_and_the_folder_says_so(converted, tmp_path, monkeypatch):
    model, plan = converted
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", lambda *_: pytest.fail("must not run"))
        folder = save(tmp_path / "out", model, plan, check=False)
        verified = verify(folder)
    assert verified.ok
    assert problems(verified) == ["outputs: not checked: none are stored (saved with check=False)"]
