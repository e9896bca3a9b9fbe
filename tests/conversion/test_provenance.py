"""The provenance of a folder: its command can be repeated, and its hashes match the inputs."""

import copy
import hashlib
import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from dcls_convert import convert_, load_converted, save_converted
from dcls_convert.checkpoints.folder import CARD, CONFIG, open_checkpoint
from dcls_convert.checkpoints.verify import verify_folder as verify
from dcls_convert.cli.console import printable
from dcls_convert.conversion.provenance import provenance_of
from dcls_convert.errors import CheckpointError
from dcls_convert.networks.building import build_model
from dcls_convert.networks.pretrained_cfg import ORIGIN_KEYS
from dcls_convert.networks.source import ModelSource
from dcls_convert.weights.tensors_hash import tensors_hash

from ..checkpoints.folders import edit_json, problems
from ..cli.trained import write_trained
from ..command_line import NET, run
from ..conftest import TINY

pytestmark = pytest.mark.usefixtures("empty_folder")
MODEL = "test_efficientnet"
SMALL = ("--dilated-size", 5, "--input-size", "3x32x32")
RULES = "format: 1\nrules: [{match: {kind: depthwise}, dilated_size: 7}]\n"


def stored_provenance(folder):
    return json.loads((Path(folder) / CONFIG).read_text())["dcls_convert"]["provenance"]


def hash_of(state):
    return tensors_hash(state.items())


def test_the_command_is_recorded_as_typed(tmp_path):
    (tmp_path / "my rules.yaml").write_text(RULES)
    command = ["--rules", tmp_path / "my rules.yaml", "--seed", 7, *SMALL[2:], "--output", "out"]
    run(MODEL, *command, "--quiet")
    provenance = stored_provenance("out")
    assert provenance["command"] == (
        f"dcls-convert {MODEL} --rules '{tmp_path}/my rules.yaml' --seed 7 --input-size 3x32x32 "
        "--output out --quiet"
    )
    assert provenance["command"] in Path("out", CARD).read_text()
    assert provenance["request"] == {
        "model": MODEL,
        "rules": "my rules.yaml",
        "input_size": [3, 32, 32],
        "seed": 7,
    }


def test_from_python_the_request_is_recorded_without_a_command():
    def unconverted():
        return build_model(ModelSource(name=f"timm:{TINY}"), seed=2)

    model = unconverted()
    report = convert_(model, dilated_size=(9, 9), init="random", input_size=[3, 32, 32], seed=5)
    provenance = provenance_of(model)
    assert provenance.command is None
    assert provenance.request == {
        "model": "ConvNeXt",
        "dilated_size": [9, 9],
        "input_size": [3, 32, 32],
        "init": "random",
        "seed": 5,
    }
    assert provenance.weights.source == "in memory"
    assert provenance.weights.tensors == hash_of(unconverted().state_dict())
    save_converted(model, report.plan, "out")
    assert "model=ConvNeXt, dilated_size=[9, 9]" in Path("out", CARD).read_text()


class Counter(torch.nn.Module):
    """A module whose state dict has an entry that is not a tensor."""

    def get_extra_state(self):
        return {"steps": 3}

    def forward(self, x):
        return x


def test_weights_that_are_not_all_tensors_have_no_hash():
    convs = [torch.nn.Conv2d(4, 4, 3, padding=1, groups=4) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Sequential(*convs), Counter())
    convert_(model, dilated_size=5, init="random")
    assert provenance_of(model).weights.tensors is None


def test_values_in_memory_are_named_as_such():
    model = timm.create_model(MODEL)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    rules = {"format": 1, "rules": [{"match": {"kind": "depthwise"}, "dilated_size": 5}]}
    convert_(model, rules=rules, calibration=images, input_size=(3, 32, 32))
    provenance = provenance_of(model)
    assert provenance.request["rules"] == provenance.request["calibration"] == "in memory"
    assert (provenance.calibration.number, provenance.calibration.names) == (4, None)


def test_the_plan_of_another_folder_is_named(tmp_path):
    run(TINY, *SMALL[2:], "--dilated-size", 9, "--output", "first", "--quiet")
    run(TINY, "--plan", tmp_path / "first", "--seed", 1, "--output", "second", "--quiet")
    assert stored_provenance("second")["request"]["plan_folder"] == "first"


def test_sources_and_hashes_are_those_of_weights_and_images(tmp_path):
    write_trained(tmp_path, MODEL, images=3)
    run(MODEL, *SMALL, "--seed", 4, "--output", "random", "--quiet")
    random = stored_provenance("random")
    assert (random["seed"], random["init"], random["positions"]) == (4, "random", "normal")
    state = build_model(ModelSource(name=f"timm:{MODEL}"), seed=4).state_dict()
    assert random["weights"] == {"source": "random", "tensors": hash_of(state)}
    assert random["calibration"] is None
    assert random["versions"]["timm"] == timm.__version__
    weights = ("--checkpoint", "weights.safetensors")
    run(MODEL, *SMALL, *weights, "--calibrate", "images", "--output", "fit", "--quiet")
    fitted = stored_provenance("fit")
    assert (fitted["init"], fitted["positions"]) == ("fit", None)
    weights_hash = hash_of(load_file("weights.safetensors"))
    assert fitted["weights"] == {"source": "weights.safetensors", "tensors": weights_hash}
    names = hashlib.sha256(b"00.png\n01.png\n02.png").hexdigest()
    assert fitted["calibration"] == {"number": 3, "names": names}


def test_unreadable_images_are_not_counted(tmp_path):
    write_trained(tmp_path, MODEL, images=3)
    Path("images/00.png").write_bytes(b"")
    Path("images/class").mkdir()
    Image.new("RGB", (40, 40)).save("images/class/x.png")
    weights = ("--checkpoint", "weights.safetensors")
    run(MODEL, *SMALL, *weights, "--calibrate", "images", "--output", "fit", "--quiet")
    names = hashlib.sha256(b"01.png\n02.png\nclass/x.png").hexdigest()
    assert stored_provenance("fit")["calibration"] == {"number": 3, "names": names}


# --- What timm's config says about the weights


def stated_origin(config):
    return {name: config[name] for name in ORIGIN_KEYS if config.get(name)}


def folder_config(folder):
    return json.loads((Path(folder) / CONFIG).read_text())["pretrained_cfg"]


def test_only_timms_own_weights_are_called_timms(tmp_path, monkeypatch):
    """Even after loading by dcls-convert or timm, saving again, and folding."""
    model = timm.create_model(TINY)
    timms = stated_origin(model.pretrained_cfg)
    assert {"tag", "license"} <= timms.keys()
    torch.save(model.state_dict(), "w.pth")
    timm.models.save_for_hf(model, "hub", safe_serialization=True)
    monkeypatch.setattr(
        "timm.models._hub.hf_hub_download", lambda repo_id, filename, **_: f"hub/{filename}"
    )
    sizes = ("--dilated-size", 9, "--input-size", "3x32x32", "--init", "largest", "--quiet")
    starts = {
        "random": (*sizes[:4], "--quiet"),
        "file": ("--checkpoint", "w.pth", *sizes),
        "pretrained": ("--pretrained", *sizes),
    }
    for name, options in starts.items():
        expected = timms if name == "pretrained" else {}
        run(TINY, *options, "--output", name)
        assert stated_origin(folder_config(name)) == expected, name
        save_converted(load_converted(name), name, f"{name}-saved")
        by_timm = timm.create_model(f"local-dir:{name}", pretrained=True)
        save_converted(by_timm, name, f"{name}-timm")
        run("fold", name)
        for folder in (f"{name}-saved", f"{name}-timm", f"{name}-folded"):
            assert stated_origin(folder_config(folder)) == expected, folder
            assert stored_provenance(folder) == stored_provenance(name)


def test_a_model_of_the_users_own_in_memory_keeps_its_config():
    model = timm.create_model(TINY)
    timms = stated_origin(model.pretrained_cfg)
    report = convert_(model, dilated_size=9, init="random")
    save_converted(copy.deepcopy(model), report.plan, "out")
    assert stated_origin(folder_config("out")) == timms
    assert stored_provenance("out")["request"]["dilated_size"] == 9


# --- Reading a provenance


def test_inspect_shows_the_provenance(tmp_path):
    run(NET, "--dilated-size", 9, "--seed", 3, "--output", "out", "--quiet")
    out, _ = run("inspect", "out")
    words = " ".join(out.split())
    assert f"dcls-convert {NET} --dilated-size 9 --seed 3 --output out --quiet" in words
    assert "Start: random, seed 3" in words
    assert f"torch {torch.__version__}" in words
    out, _ = run("inspect", "out", "--json")
    assert json.loads(out)["provenance"] == stored_provenance("out")


def test_a_provenance_is_data_and_is_read_as_strictly_as_a_plan():
    run(NET, "--dilated-size", 9, "--output", "out", "--quiet")

    def changed(**entries):
        edit_json(
            Path("out") / CONFIG,
            lambda config: config["dcls_convert"]["provenance"].update(entries),
        )

    changed(command="rm -rf \x1b[31m")
    assert any("the config was edited" in problem for problem in problems(verify("out")))
    assert printable(open_checkpoint("out").provenance.command) == "rm -rf \\x1b[31m"
    with pytest.raises(CheckpointError, match="the config was edited"):
        load_converted("out", trust_code=True)
    changed(format=2, more=1)
    with pytest.raises(
        CheckpointError, match="provenance: has format 2, but this dcls-convert reads"
    ):
        open_checkpoint("out")
    changed(format=1)
    with pytest.raises(CheckpointError, match="provenance: more: "):
        open_checkpoint("out")
