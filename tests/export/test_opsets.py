"""An ONNX model is written with the requested opset, or not at all."""

from pathlib import Path

import onnx
import pytest

import dcls_convert.export.onnx
from dcls_convert.errors import DclsConvertError
from dcls_convert.export.fold import fold_checkpoint
from dcls_convert.export.onnx import MIN_DYNAMO_OPSET
from dcls_convert.options import DEFAULT_OPSET, OPSETS

from .running import FLOAT32_ERROR, error_of

NEWER = [MIN_DYNAMO_OPSET, DEFAULT_OPSET, OPSETS[-1]]


def opset_of(path):
    (opset,) = onnx.load(path).opset_import
    return opset.version


@pytest.mark.parametrize(
    "opset",
    [
        *(OPSETS[0], 13, MIN_DYNAMO_OPSET - 1),
        *(pytest.param(opset, marks=pytest.mark.slow) for opset in NEWER),
    ],
)
def test_both_exporters_write_the_requested_opset_for_any_batch_size(checkpoints, opset):
    written = fold_checkpoint(checkpoints / "convnext", "onnx", Path("x.onnx"), opset=opset)
    assert written.opset == opset_of("x.onnx") == opset
    assert written.batch is None
    for batch in (1, 2, 5):
        assert error_of(checkpoints / "convnext", written, batch) < FLOAT32_ERROR


@pytest.mark.slow
def test_the_default_opset_is_reported(checkpoints):
    written = fold_checkpoint(checkpoints / "Plain", "onnx", trust_code=True)
    assert written.opset == opset_of("Plain.onnx") == DEFAULT_OPSET


@pytest.mark.parametrize("name", ["Branching", "ByImage"])
def test_the_older_exporter_takes_the_users_own_models(checkpoints, name):
    written = fold_checkpoint(checkpoints / name, "onnx", opset=17, trust_code=True)
    assert written.batch == (1 if name == "ByImage" else None)
    assert error_of(checkpoints / name, written, batch=written.batch or 2) < FLOAT32_ERROR


@pytest.mark.slow
def test_a_model_with_another_opset_than_requested_is_not_kept(checkpoints, monkeypatch):
    """For this model, torch's newer exporter silently writes 18 if a lower opset is requested."""
    monkeypatch.setattr(dcls_convert.export.onnx, "MIN_DYNAMO_OPSET", OPSETS[0])
    with pytest.raises(DclsConvertError, match="torch wrote opset 18 for this model, not opset 12"):
        fold_checkpoint(checkpoints / "convnext", "onnx", opset=12)
    assert list(Path().iterdir()) == []


def test_weights_in_a_second_file_need_the_newer_exporter(checkpoints, monkeypatch):
    monkeypatch.setattr(dcls_convert.export.onnx, "MAX_IN_ONE_FILE", 0)
    with pytest.raises(DclsConvertError, match=r"do not fit into one file; .* from opset 18 on"):
        fold_checkpoint(checkpoints / "Plain", "onnx", opset=17, trust_code=True)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("opset", [OPSETS[0] - 1, OPSETS[-1] + 1])
def test_unsupported_opsets_are_refused_from_python_too(checkpoints, opset):
    with pytest.raises(DclsConvertError, match=rf"opset {opset}: give an integer from 7 to 25"):
        fold_checkpoint(checkpoints / "Plain", "onnx", opset=opset, trust_code=True)
