"""A folder is data: whatever it names, no entry point imports, runs, opens or downloads it."""

import copy
import json
import re
import shutil
import sys
from contextlib import contextmanager
from functools import reduce
from operator import getitem

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert import DclsConvertError, ModelError, load_converted
from dcls_convert.checkpoints.folder import CONFIG, TORCH_WEIGHTS, WEIGHTS
from dcls_convert.checkpoints.verify import verify_folder as verify
from dcls_convert.export.fold import fold_folder
from dcls_convert.networks.source import ModelSource, check_source

from ..conftest import TINY
from ..hub_cache import upload
from .folders import edit_json, inspect_folder, problems, seal, value_paths

# Attacks: the model that a plan names, and its arguments. CANARY is a file that must not appear or
# be opened; canary_module is a module that must not be imported.
MODELS = {
    "os.system": ("os:system", {"command": "touch CANARY"}),
    "torch.load": ("torch:load", {"f": "CANARY", "weights_only": False}),
    "module": ("canary_module:build", {}),
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
    "block": {"inner": [{"url": "x"}]},
}
ATTACKS = MODELS | {name: (f"timm:{TINY}", {name: ARGUMENTS[name]}) for name in ARGUMENTS}
REFUSALS = (
    "is not the name of a model of timm or torchvision|is not allowed|"
    "does not say how its model is built|"
    "is not a model by itself|timm cannot build this folder's model"
)
# Raised by Python and timm for arguments that timm's factory has, too.
ERRORS_OF_FACTORY = (TypeError, AssertionError)
# Audit events that reading a folder must not cause.
FORBIDDEN_EVENTS = {
    *(f"os.{name}" for name in ("system", "exec", "posix_spawn", "spawn", "fork", "forkpty")),
    *("pickle.find_class", "subprocess.Popen"),
    *("socket.connect", "socket.getaddrinfo", "urllib.Request"),
}
_events = None  # list of recorded events; None when not watching, as audit hooks cannot be removed


def _hook(event, args):
    if _events is None:
        return
    touches_canary = event in ("open", "import") and "canary" in str(args[0]).lower()
    if event in FORBIDDEN_EVENTS or touches_canary:
        _events.append(f"{event} {str(args)[:200]}")


sys.addaudithook(_hook)


@contextmanager
def watched():
    """Yield the list of forbidden events that occur inside the block."""
    global _events
    _events = []
    try:
        yield _events
    finally:
        _events = None


def entry_points(folder):
    """Return all entry points that build a folder's model, by name."""
    local = f"local-dir:{folder}"
    remote = "hf-hub:me/evil"
    return {
        "load_converted": lambda: load_converted(folder),
        "fold": lambda: fold_folder(folder, "timm", folder.parent / f"folded-{folder.name}"),
        "timm": lambda: timm.create_model(local),
        "timm, pretrained": lambda: timm.create_model(local, pretrained=True),
        "timm, new head": lambda: timm.create_model(local, pretrained=True, num_classes=3),
        "timm, features": lambda: timm.create_model(local, pretrained=True, features_only=True),
        "hub": lambda: timm.create_model(remote),
        "hub, pretrained": lambda: timm.create_model(remote, pretrained=True),
    }


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_entry_point_runs_imports_opens_or_downloads_what_a_folder_names(
    folder, hub, tmp_path, monkeypatch, attack
):
    """The folder names the attack wherever it can, and its hashes fit."""
    canary = tmp_path / "elsewhere" / "CANARY"
    canary.parent.mkdir()
    canary.with_name("canary_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(canary.parent)
    name, args = json.loads(json.dumps(ATTACKS[attack]).replace("CANARY", str(canary)))

    def change(config):
        plan = config["model_args"]["plan"]
        plan["model"] = name
        plan["model_args"] = args
        config["model_args"] = {**args, "plan": plan}

    edit_json(folder / CONFIG, change)
    seal(folder)
    upload(folder, "me/evil", hub)
    with watched() as events:
        for entry_point, load in entry_points(folder).items():
            with pytest.raises((*ERRORS_OF_FACTORY, ValueError, DclsConvertError)) as refusal:
                load()
            by_factory = isinstance(refusal.value, ERRORS_OF_FACTORY)
            if attack in MODELS or not by_factory:
                assert re.search(REFUSALS, str(refusal.value)), entry_point
            assert events == [], entry_point
        # `verify` and `inspect` work without building the model.
        (skipped,) = problems(verify(folder))
        assert inspect_folder(folder).elements
    assert re.match("model: not checked: .*", skipped)
    assert (events, canary.exists()) == ([], False)


READERS = {
    "load": load_converted,
    "verify": verify,
    "inspect": inspect_folder,
    "timm": lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True),
}


@pytest.mark.parametrize("name", [WEIGHTS, TORCH_WEIGHTS, CONFIG])
@pytest.mark.parametrize("through", ["directly", "a folder beside it", "a hub's folder of blobs"])
def test_no_link_leads_out_of_a_folder(folder, tmp_path, name, through):
    """Its target's first bytes would otherwise stand in a message."""
    secret = tmp_path / "home" / "canary"
    secret.parent.mkdir()
    secret.write_text("my secret")
    if through == "a folder beside it":
        (tmp_path / "beside").symlink_to(secret.parent)
        secret = tmp_path / "beside" / "canary"
    elif through == "a hub's folder of blobs":
        folder = shutil.copytree(folder, tmp_path / "snapshots" / "main")
        (tmp_path / "blobs").symlink_to(secret.parent)
        secret = tmp_path / "blobs" / "canary"
    for file in {WEIGHTS, name}:
        (folder / file).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    message = f"{name}: is a link to a file outside of its folder"
    for reader, read in READERS.items():
        if (reader, name) == ("timm", CONFIG):  # timm reads it before this package is asked
            continue
        with watched() as events:
            if reader == "verify":
                (line,) = problems(read(folder))
            else:
                with pytest.raises(DclsConvertError) as refusal:
                    read(folder)
                line = str(refusal.value)
        assert message in line
        assert "secret" not in line
        assert events == []


def test_links_inside_a_folder_are_followed(folder, tmp_path):
    (folder / WEIGHTS).rename(folder / "weights")
    (folder / WEIGHTS).symlink_to("weights")
    (tmp_path / "name").symlink_to(folder)
    assert verify(tmp_path / "name").ok


NUMBERS = [-1, 0, 1, 20001, 2 * 10**7, 2**63, 10**30, 1.5, 1e300, True]
TEXTS = ["", "canary_module:build", "local-dir:CANARY", "timm:test_vit", "\x1b[31m\n", "\ud800"]
VALUES = st.sampled_from([*NUMBERS, *TEXTS, None, [], {}, [20001, 20001], [3, 99, 99]])


@given(
    changes=st.lists(st.tuples(st.integers(0, 2000), VALUES), min_size=1, max_size=3),
    read=st.sampled_from([load_converted, verify, inspect_folder]),
)
def test_any_config_is_read_or_refused_in_one_line(folders, tmp_path_factory, changes, read):
    """Even if the folder's hashes fit."""
    folder = shutil.copytree(folders / "good", tmp_path_factory.mktemp("edited") / "folder")

    def change(config):
        for index, value in changes:
            paths = list(value_paths(config))
            *above, last = paths[index % len(paths)]
            # A copy: the next change may edit it, and must not edit the list of values.
            reduce(getitem, above, config)[last] = copy.deepcopy(value)

    edit_json(folder / CONFIG, change)
    seal(folder)
    with watched() as events:
        try:
            result = read(folder)
            lines = []
            if read is verify:
                lines = [f"{check.name}{check.detail}" for check in result.checks]
        except DclsConvertError as error:
            lines = [str(error)]
    assert events == []
    assert all(line.isprintable() for line in lines), lines


def test_only_plain_arguments_of_registered_models_are_allowed():
    plain = {"rate": 0.1, "img_size": [64, 64], "act_layer": "relu", "kw": {"a": None, "b": True}}
    check_source(ModelSource(name=f"timm:{TINY}", args=plain))
    check_source(ModelSource(name="timm:convnext_tiny.fb_in22k"))
    not_plain = [("depth", 20_001), ("depths", [3, 10**9]), ("x", torch.nn.ReLU), ("x", {1: 2})]
    for name, value in not_plain:
        with pytest.raises(ModelError):
            check_source(ModelSource(name=f"timm:{TINY}", args={name: value}))
