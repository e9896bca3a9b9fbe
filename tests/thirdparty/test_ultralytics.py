"""Ultralytics fuses normalisations into kernels, and keeps whole models in its files."""

import warnings

import pytest
import torch

from dcls_convert import convert_
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.networks.outputs import relative_error

pytestmark = pytest.mark.thirdparty
SIZE = (3, 64, 64)


@pytest.fixture
def yolo():
    """The object of Ultralytics, with a converted model in float64."""
    # Not when tests are collected: it writes settings, for which conftest.py first makes a folder.
    YOLO = pytest.importorskip("ultralytics", reason="not installed", exc_type=ImportError).YOLO
    torch.manual_seed(0)
    yolo = YOLO("yolov8n.yaml", verbose=False)
    yolo.model.double().eval()
    convert_(yolo.model, dilated_size=7, init="random", input_size=SIZE)
    return yolo


def boxes(model):
    images = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).dtype)
    with torch.no_grad():
        return model(images)[0]


def test_fusing_folds_the_kernels_first(yolo):
    before = boxes(yolo.model)
    yolo.fuse()
    assert not any(isinstance(module, DclsConvNd | torch.nn.BatchNorm2d) for module in yolo.model.modules())
    assert relative_error(before, boxes(yolo.model)) < 1e-9


def test_a_file_of_ultralytics_holds_the_converted_model(yolo, tmp_path):
    from ultralytics import YOLO

    yolo.model.float()
    yolo.save(tmp_path / "converted.pt")  # in half precision
    with warnings.catch_warnings(action="ignore"):
        again = YOLO(tmp_path / "converted.pt").model.float().eval()
    wanted = boxes(yolo.model.half().float())
    assert any(isinstance(module, DclsConvNd) for module in again.modules())
    assert relative_error(wanted, boxes(again)) == 0
    again.fuse()
    assert relative_error(wanted, boxes(again)) < 1e-3
