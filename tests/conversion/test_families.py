"""Nothing of a model is lost: in all families, an exact start keeps the outputs."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dcls_convert import convert_, predict_report
from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource

from ..reports.measured import measure_report
from ..rules import rules_of

FACTORISED = rules_of({"match": {"kernel_size": [1, 7]}}, {"match": {"kernel_size": [7, 1]}})
SMALL_COAT = {"img_size": 64, "embed_dims": (16,) * 4, "serial_depths": (1,) * 4}
# All other families are marked `slow`.
QUICK = ("test_resnet", "test_efficientnet", "test_nfnet", "coat_lite_tiny")
# One small model of each family: arguments, input size, window (9 by default) and rules. Comments
# say what its convolutions have.
FAMILIES = {
    "test_resnet": {"window": 5},
    "test_efficientnet": {"options": {"pad_type": "same"}},  # dynamic SAME padding, strides of 2
    "test_nfnet": {"window": 5},  # scaled weight standardisation, gain, grouped
    "coat_lite_tiny": {"options": SMALL_COAT},  # shared instances
    "tf_mixnet_s": {"window": 13},  # sizes from 3 to 11 side by side, dynamic SAME padding
    "inception_v4": {"input": (3, 96, 96), "rules": FACTORISED},
    # Dynamic SAME padding.
    "vit_base_r50_s16_224": {"input": (3, 224, 224), "window": 5, "options": {"depth": 1}},
    "fastvit_t8": {},
    "convmixer_768_32": {},  # padding="same"
    "edgenext_xx_small": {"window": 11},
    "ghostnet_050": {},  # depth multiplier
    "torchvision:vgg11": {"window": 5, "options": {"num_classes": 2}},
    "torchvision:deeplabv3_mobilenet_v3_large": {},  # dilated, a mapping as output
    "torchvision:r2plus1d_18": {"window": 5, "input": (3, 4, 32, 32)},  # 1x3x3 and 3x1x1
}


def build(name, options):
    """Build a model, with noise on parameters that start as zeros and would hide errors."""
    source = ModelSource(name=name if ":" in name else f"timm:{name}", args=options)
    model = build_model(source).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1 or parameter.abs().max() < 1e-4:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def float_tensors(outputs):
    return [leaf for leaf in tree_leaves(outputs) if leaf.is_floating_point()]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
@torch.no_grad()
def test_an_exact_start_keeps_the_outputs(name):
    """In float32, to 1e-5 of the largest output. Also, the report states the cost."""
    family = FAMILIES[name]
    model = build(name, family.get("options", {}))
    size = family.get("input", (3, 64, 64))
    image = torch.rand(1, *size, generator=torch.Generator().manual_seed(2))
    before = float_tensors(model(image))
    options = {"rules": family.get("rules", "auto"), "dilated_size": family.get("window", 9)}
    report = convert_(model, init="exact", input_size=size, **options)
    after = float_tensors(model(image))
    assert all(skipped.reason.startswith(("not matched", "window")) for skipped in report.skipped)
    for old, new in zip(before, after, strict=True):
        assert old.abs().max() > 0
        assert old.std() > 1e-6 * old.abs().max(), "a constant output shows nothing"
        assert (old - new).abs().max() <= 1e-5 * old.abs().max()
    assert predict_report(report.plan).to_dict() == measure_report(model, report.plan)
    assert report.params.after == sum(parameter.numel() for parameter in model.parameters())
    assert report.params.delta == report.params.positions, "weights stay, positions are added"
