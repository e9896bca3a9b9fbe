"""Loading leaves a model that does not fit unchanged, and works on the meta device."""

import pytest
import timm
import torch

from dcls_convert import load_converted
from dcls_convert.errors import CheckpointError

from ..command_line import imported_by
from ..model_state import state_of
from .folders import convert, save


def test_a_model_that_does_not_fit_stays_as_it_was(tmp_path):
    folder = save(tmp_path / "folder", *convert("timm:test_convnext"))
    model = timm.create_model("test_convnext", num_classes=7)
    before = state_of(model)
    with pytest.raises(CheckpointError, match="has shape"):
        load_converted(folder, model=model)
    assert state_of(model) == before


def test_a_given_model_stays_on_its_device(tmp_path, monkeypatch):
    folder = save(tmp_path / "folder", *convert("timm:test_convnext"))
    model = timm.create_model("test_convnext")
    monkeypatch.setattr(model, "to", lambda *_: pytest.fail("must not be moved"))
    assert load_converted(folder, model=model) is model


def test_a_converted_model_is_created_on_the_meta_device_like_timms_own(tmp_path):
    save(tmp_path / "in", *convert("timm:test_convnext"))
    with torch.device("meta"):
        model = timm.create_model(f"local-dir:{tmp_path / 'in'}")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_loading_a_folder_imports_neither_calibration_nor_images_nor_the_authors_format(tmp_path):
    folder = save(tmp_path / "in", *convert("timm:test_convnext"))
    load = f"import dcls_convert, timm; timm.create_model('local-dir:{folder}', pretrained=True)"
    done, imported = imported_by("-c", load)
    assert done.returncode == 0, done.stderr
    ours = {name for name in imported if name.startswith("dcls_convert.")}
    assert "dcls_convert.checkpoints.timm_model" in ours
    assert not [name for name in ours if ".starts." in name]
    assert not any(name.endswith((".authors", ".in_memory")) for name in ours)
