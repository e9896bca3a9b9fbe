"""Positions learn in networks of half precision: they stay in float32."""

import pytest
import timm
import torch
from torch import nn

from dcls_convert import convert_, load_converted, save_converted, tuning
from dcls_convert.networks.position_parameters import position_parameters

IMAGE = (3, 32, 32)


def converted(dtype, interpolation="bilinear"):
    torch.manual_seed(0)
    model = timm.create_model("test_convnext").to(dtype)
    report = convert_(
        model,
        dilated_size=9,
        init="random",
        positions="kernel",
        interpolation=interpolation,
        input_size=IMAGE,
    )
    return model, report.plan


def dtypes_of(model):
    return {parameter.tensor.dtype for parameter in position_parameters(model)}


@pytest.mark.parametrize(
    ("dtype", "interpolation"), [(torch.bfloat16, "gaussian"), (torch.float16, "bilinear")]
)
def test_positions_and_sigmas_are_in_float32_also_after_saving_and_loading(
    dtype, interpolation, tmp_path
):
    model, plan = converted(dtype, interpolation)
    assert dtypes_of(model) == {torch.float32}
    assert model.stages[0].blocks[0].conv_dw.weight.dtype == dtype
    image = torch.randn(1, *IMAGE, dtype=dtype)
    assert model.eval()(image).dtype == dtype
    save_converted(model, plan, tmp_path / "folder")
    loaded = load_converted(tmp_path / "folder")
    assert dtypes_of(loaded) == {torch.float32}
    for mine, theirs in zip(position_parameters(loaded), position_parameters(model), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor)
    folder = f"local-dir:{tmp_path / 'folder'}"
    assert dtypes_of(timm.create_model(folder, pretrained=True, dtype=dtype)) == {torch.float32}


def test_positions_of_two_cells_and_more_move():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, 7, padding=3, groups=4).to(torch.bfloat16)
    model = nn.Sequential(conv)
    convert_(model, dilated_size=17, init="random", positions="uniform")
    positions = model[0].positions
    far = positions.detach().abs() >= 2
    before = positions.detach().clone()
    optimizer = torch.optim.AdamW(tuning.param_groups(model, lr=1e-4))
    image = torch.randn(2, 4, 20, 20, dtype=torch.bfloat16)
    for _ in range(5):
        optimizer.zero_grad()
        model(image).float().square().mean().backward()
        optimizer.step()
    assert (positions != before)[far].float().mean() > 0.9


def test_positions_that_are_assigned_in_bfloat16_are_in_float32():
    model, _ = converted(torch.float32)
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert dtypes_of(model) == {torch.float32}
