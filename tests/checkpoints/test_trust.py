"""A folder is data: whatever it names, nothing of it is imported, run, opened or downloaded, by any way in."""

import json
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
import torchvision

from dcls_convert import ModelError, load_converted
from dcls_convert.checkpoints.folder import CONFIG
from dcls_convert.checkpoints.inspection import inspect_folder
from dcls_convert.export.formats import fold_checkpoint
from dcls_convert.networks.source import ModelSource, build_model, check_source, known_source

from ..audit_hook import watched
from ..conftest import TINY
from .folders import edit_json, hub_cache, problems, seal, verify

# What a folder may try: the plan's model, and its arguments. CANARY is a file that must not appear or be opened.
MODELS = {
    "os.system": ("os:system", {"command": "touch CANARY"}),
    "torch.load": ("torch:load", {"f": "CANARY", "weights_only": False}),
    "module": ("evil_module:build", {}),
    "hub": ("hf-hub:someone/model", {}),
    "local-dir": ("local-dir:CANARY", {}),
    "timm path": ("timm:../CANARY", {}),
    "our own entry": ("timm:dcls_convert", {}),
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
    "hf_hub_id": "someone/model",
    "url": "http://127.0.0.1:9/x",
    "file": "CANARY",
    "config": "CANARY",
    "act_layer": "../CANARY",
    "block": {"inner": [{"source": "x"}]},
}
OF_TIMM = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # its factory's
ATTACKS = {
    name: MODELS[name] for name in ("os.system", "torch.load", "module", "local-dir", "our own entry", "no model")
}
ATTACKS |= {f"argument {name}": (f"timm:{TINY}", {name: ARGUMENTS[name]}) for name in (*OF_TIMM, "act_layer")}
REFUSALS = (
    "is not the name of a model of timm or torchvision|is not allowed|does not say how its model is built|"
    "is not a model by itself|timm cannot build this folder's model|"
    # timm's own, for arguments that its factory has too
    "got multiple values for keyword argument|pretrained_cfg should not be set"
)
EVIL = "import pathlib\npathlib.Path(__file__).with_name('CANARY').touch()\ndef build(**_): raise SystemExit\n"


def ways(folder, hub):
    """Every way in that builds a model, by name."""
    local, remote = f"local-dir:{folder}", f"hf-hub:me/{folder.name}"
    return {
        "load_converted": lambda: load_converted(folder),
        "fold": lambda: fold_checkpoint(folder, "timm", folder.parent / f"folded-{folder.name}"),
        "timm": lambda: timm.create_model(local),
        "timm, pretrained": lambda: timm.create_model(local, pretrained=True),
        "timm, new head": lambda: timm.create_model(local, pretrained=True, num_classes=3),
        "timm, features": lambda: timm.create_model(local, pretrained=True, features_only=True),
        "hub": lambda: timm.create_model(remote, cache_dir=hub),
        "hub, pretrained": lambda: timm.create_model(remote, pretrained=True, cache_dir=hub),
    }


@pytest.fixture(scope="module")
def warm(folders, tmp_path_factory):
    """All ways have been gone with a healthy folder, so that what they import is imported."""
    base = tmp_path_factory.mktemp("warm")
    folder = Path(shutil.copytree(folders / "good", base / "good"))
    shutil.copytree(folder, hub_cache(folder, base / "hub"))
    for way in (*ways(folder, base / "hub").values(), lambda: verify(folder), lambda: inspect_folder(folder)):
        way()


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_way_in_runs_imports_opens_or_downloads_what_a_folder_names(warm, folder, tmp_path, monkeypatch, attack):
    """The folder names the model, or the arguments, in all places, and says that it was written so."""
    canary, hub = tmp_path / "elsewhere" / "CANARY", tmp_path / "hub"
    canary.parent.mkdir()
    canary.with_name("evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(canary.parent)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(hub / "token"))  # the client looks for it
    name, args = json.loads(json.dumps(ATTACKS[attack]).replace("CANARY", str(canary)))

    def change(config):
        plan = config["model_args"]["plan"]
        plan["model"], plan["model_args"] = name, args
        config["model_args"] = {**args, "plan": plan}

    edit_json(folder / CONFIG, change)
    seal(folder)
    shutil.copytree(folder, hub_cache(folder, hub))
    with watched(folder, hub) as events:
        for way, load in ways(folder, hub).items():
            with pytest.raises(Exception, match=REFUSALS):
                load()
            assert events == [], way
        (skipped,) = problems(verify(folder))  # which need no model, and go on without it
        assert inspect_folder(folder).elements
    assert re.match("model: not checked: .*", skipped)
    assert (events, canary.exists(), "evil_module" in sys.modules) == ([], False, False)


def test_plain_arguments_of_registered_models_alone_are_allowed():
    plain = {"rate": 0.1, "img_size": [64, 64], "dims": (1, 2), "act_layer": "relu", "kw": {"a": None, "b": True}}
    check_source(ModelSource(name=f"timm:{TINY}", args=plain))
    check_source(ModelSource(name="timm:convnext_tiny.fb_in22k"))
    for name, _ in MODELS.values():
        with pytest.raises(ModelError):
            check_source(ModelSource(name=name or ""))
    more = [("depth", 10**9), ("depths", [3, 10**9]), ("layer", torch.nn.ReLU), ("x", 1j), ("x", {1: 2})]
    for name, value in [*ARGUMENTS.items(), *more]:
        with pytest.raises(ModelError):
            check_source(ModelSource(name=f"timm:{TINY}", args={name: value}))


def test_a_folders_arguments_cannot_ask_for_a_network_without_end(monkeypatch):
    tries, create_model = [], timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *args, **kwargs: tries.append(args) or create_model(*args, **kwargs)
    )
    with pytest.raises(ModelError, match=r"its arguments ask for more than 4,000 modules"):
        build_model(ModelSource(name=f"timm:{TINY}", args={"depths": [10**6]}), device="meta")
    assert len(tries) == 1  # another way of building would end no sooner


def test_a_plan_names_registered_models_alone():
    """A model that no registry can build again is its user's to build."""
    unnoted = timm.create_model(TINY, num_classes=3)
    del unnoted._model_args  # as by a timm that keeps its arguments elsewhere: they cannot be guessed
    other = torchvision.models.resnet18(norm_layer=torch.nn.SyncBatchNorm)
    for model in (torch.nn.ReLU(), timm.create_model(TINY, act_layer=torch.nn.ReLU), unnoted, other):
        assert known_source(model) is None
    changed = timm.create_model(TINY)
    changed.reset_classifier(3)
    assert known_source(changed) == ModelSource(name=f"timm:{TINY}", args={"num_classes": 3})
    changed.head.fc = torch.nn.Linear(64, 5)
    assert known_source(changed) is None
    for name, build in ((f"timm:{TINY}", timm.create_model), ("torchvision:resnet18", torchvision.models.get_model)):
        known = ModelSource(name=name, args={"num_classes": 3})
        assert known_source(build(name.partition(":")[2], num_classes=3)) == known
