"""The provenance of a folder: what was converted, and how. Whatever it holds, it can be shown."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from dcls_convert import convert_, load_converted, save_converted
from dcls_convert.checkpoints.folder import CARD, CONFIG
from dcls_convert.conversion.provenance import (
    attach_provenance_,
    provenance_lines,
    provenance_of,
)
from dcls_convert.networks.timm_notes import ORIGIN_KEYS

from ..command_line import run
from ..conftest import TINY

pytestmark = pytest.mark.usefixtures("empty_folder")
MODEL = "test_efficientnet"
RULES = "format: 1\nrules: [{match: {kind: depthwise}, dilated_size: 7}]\n"


def stored_provenance(folder):
    return json.loads((Path(folder) / CONFIG).read_text())["dcls_convert"]["provenance"]


def test_the_command_is_what_was_typed(tmp_path):
    (tmp_path / "my rules.yaml").write_text(RULES)
    words = f"{MODEL} --seed 7 --input-size 3x32x32 --output out --quiet --rules".split()
    run(*words, f"{tmp_path}/my rules.yaml")
    provenance = stored_provenance("out")
    command = f"dcls-convert {' '.join(words)} '{tmp_path}/my rules.yaml'"
    assert provenance == {
        "command": command,
        "request": {"model": MODEL, "rules": "my rules.yaml", "input_size": [3, 32, 32]},
        "seed": 7,
        "weights": "random",
        "versions": provenance["versions"],
    }
    assert provenance["versions"]["timm"] == timm.__version__
    shown, _ = run("inspect", "out")
    for line in provenance_lines(provenance):
        assert line in Path("out", CARD).read_text().splitlines()
        assert "".join(line.split()) in "".join(shown.split())  # inspect breaks long lines


def test_a_conversion_in_python_has_a_request_and_no_command():
    model = timm.create_model(TINY)
    sizes = {"dilated_size": np.array([9, 9]), "input_size": np.array([3, 32, 32])}
    convert_(model, init="random", seed=np.int64(5), **sizes)
    for kept in (model, pickle.loads(pickle.dumps(model))):
        provenance = provenance_of(kept)
        assert provenance["command"] is None
        assert provenance["weights"] == "in memory"
        assert provenance["seed"] == 5
        assert provenance["request"] == {
            "model": "ConvNeXt",
            "dilated_size": [9, 9],
            "input_size": [3, 32, 32],
            "init": "random",
        }


# --- What timm's config says about the weights


def stated_origin(config):
    return {name: config[name] for name in ORIGIN_KEYS if config.get(name)}


def folder_config(folder):
    return json.loads((Path(folder) / CONFIG).read_text())["pretrained_cfg"]


def test_only_timms_own_weights_are_called_timms(tmp_path, monkeypatch):
    """Even after loading by timm, saving again, and folding."""
    model = timm.create_model(TINY)
    timms = stated_origin(model.pretrained_cfg)
    assert {"tag", "license"} <= timms.keys()
    torch.save(model.state_dict(), "w.pth")
    timm.models.save_for_hf(model, "hub", safe_serialization=True)
    monkeypatch.setattr(
        "timm.models._hub.hf_hub_download", lambda repo_id, filename, **_: f"hub/{filename}"
    )
    options = ("--dilated-size", 9, "--input-size", "3x32x32", "--init", "largest", "--quiet")
    starts = {"file": ("--checkpoint", "w.pth"), "pretrained": ("--pretrained",)}
    for name, weights in starts.items():
        expected = timms if name == "pretrained" else {}
        run(TINY, *weights, *options, "--output", name)
        assert stated_origin(folder_config(name)) == expected, name
        by_timm = timm.create_model(f"local-dir:{name}", pretrained=True)
        save_converted(by_timm, name, f"{name}-timm")
        run("fold", name)
        for folder in (f"{name}-timm", f"{name}-folded"):
            assert stated_origin(folder_config(folder)) == expected, folder
            assert stored_provenance(folder) == stored_provenance(name)


# --- Reading a provenance


def test_a_strangers_record_is_inspected_saved_and_loaded():
    strange = {"command": ["rm\x1b[31m\ud800", {"a": [1.5]}], "seed": {}, "\n```": 10**400}
    model = timm.create_model(TINY)
    report = convert_(model, dilated_size=9, init="random")
    attach_provenance_(model, strange)
    save_converted(model, report.plan, "out")
    assert provenance_of(load_converted("out")) == strange
    assert "\\n```: 1000" in Path("out", CARD).read_text()
    assert "\x1b[" not in run("inspect", "out")[0]
    assert json.loads(run("inspect", "out", "--json")[0])["provenance"] == strange
