"""A converted model comes back from a hub, in other processes too; what goes wrong is told in one line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants

import dcls_convert
from dcls_convert.checkpoints.folder import CONFIG, WEIGHTS

from ..command_line import run
from .folders import convert, edit_json, outputs, seal
from .test_damage import DAMAGES, FLIPPED

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub to httpx

ROOT = Path(__file__).parents[2]
LOAD = """
import sys, timm, torch, dcls_convert
model = timm.create_model(sys.argv[1], pretrained=True).eval()
image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    torch.save(model(image), sys.argv[2])
"""
OPTIONS = ("--dilated-size", 11, "--output", "converted")


def push(hub, model, name, **options):
    """The files that timm's `push_to_hf_hub` uploads."""
    timm.models.save_for_hf(model, "pushed", safe_serialization=True)
    hub.upload(Path("pushed"), name, **options)


def elsewhere(hub, name, home, **more):
    """The outputs of a model that another process loads, with the cache in another folder."""
    environment = {**os.environ, **hub.environment, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, "-c", LOAD, f"hf-hub:{name}", "outputs.pt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load("outputs.pt")


@pytest.mark.processes
def test_a_pushed_model_comes_back_in_its_revisions_and_offline(here, tmp_path):
    model, home = convert()[0], tmp_path / "home"
    first = outputs(model)
    push(here, model, "me/mine", tag="v1")
    assert torch.equal(elsewhere(here, "me/mine", home), first)
    asked = len(here.requests)
    assert torch.equal(elsewhere(here, "me/mine", home, HF_HUB_OFFLINE="1"), first)
    assert len(here.requests) == asked
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("positions")).add_(0.25)
    push(here, model, "me/mine")
    assert torch.equal(elsewhere(here, "me/mine", home), outputs(model))
    assert torch.equal(elsewhere(here, "me/mine@v1", home), first)


@pytest.mark.parametrize("damage", ["other arguments", FLIPPED])
def test_an_uploaded_folder_is_loaded_and_checked(here, folder, damage):
    here.upload(folder, "me/folder")
    loaded = timm.create_model("hf-hub:me/folder", pretrained=True).eval()
    assert torch.equal(outputs(loaded), outputs(dcls_convert.load_converted(folder)))
    DAMAGES[damage][0](folder, None)
    here.upload(folder, "me/folder")
    with pytest.raises(dcls_convert.CheckpointError, match=r"are not those that were written|was not written with"):
        timm.create_model("hf-hub:me/folder", pretrained=True)


def test_weights_come_from_the_one_file_that_is_checked(here, folder, folders):
    """Not from another that the config names."""
    (folder / "other.safetensors").write_bytes((folders / "seed" / WEIGHTS).read_bytes())
    names = {"hf_hub_filename": "other.safetensors", "custom_load": True}
    edit_json(folder / CONFIG, lambda config: config["pretrained_cfg"].update(names))
    seal(folder)
    here.upload(folder, "me/two")
    loaded = timm.create_model("hf-hub:me/two", pretrained=True).eval()
    assert torch.equal(outputs(loaded), outputs(dcls_convert.load_converted(folder)))


def test_a_model_of_a_hub_is_converted(here, tiny):
    push(here, tiny, "me/plain")
    run("hf-hub:me/plain", "--pretrained", *OPTIONS, "--init", "exact")
    torch.testing.assert_close(outputs(dcls_convert.load_converted("converted")), outputs(tiny))


def error_line(*arguments):
    """The last line of stderr, which is the error; the hub's client tells of its trials before."""
    out, err = run(*arguments, code=2)
    assert out == ""
    assert err.count("error:") == 1
    return err.splitlines()[-1]


def test_what_a_hub_refuses_is_one_line(here):
    message = error_line("hf-hub:me/none", "--pretrained", *OPTIONS)
    assert message.startswith("error: hf-hub:me/none: cannot be built: ")
    assert f"{here.url} has no such repository, or it is private and there is no token for it (HF_TOKEN)" in message
    assert not Path("converted").exists()


def test_a_hub_that_is_down_is_one_line(here, monkeypatch):
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(here.url, "http://127.0.0.1:1")
    for module in (constants, huggingface_hub.file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    line = error_line("hf-hub:me/plain", *OPTIONS)
    assert re.match("error: hf-hub:me/plain: cannot be built: (ConnectError|ConnectionError): ", line)


def test_weights_that_are_cut_short_on_the_way_are_one_line(here, tiny):
    push(here, tiny, "me/plain")
    here.cut = 100
    line = error_line("hf-hub:me/plain", "--pretrained", *OPTIONS)
    assert line.startswith("error: hf-hub:me/plain: its pretrained weights cannot be loaded: ")
    assert not Path("converted").exists()
