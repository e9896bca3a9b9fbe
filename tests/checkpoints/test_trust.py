"""A folder is data: whatever it names, nothing of it is imported, run, opened or downloaded, by any way in."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dcls_convert import ModelError, load_converted, save_converted
from dcls_convert.checkpoints.folder import CONFIG
from dcls_convert.errors import DclsConvertError
from dcls_convert.networks.source import (
    ModelSource,
    build_model,
    check_source,
    known_source,
    rebuildable_source,
)

from ..conftest import TINY
from .folders import convert, edit_json, outputs, same_states, seal

# What a folder may try: the plan's model, and its arguments. CANARY is a file that must not appear or be opened.
MODELS = {
    "os.system": ("os:system", {"command": "touch CANARY"}),
    "getoutput": ("subprocess:getoutput", {"cmd": "touch CANARY"}),
    "torch.load": ("torch:load", {"f": "CANARY", "weights_only": False}),
    "exec": ("builtins:exec", {}),
    "module": ("evil_module:build", {}),
    "hub": ("hf-hub:someone/model", {}),
    "local-dir": ("local-dir:CANARY", {}),
    "timm hub": ("timm:hf-hub:someone/model", {}),
    "timm path": ("timm:../CANARY", {}),
    "our own entry": ("timm:dcls_convert", {}),
    "no such model": ("timm:nope", {}),
    "torchvision path": ("torchvision:../CANARY", {}),
    "no model": (None, {}),
}
ARGUMENTS = {
    "checkpoint_path": "CANARY",
    "pretrained": True,
    "pretrained_cfg": {"file": "CANARY"},
    "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x"},
    "cache_dir": "CANARY",
    "weights": "DEFAULT",
    "weights_backbone": "DEFAULT",
    "hf_hub_id": "someone/model",
    "url": "http://127.0.0.1:9/x",
    "file": "CANARY",
    "config": "CANARY",
    "act_layer": "../CANARY",
    "block": {"inner": [{"source": "x"}]},
}
REFUSALS = (
    "is not the name of a model of timm or torchvision|is not allowed|does not say how its model is built|"
    "is not a model by itself|"
    # timm's own, for arguments that its factory has too
    "got multiple values for keyword argument|pretrained_cfg should not be set"
)
EVIL = "import pathlib\npathlib.Path(__file__).with_name('CANARY').touch()\ndef build(**_): raise SystemExit\n"


def attack(good, folder, model, args):
    """A healthy folder that names this model, or these arguments, in all places, and says that it was written so."""
    shutil.copytree(good, folder)

    def change(config):
        plan = config["model_args"]["plan"]
        plan["model"], plan["model_args"] = model, args
        config["model_args"] = {**args, "plan": plan}

    edit_json(folder / CONFIG, change)
    seal(folder)


def in_the_hubs_cache(folder, hub):
    snapshot = hub / f"models--me--{folder.name}" / "snapshots" / ("0" * 40)
    (snapshot.parent.parent / "refs").mkdir(parents=True)
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, snapshot)


@pytest.mark.processes
def test_no_way_in_runs_imports_opens_or_downloads_what_a_folder_names(tmp_path):
    folders, hub = tmp_path / "folders", tmp_path / "hub"
    folders.mkdir()
    good = save_converted(*convert(), folders / "good")
    canary = tmp_path / "CANARY"
    (tmp_path / "evil_module.py").write_text(EVIL)
    for name, (model, args) in MODELS.items():
        args = json.loads(json.dumps(args).replace("CANARY", str(canary)))
        model = model and model.replace("CANARY", str(canary))
        attack(good, folders / name.replace(" ", "_"), model, args)
    for name, value in ARGUMENTS.items():
        value = json.loads(json.dumps(value).replace("CANARY", str(canary)))
        attack(good, folders / f"argument_{name}", f"timm:{TINY}", {name: value})
    for folder in folders.iterdir():
        in_the_hubs_cache(folder, hub)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    environment |= {"HF_HOME": str(hub)}  # where the hub's client looks for its token
    command = [sys.executable, "-m", f"{__package__}.audit", str(folders), str(hub)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 10 * (len(MODELS) + len(ARGUMENTS))
    assert {event for result in results for event in result["events"]} == set()
    assert not canary.exists()
    # Inspecting and verifying need no model; they and nothing else go on without it.
    went_on = {result["way"] for result in results if result["error"] is None}
    assert went_on == {"inspect", "verify"}
    for result in results:
        if result["way"] == "verify":
            assert "not checked" in result["text"], result
        elif result["way"] != "inspect":
            assert re.search(REFUSALS, result["text"]), result


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a model of the user's own, which stands in a module that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trusted_module.py").write_text(
        "import timm\ndef build(**args):\n    return timm.create_model('test_convnext', **args)\n"
    )
    source = ModelSource(name="trusted_module:build", args={"num_classes": 3})
    model, plan = convert(args=source.args)
    return model, save_converted(model, replace(plan, model=source.name), tmp_path / "own")


def test_code_of_the_users_own_runs_where_it_is_trusted_or_given_as_an_object(own):
    model, folder = own
    with pytest.raises(ModelError, match=r"trusted_module:build: is not the name of a model .* trust_code=True"):
        load_converted(folder)
    assert "trusted_module" not in sys.modules
    assert same_states(load_converted(folder, trust_code=True), model)
    given = load_converted(folder, model=build_model(ModelSource(name=f"timm:{TINY}", args={"num_classes": 3})))
    assert torch.equal(outputs(given), outputs(model))


@pytest.mark.parametrize(
    "name", ["os:system", "hf-hub:a/b", "local-dir:x", "timm:nope", "torchvision:nope", "nope", ""]
)
def test_only_registered_names_are_built_without_trust(name):
    with pytest.raises(ModelError, match="is not the name of a model of timm or torchvision"):
        build_model(ModelSource(name=name))


def test_plain_arguments_are_allowed():
    plain = {
        "drop_path_rate": 0.1,
        "img_size": [64, 64],
        "dims": (1, 2),
        "act_layer": "relu",
        "kw": {"a": None, "b": True},
    }
    check_source(ModelSource(name=f"timm:{TINY}", args=plain))
    check_source(ModelSource(name="timm:convnext_tiny.fb_in22k"))
    for name, value in [
        *ARGUMENTS.items(),
        ("depth", 10**9),
        ("depths", [3, 10**9]),
        ("layer", torch.nn.ReLU),
        ("x", 1j),
        ("x", {1: 2}),
    ]:
        with pytest.raises(ModelError):
            check_source(ModelSource(name=f"timm:{TINY}", args={name: value}))


def test_a_folders_arguments_cannot_ask_for_a_network_without_end(monkeypatch):
    import timm

    tries, create_model = [], timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *args, **kwargs: tries.append(args) or create_model(*args, **kwargs)
    )
    with pytest.raises(ModelError, match=r"its arguments ask for more than 4,000 modules"):
        build_model(ModelSource(name=f"timm:{TINY}", args={"depths": [10**6]}), device="meta")
    assert len(tries) == 1  # another way of building would end no sooner


def test_a_plan_never_holds_the_hub_or_a_folder():
    """A model that timm's registry cannot build again is its user's to build."""
    import timm

    unnoted = timm.create_model(TINY, num_classes=3)
    del unnoted._model_args  # as by a timm that keeps its arguments elsewhere: they cannot be guessed
    for model in (torch.nn.ReLU(), timm.create_model(TINY, act_layer=torch.nn.ReLU), unnoted):
        assert known_source(model) is None
        assert rebuildable_source(model, ModelSource(name="hf-hub:a/b")) is None
    model = timm.create_model(TINY, num_classes=3)
    known = ModelSource(name=f"timm:{TINY}", args={"num_classes": 3})
    assert rebuildable_source(model, ModelSource(name="local-dir:x")) == known
    assert issubclass(ModelError, DclsConvertError)
