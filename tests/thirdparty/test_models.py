"""Models of other libraries are converted, saved, loaded, folded and trained; a table says how each
did.

`pytest -m thirdparty -n 0 -s tests/thirdparty` prints the table.
"""

import contextlib
import importlib.metadata
import io
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dcls_convert import convert_, fold_to_dense_, load_converted, save_converted, tuning
from dcls_convert.checkpoints.verify import verify_folder
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.running.compare_outputs import max_relative_error
from dcls_convert.running.run import running

from ..command_line import run
from ..thirdparty import models

pytestmark = pytest.mark.thirdparty

FLOAT64 = 1e-9  # of the largest output
HEAD = ("library", "version", "model", "converted layers", "window", "stages")


@dataclass(frozen=True)
class Case:
    """A model of another library, and what is known of it."""

    library: str  # as pip knows it
    factory: str  # in models.py
    model: str
    window: int
    layers: int  # converted
    stages: int  # of the converted layers
    size: tuple[int, ...] = (3, 64, 64)

    def build(self):
        module = self.library.removesuffix("_torch").replace("-", "_")
        pytest.importorskip(module, reason="not installed", exc_type=ImportError)
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            torch.manual_seed(0)
            return getattr(models, self.factory)().eval()

    def images(self, dtype=torch.float64):
        return torch.randn(2, *self.size, generator=torch.Generator().manual_seed(0), dtype=dtype)


HF, SMP, MONAI, CLIP, YOLO = (
    "transformers segmentation-models-pytorch monai open_clip_torch ultralytics".split()
)
CASES = [
    Case(HF, "hf_convnext", "ConvNeXt, small", 11, 6, 4),
    Case(HF, "hf_convnext_tiny", "ConvNeXt-T", 17, 18, 4),
    Case(HF, "hf_convnext_v2", "ConvNeXt V2, small", 11, 6, 4),
    Case(HF, "hf_resnet", "ResNet, small", 7, 12, 4),
    Case(HF, "hf_regnet", "RegNet, small", 7, 6, 4),
    Case(HF, "hf_efficientnet", "EfficientNet, small", 9, 4, 3),
    Case(SMP, "smp_unet_convnext", "Unet, timm's test_convnext", 11, 7, 3),
    Case(SMP, "smp_unet_resnet", "Unet, timm's test_resnet", 7, 20, 11),
    Case(MONAI, "monai_unet", "UNet, 3-D, with residual units", 5, 8, 4, size=(1, 16, 16, 16)),
    Case(MONAI, "monai_basic_unet", "BasicUNet, 3-D", 5, 17, 9, size=(1, 32, 32, 32)),
    Case(CLIP, "open_clip_small", "timm's test_convnext", 11, 9, 4),
    Case(CLIP, "open_clip_convnext_tiny", "convnext_tiny", 17, 18, 4),
    Case(YOLO, "yolov8n", "yolov8n.yaml", 7, 38, 4),
    Case(YOLO, "yolo26n", "yolo26n.yaml", 7, 14, 3),
]


@pytest.fixture(scope="module")
def table():
    """Rows of the models that passed; printed when all are through."""
    rows = []
    yield rows
    print(
        "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows))
    )


def row(case, report):
    layers = f"{len(report.layers)} of {len(report.layers) + len(report.skipped)}"
    size = "x".join([str(case.window)] * (len(case.size) - 1))
    version = importlib.metadata.version(case.library)
    stages = ", ".join(sorted({layer.stage for layer in report.layers}))
    return case.library, version, case.model, layers, size, stages


def outputs(model, images):
    with running(model) as run:
        return run(images)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.factory)
def test_a_model_is_converted_saved_loaded_trained_and_folded(table, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = case.build().double()
    before = outputs(model, case.images())
    report = convert_(model, dilated_size=case.window, init="exact", input_size=case.size)
    assert max_relative_error(before, outputs(model, case.images())) < FLOAT64
    assert len(report.layers) == case.layers
    assert len({layer.stage for layer in report.layers}) == case.stages
    train_(model, case)
    trained = outputs(model, case.images())
    save_converted(model, report.plan, "saved")
    loaded = load_converted("saved", model=case.build().double())
    assert max_relative_error(trained, outputs(loaded, case.images())) == 0
    assert fold_to_dense_(loaded) == len(report.layers)
    assert max_relative_error(trained, outputs(loaded, case.images())) < FLOAT64
    size = "x".join(map(str, case.size))
    factory = f"{models.__name__}:{case.factory}"
    run(factory, "--dilated-size", case.window, "--input-size", size, "--output", "converted")
    assert verify_folder("converted", trust_code=True).ok
    table.append(row(case, report))


def train_(model, case):
    """Check that each positions tensor moves.

    In two steps: blocks whose last normalisation starts at zero, as timm's, have no gradient in the
    first.
    """
    positions = {name: one for name, one in model.named_parameters() if name.endswith("positions")}
    before = {name: one.detach().clone() for name, one in positions.items()}
    optimizer = torch.optim.AdamW(tuning.param_groups(model.train(), lr=1e-2))
    for _ in range(2):
        with warnings.catch_warnings(action="ignore"):
            answers = tree_leaves(model(case.images()))
        answers = [one for one in answers if getattr(one, "requires_grad", False)]
        sum((one * torch.randn_like(one)).sum() for one in answers).backward()
        optimizer.step()
    tuning.clamp_positions_(model)
    assert positions
    assert not [name for name, one in positions.items() if torch.equal(one, before[name])]


# Ultralytics fuses normalisations into kernels, and keeps whole models in its files.


@pytest.fixture
def yolo():
    """The object of Ultralytics, with a converted model in float64."""
    # Not when tests are collected: it writes settings, for which conftest.py first makes a folder.
    YOLO = pytest.importorskip("ultralytics", reason="not installed", exc_type=ImportError).YOLO
    torch.manual_seed(0)
    yolo = YOLO("yolov8n.yaml", verbose=False)
    yolo.model.double().eval()
    convert_(yolo.model, dilated_size=7, init="random", input_size=(3, 64, 64))
    return yolo


def boxes(model):
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(
        next(model.parameters()).dtype
    )
    with torch.no_grad():
        return model(images)[0]


def test_fusing_scales_the_weights_of_the_elements(yolo):
    for module in yolo.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    before = boxes(yolo.model)
    yolo.fuse()
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in yolo.model.modules())
    assert max_relative_error(before, boxes(yolo.model)) < FLOAT64


def test_a_file_of_ultralytics_holds_the_converted_model(yolo, tmp_path):
    from ultralytics import YOLO

    yolo.model.float()
    yolo.save(tmp_path / "converted.pt")  # in half precision
    with warnings.catch_warnings(action="ignore"):
        again = YOLO(tmp_path / "converted.pt").model.float().eval()
    wanted = boxes(yolo.model.half().float())
    assert any(isinstance(module, DclsConvNd) for module in again.modules())
    assert max_relative_error(wanted, boxes(again)) == 0
    again.fuse()
    assert max_relative_error(wanted, boxes(again)) < 1e-3
