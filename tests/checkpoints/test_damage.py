"""Whatever happened to a checkpoint folder: `verify` says what, and nothing loads a wrong model in silence.

A row of the table is one kind of damage: what verify must say, and whether load_converted and timm still load the
right model or must refuse.
"""

import contextlib
import json
import os
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

import dcls_convert
from dcls_convert import apply_plan_, find_convs, load_converted, plan_conversion, save_converted
from dcls_convert.checkpoints.folder import CONFIG, FILES, REPORT, WEIGHTS, read_plan
from dcls_convert.checkpoints.stamp import METADATA_KEY
from dcls_convert.checkpoints.verify import rebuild_here, rebuild_in_fresh_process, verify_folder
from dcls_convert.errors import CheckpointError, DclsConvertError, ModelError
from dcls_convert.export.formats import fold_checkpoint
from dcls_convert.surgery.fold import fold_to_dense_

from ..forks import forked, little_memory
from .folders import contents, convert, edit_json, edit_stamp, edit_tensors, outputs, run, seal

CARD = "README.md"
POSITIONS = "stages.2.blocks.dcls_positions"  # shared by four layers
WEIGHT = "stages.1.blocks.0.conv_dw.weight"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A good folder, and others to mix it up with."""
    base = tmp_path_factory.mktemp("good")
    kinds = {"good": {}, "seed": {"seed": 5}, "size": {"size": 11}, "gauss": {"interpolation": "gaussian"}}
    for name, options in kinds.items():
        save_converted(*convert(**options), base / name)
    return base


@pytest.fixture(scope="session")
def right(folders):
    return outputs(load_converted(folders / "good"))


@pytest.fixture
def folder(folders, tmp_path):
    return Path(shutil.copytree(folders / "good", tmp_path / "damaged"))


def verify(folder):
    """Without a process of its own, which takes seconds."""
    return verify_folder(folder, rebuild=rebuild_here)


# --- Ways to damage a folder: functions of the folder and of those to mix it up with


def write(name, content):
    return lambda folder, _others: (folder / name).write_bytes(content)


def swapped(name, other):
    return lambda folder, others: shutil.copy(others / other / name, folder)


def config(change):
    return lambda folder, _others: edit_json(folder / CONFIG, change)


def planned(change):
    return config(lambda data: change(data["model_args"]["plan"]) and None)


def preprocessing(**changes):
    return config(lambda data: data["pretrained_cfg"].update(changes))


def tensors(change):
    return lambda folder, _others: edit_tensors(folder, change)


def stamp(change):
    return lambda folder, _others: edit_stamp(folder, change)


def flipped(place):
    def damage(folder, _others):
        data = bytearray((folder / WEIGHTS).read_bytes())
        data[place] ^= 1
        (folder / WEIGHTS).write_bytes(data)

    return damage


def cut(length):
    return lambda folder, _: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:length])


def gone(name):
    return lambda folder, _others: (folder / name).unlink()


def instead(name, make):
    def damage(folder, _others):
        (folder / name).unlink()
        make(folder / name)

    return damage


def fill(name, index, value):
    def change(tensors):
        tensors[name].view(-1)[index] = value

    return change


def moved(tensors):
    tensors["renamed"] = tensors.pop(WEIGHT)


def layer(index, **changes):
    return lambda plan: plan["layers"][index].update(changes)


def case(damage, *says, load=False, timm=False):
    """What verify says, and whether load_converted and timm still give the right model; else they must refuse."""
    return damage, says, load, timm


BOTH = {"load": True, "timm": True}
NEEDED = {WEIGHTS: {}, CONFIG: {}, REPORT: BOTH, CARD: BOTH}
UNREADABLE = "model.safetensors: not a readable safetensors file"
CHANGED = "model.safetensors: its tensors are not those that were written"
OTHER_PLAN = "model.safetensors: was not written with the plan in config.json"
OTHER_TEXT = "config.json: is not the text that was written"
LATER = "this dcls-convert knows 1 at most; upgrade it: pip install --upgrade dcls-convert"

CASES = {
    **{
        f"{what} {name}": case(damage(name), f"{name}: {says}", **uses)
        for name, uses in NEEDED.items()
        for what, damage, says in [
            ("no", gone, "there is no" if name == WEIGHTS else "cannot"),
            (
                "a folder for",
                lambda name: instead(name, Path.mkdir),
                "is not a file" if name == WEIGHTS else "cannot be read: is not a file",
            ),
            ("a link in a circle for", lambda name: instead(name, lambda path: path.symlink_to(path.name)), ""),
            ("not UTF-8 in", lambda name: write(name, b"\xff\xfe{\x00"), ""),
        ]
    },
    # The weights
    "empty": case(write(WEIGHTS, b""), UNREADABLE),
    "truncated": case(cut(-9), UNREADABLE),
    "huge header": case(write(WEIGHTS, struct.pack("<Q", 2**40) + b"{}"), UNREADABLE),
    "a flipped bit, at the end": case(flipped(-1), CHANGED),
    "a flipped bit, in the middle": case(flipped(-50_000), CHANGED),
    "weights of another seed": case(swapped(WEIGHTS, "seed"), "config.json states other tensors", OTHER_TEXT),
    "weights of another plan": case(swapped(WEIGHTS, "size"), OTHER_PLAN),
    "outside the window": case(
        tensors(fill(POSITIONS, 7, 4.5)),
        CHANGED,
        f"positions: {POSITIONS} has 1 of 1248 elements outside the window along axis 0, which goes from -4 to 4",
    ),
    "a tensor removed": case(
        tensors(lambda t: t.pop(WEIGHT)), CHANGED, f"model: does not fit the model: it lacks {WEIGHT}"
    ),
    "positions removed": case(
        tensors(lambda t: t.pop(POSITIONS)), CHANGED, f"positions: {POSITIONS} is missing", f"lacks {POSITIONS}"
    ),
    "a tensor renamed": case(tensors(moved), CHANGED, f"lacks {WEIGHT} and has renamed too many"),
    "positions in two places": case(
        tensors(lambda t: t.update({"stages.2.blocks.1.conv_dw.positions": t[POSITIONS].clone()})),
        CHANGED,
        "has stages.2.blocks.1.conv_dw.positions too many",
    ),
    "a tensor reshaped": case(
        tensors(lambda t: t.update({WEIGHT: t[WEIGHT].reshape(-1)})),
        CHANGED,
        f"model: {WEIGHT} has shape (832,), the model needs (32, 1, 26)",
    ),
    "a tensor in half precision": case(tensors(lambda t: t.update({WEIGHT: t[WEIGHT].half()})), CHANGED),
    "a tensor of integers": case(
        tensors(lambda t: t.update({WEIGHT: t[WEIGHT].int()})), CHANGED, f"{WEIGHT} is torch.int32"
    ),
    "positions in float8": case(
        tensors(lambda t: t.update({POSITIONS: t[POSITIONS].to(torch.float8_e4m3fn)})),
        CHANGED,
        f"positions: {POSITIONS} has shape",
    ),
    "no metadata": case(stamp(lambda _: None), "has no metadata of dcls-convert, but config.json states its tensors"),
    "metadata not JSON": case(stamp(lambda _: "{"), "metadata 'dcls_convert': is not JSON"),
    "metadata without hash": case(
        stamp(lambda s: {k: v for k, v in s.items() if k != "tensors"}), "metadata 'dcls_convert': tensors: "
    ),
    "metadata of a newer format": case(stamp(lambda s: s | {"format": 7}), f"has format 7, {LATER}"),
    "damaged outputs": case(
        stamp(lambda s: s | {"fingerprint": {"outputs": [3]}}), "metadata 'dcls_convert': fingerprint"
    ),
    "other plan hash": case(stamp(lambda s: s | {"plan": "0" * 64}), OTHER_PLAN),
    "other tensor hash": case(stamp(lambda s: s | {"tensors": "0" * 64}), CHANGED, "config.json states other tensors"),
    "other outputs": case(
        stamp(lambda s: s["fingerprint"]["outputs"][0].update(norm=1e3) or s), "outputs: differ by", **BOTH
    ),
    "outputs of another shape": case(
        stamp(lambda s: s["fingerprint"]["outputs"][0].update(shape=[1, 7]) or s), "outputs: differ by inf", **BOTH
    ),
    # The config, and the plan in it
    "config not JSON": case(write(CONFIG, b'{"architecture": '), "config.json: is not JSON"),
    "a huge config": case(
        lambda folder, _: os.truncate(folder / CONFIG, 100 << 20), "cannot be read: has 104,857,600 bytes"
    ),
    "a pipe for the config": case(instead(CONFIG, os.mkfifo), "config.json: cannot be read: is not a file"),
    "a device for the report": case(
        instead(REPORT, lambda path: path.symlink_to("/dev/zero")), "is not a file", **BOTH
    ),
    "a pipe for the weights": case(instead(WEIGHTS, os.mkfifo), "model.safetensors: is not a file"),
    "config a list": case(write(CONFIG, b"[1]"), "config.json: is a list, not an object"),
    "config of deep lists": case(write(CONFIG, b"[" * 100_000), "config.json: is not JSON"),
    "config of another plan": case(swapped(CONFIG, "size"), OTHER_PLAN, OTHER_TEXT),
    "no architecture": case(config(lambda c: c.pop("architecture") and None), "config.json: names no architecture"),
    "no arguments": case(config(lambda c: c.pop("model_args") and None), "config.json: model_args.plan: "),
    "other arguments": case(
        config(lambda c: c["model_args"].update(act_layer="relu")), "model_args.act_layer is 'relu'"
    ),
    "no hash": case(config(lambda c: c.pop(METADATA_KEY) and None), OTHER_TEXT, **BOTH),
    "another mean": case(preprocessing(mean=[0.1, 0.1, 0.1]), OTHER_TEXT, **BOTH),
    "another classifier": case(preprocessing(classifier="stem.0"), OTHER_TEXT, **BOTH),
    "labels shifted": case(preprocessing(label_offset=1), OTHER_TEXT, load=True),
    "an unknown field": case(preprocessing(novelty=1), OTHER_TEXT, load=True),
    "plan a list": case(config(lambda c: c["model_args"].update(plan=[])), "config.json: model_args.plan: "),
    "newer plan": case(planned(lambda p: p.update(format=2, novelty=1)), f"has format 2, {LATER}"),
    "count": case(planned(layer(0, kernel_count=25)), OTHER_PLAN, OTHER_TEXT),
    "count of one tied layer": case(
        planned(layer(2, kernel_count=25)), "tie group stages.1: its layers have 2 different"
    ),
    "even size": case(planned(layer(0, dilated_size=[10, 10])), "stages.0.blocks.0.conv_dw: window 10"),
    "tie group of a layer": case(planned(layer(1, tie_group="stages.9")), "the plan's tie groups are"),
    "owner": case(planned(lambda p: p["tie_groups"][0].update(owner="stages")), OTHER_PLAN),
    "rules": case(planned(lambda p: p.update(rules_text="mine")), OTHER_PLAN),
    # The report
    "a count in the report": case(
        lambda f, _: edit_json(f / REPORT, lambda r: r["params"].update(after=3)),
        "report.json: is not the text",
        **BOTH,
    ),
    "report cut": case(write(REPORT, b"{}"), "report.json: is not the text that was written", **BOTH),
}


def lines(found):
    return [f"{check.name}: {check.detail}" for check in found.checks if check.ok is not True]


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named_and_no_wrong_model_loads(folder, folders, right, name):
    damage, says, *right_by = CASES[name]
    damage(folder, folders)
    found = verify(folder)
    for part in says:
        assert any(part in line for line in lines(found)), f"{part!r} is not in {lines(found)}"
    assert not found.ok
    by_timm = (lambda: timm.create_model(f"local-dir:{folder}", pretrained=True)), Exception, r"(?s)."  # or timm's own
    ours = (lambda: load_converted(folder)), CheckpointError, r"^[^\n]+$"
    for is_right, (load, error, message) in zip(right_by, (ours, by_timm), strict=True):
        if is_right:
            assert torch.equal(outputs(load()), right)
        else:
            with pytest.raises(error, match=message):
                load()


@pytest.mark.parametrize("kind", ["good", "gauss", "size"])
def test_an_undamaged_folder_is_ok(folders, kind):
    found = verify(folders / kind)
    assert all(check.ok for check in found.checks), lines(found)
    assert {check.name: check.detail for check in found.checks}["outputs"].startswith("differ by 0.0e+00")


WRONG_VALUES = [0, -1, None, "", 10**30, [], [0, 0], [-1, 3], [10**12, 10**12], True, {}, 1.5, "a.b"]


def places(data, path=()):
    """Paths to all values of a plan; of lists, to the last entry."""
    yield path
    last = data.items() if isinstance(data, dict) else list(enumerate(data))[-1:] if isinstance(data, list) else ()
    for key, value in last:
        yield from places(value, (*path, key))


def test_a_config_with_any_wrong_value_is_refused_or_consistent_and_no_bug(folders):
    text = (folders / "good" / CONFIG).read_text()
    for *above, last in (path for path in places(json.loads(text)) if path):
        for value in WRONG_VALUES:
            data = json.loads(text)
            inner = data
            for key in above:
                inner = inner[key]
            inner[last] = value
            with contextlib.suppress(DclsConvertError):
                dcls_convert.checkpoints.folder.parse_config(json.dumps(data), "config.json")


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("good", fill(WEIGHT, 0, torch.nan), f"values: {WEIGHT} has 1 of 832 values that are NaN or infinite"),
        ("good", fill("head.fc.bias", 0, -torch.inf), "values: head.fc.bias has 1 of 1000 values that are"),
        ("good", fill(POSITIONS, -1, -4.01), "outside the window along axis 1"),
        ("good", fill(WEIGHT, 0, 1e6), "outputs: differ by"),
        ("good", lambda t: t.pop(WEIGHT), f"lacks {WEIGHT}"),
        ("gauss", fill("stages.2.blocks.dcls_sigma", 0, 0.2), "has 1 of 1728 sigmas below 0.27 cells, the minimum"),
    ],
)
def test_values_are_looked_at_where_the_folder_says_that_they_were_written_so(folders, tmp_path, kind, change, says):
    folder = Path(shutil.copytree(folders / kind, tmp_path / "sealed"))
    edit_tensors(folder, change)
    seal(folder)
    found = verify(folder)
    assert next(check for check in found.checks if check.name == WEIGHTS).ok
    assert any(says in line for line in lines(found)), lines(found)


def classes(count):
    def change(data):
        for args in (data["model_args"], data["model_args"]["plan"]["model_args"]):
            args["num_classes"] = count

    return change


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda data: data["model_args"]["plan"]["layers"][0].update(dilated_size=[9001, 9001]),
            "window 9001x9001 for ",
        ),
        (classes(20_000_000), "the model needs (20000000, "),
        (lambda data: data["model_args"]["plan"].update(input_size=[3, 20001, 20001]), "images of more than 4,194,304"),
    ],
)
def test_sizes_are_checked_before_they_take_memory(folder, change, says):
    edit_json(folder / CONFIG, change)
    seal(folder)

    def looked():
        torch.set_num_threads(1)
        little_memory(1 << 20)
        return lines(verify(folder))

    found = forked(looked)
    assert any(says in line for line in found), found


def test_classes_are_bounded_through_timm_too(folder):
    edit_json(folder / CONFIG, classes(20_000_000))
    seal(folder)
    with pytest.raises(ModelError, match=r"^config.json: num_classes=20000000: through timm, 1,000,000 is the most$"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_a_misfit_is_one_line_through_timm_too(folder):
    edit_tensors(folder, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].reshape(-1)}))
    seal(folder)
    with pytest.raises(CheckpointError, match=r"^model.safetensors: [^\n]* has shape \(832,\), the model needs"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_messages_are_one_printable_line_whatever_names_a_plan_has(folder):
    def rename(config):
        config["model_args"]["plan"]["layers"][0]["names"] = ["\x1b[31mred\nline"]

    edit_json(folder / CONFIG, rename)
    seal(folder)
    with pytest.raises(DclsConvertError, match=r"the plan does not fit .*: \\x1b\[31mred\\nline: ") as refused:
        load_converted(folder)
    assert str(refused.value).isprintable()


def test_all_problems_are_listed(folder, folders):
    for name in (f"no {CARD}", "a count in the report", "outside the window", "another mean"):
        CASES[name][0](folder, folders)
    found = lines(verify(folder))
    for part in (f"{CARD}: ", f"{REPORT}: ", "outside", OTHER_TEXT):
        assert any(part in line for line in found), part


def test_foreign_files_and_an_edited_card_are_no_problem(folder):
    (folder / "my notes\x1b.txt").write_text("mine")
    (folder / CARD).write_text("My own words.")
    found = verify(folder)
    assert found.ok
    assert any(r"note: my notes\x1b.txt not of dcls-convert" in check.detail for check in found.checks)


def test_links_to_the_files_are_as_good_as_the_files(folder, tmp_path, right):
    (tmp_path / "cache").mkdir()
    for name in FILES:  # as in the cache of the hub
        (folder / name).rename(tmp_path / "cache" / name)
        (folder / name).symlink_to(tmp_path / "cache" / name)
    assert verify(folder).ok
    assert torch.equal(outputs(load_converted(folder)), right)


# --- What users do to folders, and may


def fine_tuned(folder, **options):
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model.eval()


@pytest.mark.parametrize("classes", [None, 5])
def test_what_timm_saves_after_fine_tuning_loads(folder, tmp_path, classes):
    model = fine_tuned(folder, num_classes=classes)
    save_for_hf(model, tmp_path / "tuned", safe_serialization=True)
    save_for_hf(model, folder, safe_serialization=True)  # over the folder that it came from
    for path in (tmp_path / "tuned", folder):
        assert torch.equal(outputs(timm.create_model(f"local-dir:{path}", pretrained=True)), outputs(model))
        assert torch.equal(outputs(load_converted(path)), outputs(model))


def test_old_weights_are_not_loaded_for_a_new_config(folder):
    """timm prefers model.safetensors to the pytorch_model.bin that its saver writes by default."""
    save_for_hf(fine_tuned(folder, num_classes=5), folder)
    for load in (load_converted, lambda path: timm.create_model(f"local-dir:{path}", pretrained=True)):
        with pytest.raises(CheckpointError, match="model_args"):
            load(folder)


@pytest.mark.parametrize("options", [{"num_classes": 5}, {"num_classes": 0}])
def test_a_lost_tensor_is_missed_with_a_new_head_too(folder, tmp_path, options):
    """timm loads what there is as soon as the number of classes differs, and keeps random values for the rest."""
    save_for_hf(fine_tuned(folder), tmp_path / "tuned", safe_serialization=True)
    name = f"local-dir:{tmp_path / 'tuned'}"
    timm.create_model(name, pretrained=True, **options)
    tensors, _ = contents(tmp_path / "tuned" / WEIGHTS)
    moved(tensors)
    save_file(tensors, tmp_path / "tuned" / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"lacks {WEIGHT} of the model that config.json describes"):
        timm.create_model(name, pretrained=True, **options)


@pytest.mark.parametrize("options", [{"features_only": True}, {"num_classes": 3}, {"in_chans": 1}])
def test_damage_is_noticed_whatever_timm_is_asked_for(folder, folders, options):
    name = f"local-dir:{folder}"
    timm.create_model(name, pretrained=True, **options)
    CASES["a flipped bit, in the middle"][0](folder, folders)
    with pytest.raises(CheckpointError, match="not those that were written"):
        timm.create_model(name, pretrained=True, **options)


def test_an_edited_classifier_does_not_lose_a_layer(folder, folders):
    """timm drops the weights of what the config calls the classifier where the number of classes differs."""
    stem = load_converted(folder).stem[0].weight
    CASES["another classifier"][0](folder, folders)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=5)
    assert torch.equal(model.stem[0].weight, stem)


def hub_cache(folder, tmp_path):
    """The folder as the hub's cache holds it, under the name me/mine."""
    revision = "0" * 40
    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / revision
    (snapshot.parent.parent / "refs").mkdir(parents=True)
    (snapshot.parent.parent / "refs" / "main").write_text(revision)
    return Path(shutil.copytree(folder, snapshot))


def test_a_folder_in_the_hubs_cache_is_checked(folder, folders, tmp_path):
    snapshot = hub_cache(folder, tmp_path)
    create = {"pretrained": True, "cache_dir": tmp_path / "hub"}
    assert torch.equal(outputs(timm.create_model("hf-hub:me/mine", **create)), outputs(load_converted(folder)))
    for name in ("config of another plan", "other arguments", "a flipped bit, at the end", "weights of another seed"):
        shutil.copytree(folder, snapshot, dirs_exist_ok=True)
        CASES[name][0](snapshot, folders)
        with pytest.raises(CheckpointError):
            timm.create_model("hf-hub:me/mine", **create)


def test_a_model_that_only_its_user_can_build_is_checked_as_far_as_that_goes(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *[nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)])
    plan = plan_conversion(find_convs(model, (3, 8, 8)), dilated_size=5)
    apply_plan_(model, plan)
    folder = save_converted(model, plan, tmp_path / "own")
    found = verify(folder)
    assert found.ok
    assert [check.name for check in found.checks if check.ok is None] == ["model"]
    flipped(-1)(folder, None)
    assert not verify(folder).ok
    with pytest.raises(CheckpointError, match="not those that were written"):
        load_converted(folder, model=model)


def test_folded_folders_are_checked(folder, tmp_path):
    model, plan = load_converted(folder), replace(read_plan(folder), folded=True)
    fold_to_dense_(model)
    save_converted(model, plan, tmp_path / "folded")
    fold_checkpoint(folder, "timm", tmp_path / "stock")
    assert not (tmp_path / "stock" / REPORT).exists()
    for name in ("folded", "stock"):
        found = verify(tmp_path / name)
        assert all(check.ok for check in found.checks), lines(found)
        assert "outputs" in {check.name for check in found.checks}
        flipped(-1)(tmp_path / name, None)
        assert any(CHANGED in line for line in lines(verify(tmp_path / name)))
    edit_json(tmp_path / "stock" / CONFIG, lambda c: c["model_args"].update(act_layer="relu"))
    assert any(line.startswith("outputs: differ by") for line in lines(verify(tmp_path / "stock")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_compared_in_theirs(tmp_path, dtype):
    model, plan = convert()
    found = verify(save_converted(model.to(dtype), plan, tmp_path / "out"))
    assert found.ok, lines(found)
    (detail,) = [check.detail for check in found.checks if check.name == "outputs"]
    assert detail.startswith("differ by 0.0e+00 ")
    assert detail.endswith(f"rounding in {str(dtype)[6:]}")


# --- The command, with its fresh process


@pytest.mark.processes
def test_the_command_rebuilds_in_a_process_of_its_own(folder, capsys):
    run("verify", folder, code=0)
    out, err = capsys.readouterr()
    assert err == ""
    assert {line.split()[0] for line in out.splitlines()} == {"ok"}
    assert "differ by 0.0e+00 of the stored norm" in out


@pytest.mark.processes
def test_the_command_names_damage_and_ends_with_2(folder, folders, capsys):
    CASES["outside the window"][0](folder, folders)
    run("verify", folder, "--json", code=2)
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (data["format"], data["folder"], data["ok"]) == (1, str(folder), False)
    assert all(check.keys() == {"name", "ok", "detail"} for check in data["checks"])
    assert {check["name"] for check in data["checks"] if check["ok"] is False} == {WEIGHTS, "positions"}
    assert err == f"error: {folder}: 2 problems found\n"
    CASES["metadata of a newer format"][0](folder, folders)
    run("verify", folder, code=2)
    out, err = capsys.readouterr()
    marks = {name: mark for mark, name, *_ in map(str.split, out.splitlines()) if mark != "ok"}
    assert marks == {WEIGHTS: "problem", "model": "skipped"}


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_what_is_no_folder(tmp_path, capsys, command):
    (tmp_path / "file").write_text("")
    for name in ("file", "nothing"):
        run(command, tmp_path / name, "--json", code=2)
        assert capsys.readouterr() == ("", f"error: {tmp_path / name}: is not a folder\n")


OWN_MODULE = """
print("this is progress")
from torch import nn

def build():
    convs = [nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *convs)
"""
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.processes
def test_models_of_the_users_own_are_built_from_the_current_folder_if_trusted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mymodel_v.py").write_text(OWN_MODULE)
    Path("random.py").write_text("raise ImportError('not the random module that is meant')")
    run("mymodel_v:build", "--dilated-size", "5", "--input-size", "3x8x8", "--quiet", "--output", "out", code=0)
    sys.modules.pop("mymodel_v")
    capsys.readouterr()
    run("verify", "out", "--trust-code", "--json", code=0)
    checks = {check["name"]: check["ok"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert (checks["model"], checks["outputs"]) == (True, True)
    Path("mymodel_v.py").write_text(KILLED)
    run("verify", "out", "--trust-code", code=2)
    assert "the process that rebuilt it was ended by signal 9" in capsys.readouterr().out
    run("verify", "out", "--json", code=0)  # which does not run it
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["model"]["ok"] is None
    assert "--trust-code" in checks["model"]["detail"]


def test_a_model_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("endless_v.py").write_text("import time\n\ndef build():\n    time.sleep(600)\n")
    model, plan = convert()
    folder = save_converted(model, replace(plan, model="endless_v:build"), "out", fingerprint=False)
    (found,) = rebuild_in_fresh_process(folder, True, seconds=0.2)
    assert (found.name, found.ok) == ("model", False)
    assert "took more than 0.2 s" in found.detail


def test_without_a_fingerprint_nothing_runs(tmp_path, monkeypatch):
    model, plan = convert()
    report = dcls_convert.predict_report(plan)
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", lambda *_: pytest.fail("must not run"))
        folder = save_converted(model, plan, tmp_path / "out", report=report, fingerprint=False)
    found = verify(folder)
    assert found.ok
    assert [check.name for check in found.checks if check.ok is None] == ["outputs"]
