"""An ONNX model is written with the requested opset, or not at all."""

from pathlib import Path

import onnx
import pytest

from dcls_convert.errors import DclsConvertError
from dcls_convert.export.fold import fold_checkpoint
from dcls_convert.options import DEFAULT_OPSET, OPSETS

from .running import FLOAT32_ERROR, error_of


def opset_of(path):
    (opset,) = onnx.load(path).opset_import
    return opset.version


@pytest.mark.slow
@pytest.mark.parametrize("opset", [OPSETS[0], DEFAULT_OPSET, OPSETS[-1]])
def test_the_requested_opset_is_written_for_any_batch_size(checkpoints, opset):
    written = fold_checkpoint(checkpoints / "convnext", "onnx", Path("x.onnx"), opset=opset)
    assert written.opset == opset_of("x.onnx") == opset
    assert written.batch is None
    for batch in (1, 2, 5):
        assert error_of(checkpoints / "convnext", written, batch) < FLOAT32_ERROR


@pytest.mark.slow
def test_the_default_opset_is_reported(checkpoints):
    written = fold_checkpoint(checkpoints / "Plain", "onnx", trust_code=True)
    assert written.opset == opset_of("Plain.onnx") == DEFAULT_OPSET


@pytest.mark.slow
def test_a_model_with_another_opset_than_requested_is_not_kept(checkpoints, monkeypatch):
    """torch's exporter silently writes another opset where it cannot convert to the requested."""
    monkeypatch.setattr("dcls_convert.export.fold.OPSETS", range(7, 26))
    with pytest.raises(DclsConvertError, match="torch wrote opset 18 for this model, not opset 12"):
        fold_checkpoint(checkpoints / "convnext", "onnx", opset=12)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("opset", [OPSETS[0] - 1, OPSETS[-1] + 1])
def test_unsupported_opsets_are_refused_from_python_too(checkpoints, opset):
    with pytest.raises(DclsConvertError, match=rf"opset {opset}: give an integer from 18 to 25"):
        fold_checkpoint(checkpoints / "Plain", "onnx", opset=opset, trust_code=True)
