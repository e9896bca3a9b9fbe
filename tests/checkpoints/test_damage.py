"""Whatever happened to a checkpoint folder: `verify` says what, and nothing loads a wrong model in silence.

A row of the table is one kind of damage: what verify must say, and whether load_converted and timm still load the
right model or must refuse.
"""

import contextlib
import errno
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

import dcls_convert
from dcls_convert import apply_plan_, find_convs, load_converted, plan_conversion, save_converted
from dcls_convert.checkpoints.fingerprint import take_fingerprint
from dcls_convert.checkpoints.folder import FILES
from dcls_convert.checkpoints.rebuild import rebuild_checks
from dcls_convert.checkpoints.stamp import METADATA_KEY, read_stamp, tensors_hash
from dcls_convert.checkpoints.verify import verify_folder
from dcls_convert.cli.app import main
from dcls_convert.errors import CheckpointError, DclsConvertError
from dcls_convert.networks.source import ModelSource, build_model
from dcls_convert.planning.plan import check_plan, plan_from_json
from dcls_convert.surgery.fold import fold_to_dense_

from ..conftest import TINY

WEIGHTS, CONFIG, PLAN, RULES, REPORT, CARD = FILES
POSITIONS = "stages.2.blocks.dcls_positions"  # shared by four layers
WEIGHT = "stages.1.blocks.0.conv_dw.weight"
IMAGE = (3, 64, 64)


def convert(size=9, seed=0, **options):
    source = ModelSource(name=f"timm:{TINY}")
    model = build_model(source, seed=seed)
    plan = plan_conversion(find_convs(model, IMAGE), dilated_size=size, model=source.name, **options)
    apply_plan_(model, plan, init="random", generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # or ConvNeXt's output hardly depends on its blocks: layer scale starts at 1e-6
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.uniform_(0.5, 1, generator=generator)
    return model.eval(), plan


def outputs(model):
    with torch.no_grad():
        return model.eval()(torch.randn(1, *IMAGE, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A good folder, and others to mix it up with."""
    base = tmp_path_factory.mktemp("good")
    for name, options in {
        "good": {},
        "seed": {"seed": 5},
        "size": {"size": 11},
        "gauss": {"interpolation": "gaussian"},
    }.items():
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
    return verify_folder(folder, rebuild=rebuild_checks)


# --- Ways to damage a folder: functions of the folder and of those to mix it up with


def text(name, old, new):
    def damage(folder, _others):
        path = folder / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return damage


def write(name, content):
    return lambda folder, _others: (folder / name).write_bytes(content)


def swapped(name, other):
    return lambda folder, others: shutil.copy(others / other / name, folder)


def edited(name, change):
    """`change` edits the parsed JSON in place, or gives another."""

    def damage(folder, _others):
        data = json.loads((folder / name).read_text())
        data = change(data) or data
        (folder / name).write_text(json.dumps(data))

    return damage


def replan(change):
    """As a plan edited in both places, so that it is not noticed by comparing them."""

    def damage(folder, others):
        edited(PLAN, change)(folder, others)
        edited(CONFIG, lambda config: change(config["model_args"]["plan"]) and None)(folder, others)

    return damage


def retensored(change, *, seal=False):
    """`change` edits the tensors in place. With a seal, the folder then says that they were written so."""

    def damage(folder, _others):
        tensors, metadata = contents(folder / WEIGHTS)
        change(tensors)
        if seal:
            stamp = json.loads(metadata[METADATA_KEY]) | {"tensors": tensors_hash(tensors.items())}
            metadata = {METADATA_KEY: json.dumps(stamp)}
            edited(CONFIG, lambda config: config[METADATA_KEY].update(tensors=stamp["tensors"]))(folder, _others)
        save_file(tensors, folder / WEIGHTS, metadata=metadata)

    return damage


def restamped(change):
    """`change` takes the stamp and gives another, or a text, or None for no metadata."""

    def damage(folder, _others):
        tensors, metadata = contents(folder / WEIGHTS)
        stamp = change(json.loads(metadata[METADATA_KEY]))
        new = None if stamp is None else {METADATA_KEY: stamp if isinstance(stamp, str) else json.dumps(stamp)}
        save_file(tensors, folder / WEIGHTS, metadata=new)

    return damage


def contents(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()


def flipped(place):
    def damage(folder, _others):
        data = bytearray((folder / WEIGHTS).read_bytes())
        data[place] ^= 1
        (folder / WEIGHTS).write_bytes(data)

    return damage


def cut(length):
    return lambda folder, _: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:length])


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


@dataclass(frozen=True)
class Case:
    damage: Callable
    says: tuple[str, ...]  # of verify
    load: bool  # whether load_converted still gives the right model; else it must refuse
    timm: bool


def case(damage, *says, load=False, timm=False):
    return Case(damage, says, load, timm)


BOTH = {"load": True, "timm": True}
NEEDED_BY = {WEIGHTS: {}, CONFIG: {"load": True}, PLAN: {"timm": True}, RULES: BOTH, REPORT: BOTH, CARD: BOTH}
CHANGED = "tensors: are not those that were written"
OTHER_PLAN = "model.safetensors: was not written with the plan.json beside it"
ONLY_PLAN = {"timm": True}  # timm reads the plan from config.json
ONLY_CONFIG = {"load": True}
LATER = "this dcls-convert knows 1 at most; upgrade it: pip install --upgrade dcls-convert"

CASES = {
    **{
        f"no {name}": case(lambda f, _, n=name: (f / n).unlink(), f"{name}: is missing", **uses)
        for name, uses in NEEDED_BY.items()
    },
    **{
        f"empty {name}": case(
            write(name, b""),
            f"{name}: is empty" if name != RULES else "rules.yaml: is not the text in plan.json",
            **uses,
        )
        for name, uses in NEEDED_BY.items()
    },
    **{
        f"a folder for {name}": case(instead(name, Path.mkdir), f"{name}: is not a file", **uses)
        for name, uses in NEEDED_BY.items()
    },
    **{
        f"a link in a circle for {name}": case(
            instead(name, lambda p: p.symlink_to(p.name)), f"{name}: is a link that leads nowhere", **uses
        )
        for name, uses in NEEDED_BY.items()
    },
    **{
        f"not UTF-8 in {name}": case(write(name, b"\xff\xfe{\x00"), f"{name}: cannot be read: 'utf-8' codec", **uses)
        for name, uses in NEEDED_BY.items()
        if name != WEIGHTS
    },
    # The weights
    "truncated": case(cut(-9), "model.safetensors: not a readable safetensors file"),
    "cut in the header": case(cut(100), "model.safetensors: not a readable safetensors file"),
    "cut to 3 bytes": case(cut(3), "model.safetensors: not a readable safetensors file"),
    "huge header": case(
        write(WEIGHTS, struct.pack("<Q", 2**40) + b"{}"), "model.safetensors: not a readable safetensors file"
    ),
    "text for weights": case(
        write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "not a readable safetensors file"
    ),
    "a flipped bit, last byte": case(flipped(-1), CHANGED),
    "a flipped bit, in the middle": case(flipped(-50_000), CHANGED),
    "tensors of another seed": case(
        lambda f, o: save_file(contents(o / "seed" / WEIGHTS)[0], f / WEIGHTS, metadata=contents(f / WEIGHTS)[1]),
        CHANGED,
    ),
    "weights of another seed": case(
        swapped(WEIGHTS, "seed"), "is of another folder, with the same plan: config.json states other tensors"
    ),
    "weights of another plan": case(swapped(WEIGHTS, "size"), OTHER_PLAN),
    "NaN": case(retensored(fill(WEIGHT, 3, torch.nan)), CHANGED, f"values: {WEIGHT} has 1 of 832 values that are NaN"),
    "infinite": case(
        retensored(fill(WEIGHT, 3, torch.inf)), CHANGED, f"values: {WEIGHT} has 1 of 832 values that are infinite"
    ),
    "outside the window": case(
        retensored(fill(POSITIONS, 7, 4.5)),
        CHANGED,
        f"positions: {POSITIONS} has 1 of 1248 elements outside the window along axis 0, "
        "which goes from -4 to 4; the furthest is at 4.5",
    ),
    "a tensor removed": case(
        retensored(lambda t: t.pop(WEIGHT)), CHANGED, f"model: model.safetensors lacks {WEIGHT} of the rebuilt model"
    ),
    "positions removed": case(
        retensored(lambda t: t.pop(POSITIONS)),
        CHANGED,
        f"positions: {POSITIONS} is missing, the positions of stages.2",
        f"lacks {POSITIONS}",
    ),
    "a tensor added": case(
        retensored(lambda t: t.update(extra=torch.ones(2))), CHANGED, "has extra, which the rebuilt model has not"
    ),
    "a tensor renamed": case(retensored(moved), CHANGED, f"lacks {WEIGHT} of", "has renamed, which"),
    "positions in two places": case(
        retensored(lambda t: t.update({"stages.2.blocks.1.conv_dw.positions": t[POSITIONS].clone()})),
        CHANGED,
        "has stages.2.blocks.1.conv_dw.positions, which",
    ),
    "a tensor reshaped": case(
        retensored(lambda t: t.update({WEIGHT: t[WEIGHT].reshape(-1)})),
        CHANGED,
        f"model: {WEIGHT} has shape (832,), the rebuilt model needs (32, 1, 26)",
    ),
    "positions reshaped": case(
        retensored(lambda t: t.update({POSITIONS: t[POSITIONS][..., 1:].clone()})),
        CHANGED,
        f"positions: {POSITIONS} has shape (2, 48, 1, 25)",
    ),
    "a tensor in half precision": case(retensored(lambda t: t.update({WEIGHT: t[WEIGHT].half()})), CHANGED),
    "a tensor of integers": case(
        retensored(lambda t: t.update({WEIGHT: t[WEIGHT].int()})), CHANGED, f"{WEIGHT} is torch.int32"
    ),
    "no metadata": case(
        restamped(lambda _: None), "has no metadata of dcls-convert", "tensors: not checked", **ONLY_PLAN
    ),
    "metadata not JSON": case(restamped(lambda _: "{"), "metadata 'dcls_convert' is not JSON"),
    "metadata a list": case(restamped(lambda _: []), "states no format"),
    "metadata without hash": case(
        restamped(lambda s: {k: v for k, v in s.items() if k != "tensors"}), "has no valid 'tensors'"
    ),
    "metadata of a newer format": case(restamped(lambda s: s | {"format": 7}), f"has format 7, {LATER}"),
    "other plan hash": case(restamped(lambda s: s | {"plan": "0" * 64}), OTHER_PLAN),
    "other tensor hash": case(
        restamped(lambda s: s | {"tensors": "0" * 64}), CHANGED, "config.json states other tensors"
    ),
    "other outputs": case(
        restamped(lambda s: s["fingerprint"]["outputs"][0].update(norm=1e3) or s), "outputs: differ by", **BOTH
    ),
    "outputs of another shape": case(
        restamped(lambda s: s["fingerprint"]["outputs"][0].update(shape=[1, 7]) or s), "outputs: differ by inf", **BOTH
    ),
    "damaged outputs": case(
        restamped(lambda s: s | {"fingerprint": {"outputs": [3]}}),
        "outputs: its fingerprint of the outputs is damaged",
        **BOTH,
    ),
    # plan.json
    "plan of another folder": case(swapped(PLAN, "size"), OTHER_PLAN, "config.json: model_args.plan", **ONLY_PLAN),
    "plan not JSON": case(write(PLAN, b"{"), "plan.json: Invalid JSON", **ONLY_PLAN),
    "plan of deep lists": case(write(PLAN, b"[" * 100_000), "plan.json: ", **ONLY_PLAN),
    "plan a list": case(write(PLAN, b"[]"), "plan.json: Input should be an object", **ONLY_PLAN),
    "newer plan": case(
        edited(PLAN, lambda p: p.update(format=2, novelty=1)), f"plan.json: has format 2, {LATER}", **ONLY_PLAN
    ),
    "count": case(
        edited(PLAN, layer(0, kernel_count=25)),
        OTHER_PLAN,
        "report.json: layers.0.kernel_count is 26, plan.json gives 25",
        **ONLY_PLAN,
    ),
    "no groups": case(edited(PLAN, layer(0, groups=0)), "plan.json: stages.0.blocks.0.conv_dw: ", **ONLY_PLAN),
    "count of one tied layer": case(
        edited(PLAN, layer(2, kernel_count=25)),
        "plan.json: tie group stages.1: its layers have 2 different shapes",
        **ONLY_PLAN,
    ),
    "impossible count": case(
        edited(PLAN, layer(0, kernel_count=0)),
        "plan.json: stages.0.blocks.0.conv_dw: kernel count 0 must be from 1",
        **ONLY_PLAN,
    ),
    "size": case(edited(PLAN, layer(0, dilated_size=[11, 11])), OTHER_PLAN, **ONLY_PLAN),
    "even size": case(
        edited(PLAN, layer(0, dilated_size=[10, 10])), "plan.json: stages.0.blocks.0.conv_dw: window 10", **ONLY_PLAN
    ),
    "tie group of a layer": case(
        edited(PLAN, layer(1, tie_group="stages.9")), "plan.json: the plan's tie groups are", **ONLY_PLAN
    ),
    "tie group gone": case(
        edited(PLAN, lambda p: p["tie_groups"].pop() and None), "plan.json: the plan's tie groups are", **ONLY_PLAN
    ),
    "owner": case(edited(PLAN, lambda p: p["tie_groups"][0].update(owner="stages.2")), OTHER_PLAN, **ONLY_PLAN),
    "name": case(edited(PLAN, layer(0, names=["stem.0"])), OTHER_PLAN, **ONLY_PLAN),
    "model": case(
        edited(PLAN, lambda p: p.update(model="timm:resnet18")), OTHER_PLAN, "config.json: model_args.base", **ONLY_PLAN
    ),
    "parameters": case(
        edited(PLAN, lambda p: p.update(params=1)), OTHER_PLAN, "report.json: params.before", **ONLY_PLAN
    ),
    "count, everywhere": case(replan(layer(0, kernel_count=25)), OTHER_PLAN),
    "owner, everywhere": case(replan(lambda p: p["tie_groups"][0].update(owner="stages")), OTHER_PLAN),
    # config.json
    "config of another folder": case(
        swapped(CONFIG, "size"), "config.json: model_args.plan.layers.0.dilated_size.0 is 11", **ONLY_CONFIG
    ),  # with the very same tensors
    "config of another seed": case(swapped(CONFIG, "seed"), "config.json states other tensors"),
    "config not JSON": case(write(CONFIG, b'{"architecture": '), "config.json: is not JSON", **ONLY_CONFIG),
    "config a list": case(write(CONFIG, b"[1]"), "config.json: is a list, not an object", **ONLY_CONFIG),
    "config of deep lists": case(write(CONFIG, b"[" * 100_000), "config.json: is not JSON", **ONLY_CONFIG),
    "other architecture": case(
        edited(CONFIG, lambda c: c.update(architecture=TINY)),
        f"config.json: its architecture is '{TINY}', not 'dcls'",
        **ONLY_CONFIG,
    ),
    "no architecture": case(
        edited(CONFIG, lambda c: c.pop("architecture") and None), "its architecture is None", **ONLY_CONFIG
    ),
    "other base": case(
        edited(CONFIG, lambda c: c["model_args"].update(base="timm:test_convnext2")),
        "config.json: model_args.base is 'timm:test_convnext2'",
        "timm: ",
        **ONLY_CONFIG,
    ),
    "other base, and in its plan": case(
        edited(
            CONFIG, lambda c: c["model_args"].update(base="timm:x", plan=c["model_args"]["plan"] | {"model": "timm:x"})
        ),
        "model_args.base is 'timm:x'",
        "timm: ",
        **ONLY_CONFIG,
    ),
    "other arguments": case(
        edited(CONFIG, lambda c: c["model_args"].update(act_layer="relu")),
        "config.json: model_args.act_layer is 'relu'",
        "timm: config.json: model_args.act_layer",
        **ONLY_CONFIG,
    ),
    "no arguments": case(
        edited(CONFIG, lambda c: c.pop("model_args") and None),
        "config.json: model_args is None",
        "timm: ",
        **ONLY_CONFIG,
    ),
    "other number of classes": case(edited(CONFIG, lambda c: c.update(num_classes=7)), "timm: ", **ONLY_CONFIG),
    "labels shifted": case(
        edited(CONFIG, lambda c: c["pretrained_cfg"].update(label_offset=1)), "timm: ", **ONLY_CONFIG
    ),
    # The rest
    "rules": case(text(RULES, "\n", "\n# mine\n"), "rules.yaml: is not the text in plan.json", **BOTH),
    "report": case(
        text(REPORT, '"format": 1', '"format": 1, "more": 2'), "report.json: more is 2, plan.json gives None", **BOTH
    ),
    "a count in the report": case(
        edited(REPORT, lambda r: r["params"].update(after=3)), "report.json: params.after is 3, plan.json gives", **BOTH
    ),
    "newer report": case(edited(REPORT, lambda r: r.update(format=2)), f"report.json: has format 2, {LATER}", **BOTH),
    "report not JSON": case(write(REPORT, b"nope"), "report.json: is not JSON", **BOTH),
}


def lines(found):
    return [f"{check.name}: {check.detail}" for check in found.checks if check.ok is not True]


def clear(error):
    """Something a user can act on: said in words, by this package in one line."""
    if isinstance(error, DclsConvertError):
        return "\n" not in str(error)
    return isinstance(error, TypeError | KeyError) or str(error).strip()


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named_and_no_wrong_model_loads(folder, folders, right, name):
    this = CASES[name]
    this.damage(folder, folders)
    found = verify(folder)
    for part in this.says:
        assert any(part in line for line in lines(found)), f"{part!r} is not in {lines(found)}"
    assert not found.ok
    if this.load:
        assert torch.equal(outputs(load_converted(folder)), right)
    else:
        with pytest.raises(CheckpointError) as refusal:
            load_converted(folder)
        assert clear(refusal.value)
    if this.timm:
        assert torch.equal(outputs(timm.create_model(f"local-dir:{folder}", pretrained=True)), right)
    else:
        with pytest.raises(Exception) as refusal:  # noqa: PT011
            timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert clear(refusal.value), repr(refusal.value)


def test_the_table_does_not_get_smaller():
    assert len(CASES) > 60


@pytest.mark.parametrize("kind", ["good", "gauss", "size"])
def test_an_undamaged_folder_is_ok(folders, kind):
    found = verify(folders / kind)
    assert found.ok
    assert all(check.ok for check in found.checks), lines(found)
    assert [check.name for check in found.checks] == [
        *("files", "plan.json", "model.safetensors", "tensors", "values", "positions", "config.json", "rules.yaml"),
        *("report.json", "model", "ties", "outputs", "timm"),
    ]
    (outputs_check,) = [check for check in found.checks if check.name == "outputs"]
    assert outputs_check.detail.startswith("differ by 0.0e+00 of the stored norm")


WRONG_VALUES = [0, -1, None, "", 10**30, [], [0, 0], [-1, 3], [10**12, 10**12], True, {}, 1.5, "a.b"]


def places(data, path=()):
    """Paths to all values of a plan; of lists, to the last entry."""
    yield path
    last = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in last if isinstance(data, dict) else list(last)[-1:]:
        yield from places(value, (*path, key))


def test_a_plan_with_any_wrong_value_is_refused_or_consistent_and_no_bug(folders):
    text = (folders / "good" / PLAN).read_text()
    for *above, last in (path for path in places(json.loads(text)) if path):
        for value in WRONG_VALUES:
            plan = json.loads(text)
            inner = plan
            for key in above:
                inner = inner[key]
            inner[last] = value
            with contextlib.suppress(DclsConvertError):
                check_plan(plan_from_json(json.dumps(plan), "plan.json"))


# --- Folders that say that they were written so: nothing but the values can tell


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("good", fill(WEIGHT, 0, torch.nan), f"values: {WEIGHT} has 1 of 832 values that are NaN"),
        ("good", fill("head.fc.bias", 0, -torch.inf), "values: head.fc.bias has 1 of 1000 values that are infinite"),
        (
            "good",
            fill(POSITIONS, -1, -4.01),
            f"positions: {POSITIONS} has 1 of 1248 elements outside the window along axis 1",
        ),
        ("good", fill(WEIGHT, 0, 1e6), "outputs: differ by"),
        ("good", lambda t: t.pop(WEIGHT), f"model: {WEIGHTS} lacks {WEIGHT}"),
        ("gauss", fill("stages.2.blocks.dcls_sigma", 0, 0.2), "has 1 of 1728 sigmas below 0.27 cells, the least"),
    ],
)
def test_values_are_looked_at(folders, tmp_path, kind, change, says):
    folder = Path(shutil.copytree(folders / kind, tmp_path / "sealed"))
    retensored(change, seal=True)(folder, folders)
    found = verify(folder)
    assert next(check for check in found.checks if check.name == "tensors").ok
    assert any(says in line for line in lines(found)), lines(found)


def test_all_problems_are_listed(folder, folders):
    for name in ("no README.md", "rules", "NaN", "outside the window", "report not JSON", "other architecture"):
        CASES[name].damage(folder, folders)
    found = verify(folder)
    for part in ("README.md: is missing", "rules.yaml: ", "NaN", "outside", "report.json: is not JSON", "architecture"):
        assert any(part in line for line in lines(found)), part


def test_foreign_files_are_a_note_and_no_problem(folder):
    (folder / "my notes.txt").write_text("mine")
    found = verify(folder)
    assert found.ok
    assert any("note: 'my notes.txt' not of dcls-convert" in check.detail for check in found.checks)


def test_links_to_the_files_are_as_good_as_the_files(folder, tmp_path, right):
    (tmp_path / "cache").mkdir()
    for name in FILES:  # as in the cache of the hub
        (folder / name).rename(tmp_path / "cache" / name)
        (folder / name).symlink_to(tmp_path / "cache" / name)
    assert verify(folder).ok
    assert torch.equal(outputs(load_converted(folder)), right)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", FILES)
def test_no_permission(folder, name):
    (folder / name).chmod(0)
    assert f"{name}: cannot be read: no permission" in lines(verify(folder))


def test_a_file_that_cannot_be_looked_at(folder, monkeypatch):
    def refuse(path):
        if path.name in FILES:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", refuse)
    assert [line for line in lines(verify(folder)) if line.endswith("cannot be read: Permission denied")][5:]


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
    again = timm.create_model(f"local-dir:{tmp_path / 'tuned'}", pretrained=True)
    assert torch.equal(outputs(again), outputs(model))
    save_for_hf(model, folder, safe_serialization=True)  # over the folder that it came from
    assert torch.equal(outputs(timm.create_model(f"local-dir:{folder}", pretrained=True)), outputs(model))
    save_file(model.state_dict(), folder / WEIGHTS)
    assert torch.equal(outputs(timm.create_model(f"local-dir:{folder}", pretrained=True)), outputs(model))


def test_timm_does_not_load_old_weights_for_a_new_config(folder):
    """timm prefers model.safetensors to the pytorch_model.bin that its saver writes by default."""
    save_for_hf(fine_tuned(folder, num_classes=5), folder)
    with pytest.raises(CheckpointError, match="model_args"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


@pytest.mark.parametrize("options", [{"num_classes": 5}, {"num_classes": 0}])
def test_a_lost_tensor_is_missed_with_a_new_head_too(folder, tmp_path, options):
    """timm loads what there is as soon as the number of classes differs, and keeps random values for the rest."""
    model = fine_tuned(folder)
    save_for_hf(model, tmp_path / "tuned", safe_serialization=True)
    name = f"local-dir:{tmp_path / 'tuned'}"
    timm.create_model(name, pretrained=True, **options)
    tensors, _ = contents(tmp_path / "tuned" / WEIGHTS)
    moved(tensors)
    save_file(tensors, tmp_path / "tuned" / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"lacks {WEIGHT} of the model that config.json describes"):
        timm.create_model(name, pretrained=True, **options)


@pytest.mark.parametrize("pretrained", [False, True])
def test_another_base_is_refused_where_timm_saved_and_without_weights_too(folder, tmp_path, pretrained):
    save_for_hf(fine_tuned(folder), tmp_path / "tuned", safe_serialization=True)
    for path in (folder, tmp_path / "tuned"):
        edited(CONFIG, lambda c: c["model_args"].update(base="timm:test_convnext2") and None)(path, None)
        with pytest.raises(CheckpointError, match=r"model_args\.base is 'timm:test_convnext2', its plan is for"):
            timm.create_model(f"local-dir:{path}", pretrained=pretrained)


@pytest.mark.parametrize("options", [{"features_only": True}, {"num_classes": 3}, {"in_chans": 1}])
def test_damage_is_noticed_whatever_timm_is_asked_for(folder, folders, options):
    name = f"local-dir:{folder}"
    timm.create_model(name, pretrained=True, **options)
    CASES["a flipped bit, in the middle"].damage(folder, folders)
    with pytest.raises(CheckpointError, match="not those that were written"):
        timm.create_model(name, pretrained=True, **options)


def test_a_folder_in_the_hubs_cache_is_checked(folder, folders, tmp_path, monkeypatch):
    revision = "0" * 40
    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / revision
    (snapshot.parent.parent / "refs").mkdir(parents=True)
    (snapshot.parent.parent / "refs" / "main").write_text(revision)
    shutil.copytree(folder, snapshot)
    create = {"pretrained": True, "cache_dir": tmp_path / "hub"}
    assert torch.equal(outputs(timm.create_model("hf-hub:me/mine", **create)), outputs(load_converted(folder)))
    for name in ("config of another folder", "other arguments", "a flipped bit, last byte", "weights of another seed"):
        shutil.copytree(folder, snapshot, dirs_exist_ok=True)
        CASES[name].damage(snapshot, folders)
        with pytest.raises(CheckpointError):
            timm.create_model("hf-hub:me/mine", **create)


def test_a_model_that_only_its_user_can_build_is_checked_as_far_as_that_goes(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *[nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)])
    plan = plan_conversion(find_convs(model, (3, 8, 8)), dilated_size=5)
    apply_plan_(model, plan)
    folder = save_converted(model, plan, tmp_path / "own")
    found = verify(folder)
    assert found.ok
    (skipped,) = [check for check in found.checks if check.ok is None]
    assert skipped.name == "model"
    assert "only its user can build it" in skipped.detail
    flipped(-1)(folder, None)
    assert not verify(folder).ok
    with pytest.raises(CheckpointError, match="not those that were written"):
        load_converted(folder, model=model)


def test_a_folded_folder_has_no_positions_and_no_ties_to_check(folder, tmp_path):
    model, plan = load_converted(folder), plan_from_json((folder / PLAN).read_text(), "plan")
    fold_to_dense_(model)
    plan = replace(plan, folded=True)
    report = dcls_convert.predict_report(plan)
    found = verify(save_converted(model, plan, tmp_path / "folded", report=report))
    assert all(check.ok for check in found.checks), lines(found)
    told = {check.name: check.detail for check in found.checks}
    assert (told["positions"], told["ties"]) == ("none, since the model is folded",) * 2
    assert {"outputs", "timm"} <= told.keys()


def test_a_folded_model_for_stock_timm_is_checked_without_a_plan(folder, tmp_path):
    model, plan = load_converted(folder), plan_from_json((folder / PLAN).read_text(), "plan")
    fold_to_dense_(model)
    stock = save_converted(
        model, replace(plan, folded=True), tmp_path / "stock", report=dcls_convert.predict_report(plan)
    )
    for name in (PLAN, RULES, REPORT):
        (stock / name).unlink()
    edited(CONFIG, lambda c: c.update(architecture=TINY, model_args={"kernel_sizes": 9}))(stock, None)
    found = verify(stock)
    assert all(check.ok for check in found.checks), lines(found)
    assert {"files", WEIGHTS, "tensors", "values", "timm", "outputs"} <= {check.name for check in found.checks}
    edited(CONFIG, lambda c: c["model_args"].update(act_layer="relu"))(stock, None)
    assert any(line.startswith("outputs: differ by") for line in lines(verify(stock)))
    flipped(-1)(stock, None)
    assert any(CHANGED in line for line in lines(verify(stock)))
    (stock / WEIGHTS).unlink()
    assert not verify(stock).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_compared_in_theirs(tmp_path, dtype):
    model, plan = convert()
    found = verify(save_converted(model.to(dtype), plan, tmp_path / "out"))
    assert found.ok, lines(found)
    (detail,) = [check.detail for check in found.checks if check.name == "outputs"]
    assert detail.startswith("differ by 0.0e+00 ")
    assert detail.endswith(f"rounding in {str(dtype)[6:]}")


# --- What is stored


def test_saving_leaves_the_model_as_it_was(tmp_path):
    model, _ = convert()
    model.train()
    model.stem.eval()
    norm = nn.BatchNorm2d(3)
    model.stem.insert(0, norm)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    assert take_fingerprint(model, IMAGE).outputs
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.is_grad_enabled()


def test_a_model_that_counts_its_calls_is_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            self.last = torch.ones(1)
            return x + torch.rand(())

    model = Counting()
    calls = model.calls
    first = take_fingerprint(model, IMAGE)
    with torch.random.fork_rng():
        torch.manual_seed(123)
        assert take_fingerprint(model, IMAGE) == first
    assert (model.calls, model.calls.item(), model.last.item()) == (calls, 0, 0)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_leaves_no_trace(threads):
    model = build_model(ModelSource(name="timm:test_efficientnet")).eval()
    before = torch.get_num_threads()
    size = (3, 160, 160)  # large enough for threads to sum in other orders
    alone = take_fingerprint(model, size)
    torch.set_num_threads(threads)
    try:
        assert take_fingerprint(model, size) == alone
    finally:
        torch.set_num_threads(before)


def test_outputs_of_all_kinds():
    class Many(nn.Module):
        def forward(self, x):
            return {"a": (x.mean(), [x[:, :1]]), "empty": x[:0], "nan": x.new_tensor([float("nan"), 1.0]), "n": x.int()}

    found = take_fingerprint(Many(), (3, 5, 5))
    assert [output.shape for output in found.outputs] == [(), (1, 1, 5, 5), (0, 3, 5, 5), (2,)]
    assert [len(output.values) for output in found.outputs] == [1, 16, 0, 2]
    assert (found.outputs[3].norm, found.outputs[3].values) == (None, (None, 1.0))
    image = torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.outputs[1].norm, image[:, :1].norm().item(), rtol=1e-5, atol=0)
    flat = image[0, 0].flatten()
    assert found.outputs[1].values[0] == pytest.approx(flat[0].item(), rel=1e-5)
    assert found.outputs[1].values[-1] == pytest.approx(flat[-1].item(), rel=1e-5)
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_model_that_cannot_run_says_why():
    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    assert take_fingerprint(Two(), None).to_dict() == {"outputs": None, "reason": "the plan has no input size"}
    assert take_fingerprint(Two(), IMAGE).reason.startswith("TypeError: ")
    with torch.device("meta"):
        assert take_fingerprint(nn.Conv2d(3, 3, 1), IMAGE).reason == "the model is on the meta device"


def test_without_a_fingerprint_nothing_runs(tmp_path, monkeypatch):
    model, plan = convert()
    report = dcls_convert.predict_report(plan)

    def forward(*_args):
        raise AssertionError("must not run")

    monkeypatch.setattr(type(model), "forward", forward)
    folder = save_converted(model, plan, tmp_path / "out", report=report, fingerprint=False)
    monkeypatch.undo()
    assert read_stamp(folder / WEIGHTS).fingerprint is None
    found = verify(folder)
    assert found.ok
    assert [check.name for check in found.checks if check.ok is None] == ["outputs"]


def test_the_hash_depends_on_names_types_shapes_and_values_alone():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1), "c": torch.zeros(0, 2)}
    same = tensors_hash(tensors.items())
    assert tensors_hash(list(tensors.items())[::-1]) == same
    assert tensors_hash((tensors | {"a": torch.arange(6.0).reshape(3, 2).T.reshape(3, 2).T}).items()) != same
    others = [
        {"a": tensors["a"].reshape(3, 2)},
        {"a": tensors["a"].double()},
        {"a": tensors["a"].view(torch.int32)},
        {"b": torch.tensor(2)},
        {"c": torch.zeros(2, 0)},
        {"d": torch.tensor(1)},
        {"a": -tensors["a"].neg_()},  # 0.0 to -0.0 and back: the bytes count
    ]
    assert same not in {tensors_hash((tensors | other).items()) for other in others[:-1]}
    transposed = torch.arange(6.0).reshape(3, 2).T
    assert tensors_hash([("a", transposed)]) == tensors_hash([("a", transposed.contiguous())])


# --- The command, with its fresh process


def run(*arguments, code):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == code


def test_the_command_rebuilds_in_a_process_of_its_own(folder, capsys):
    run("verify", folder, code=0)
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines()] == ["ok"] * 13
    (line,) = [line for line in out.splitlines() if " outputs " in line]
    assert "differ by 0.0e+00 of the stored norm" in line


def test_the_command_names_damage_and_ends_with_2(folder, folders, capsys):
    CASES["other base"].damage(folder, folders)
    retensored(fill(POSITIONS, 0, 99.0))(folder, folders)
    run("verify", folder, "--json", code=2)
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data.keys() == {"format", "folder", "ok", "checks"}
    assert (data["format"], data["folder"], data["ok"]) == (1, str(folder), False)
    assert all(check.keys() == {"name", "ok", "detail"} for check in data["checks"])
    problems = [check["name"] for check in data["checks"] if check["ok"] is False]
    assert problems == ["tensors", "positions", "config.json", "timm"]
    assert err == f"error: {folder}: 4 problems found\n"


def test_the_command_prints_a_line_for_every_check(folder, folders, capsys, monkeypatch):
    monkeypatch.setattr("dcls_convert.checkpoints.verify.rebuild_in_fresh_process", rebuild_checks)
    CASES["metadata of a newer format"].damage(folder, folders)
    CASES["rules"].damage(folder, folders)
    run("verify", folder, code=2)
    out, err = capsys.readouterr()
    words = [line.split() for line in out.splitlines()]
    marks = [(name, mark) for mark, name, *_ in words if mark != "ok"]
    wanted = {"model.safetensors": "problem", "tensors": "skipped", "rules.yaml": "problem", "model": "skipped"}
    assert dict(marks) == wanted
    assert err == f"error: {folder}: 2 problems found\n"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_what_is_no_folder(tmp_path, capsys, command):
    (tmp_path / "file").write_text("")
    for name in ("file", "nothing"):
        run(command, tmp_path / name, "--json", code=2)
        out, err = capsys.readouterr()
        assert (out, err) == ("", f"error: {tmp_path / name}: is not a folder\n")


OWN_MODULE = """
print("this is progress")
from torch import nn

def build():
    convs = [nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *convs)
"""
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


def test_models_of_the_users_own_are_built_from_the_current_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mymodel_v.py").write_text(OWN_MODULE)
    Path("random.py").write_text("raise ImportError('not the random module that is meant')")
    run("mymodel_v:build", "--dilated-size", "5", "--input-size", "3x8x8", "--quiet", "--output", "out", code=0)
    sys.modules.pop("mymodel_v")
    capsys.readouterr()
    run("verify", "out", "--json", code=0)
    data = json.loads(capsys.readouterr().out)
    assert {check["name"]: check["ok"] for check in data["checks"]}["timm"] is True
    Path("mymodel_v.py").write_text(KILLED)
    run("verify", "out", code=2)
    assert "the process that rebuilt it was ended by signal 9" in capsys.readouterr().out
