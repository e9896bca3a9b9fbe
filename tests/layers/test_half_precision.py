"""Positions learn in networks of half precision: they stay in float32."""

import pytest
import timm
import torch

from dcls_convert import convert_, load_converted, save_converted, tuning
from dcls_convert.layers.position_parameters import position_parameters

IMAGE = (3, 32, 32)


def converted(dtype, interpolation="bilinear", size=9):
    torch.manual_seed(0)
    model = timm.create_model("test_convnext").to(dtype)
    report = convert_(
        model,
        dilated_size=size,
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
    output = model(torch.randn(1, *IMAGE, dtype=dtype))
    assert output.dtype == dtype
    output.float().square().sum().backward()
    for parameter in position_parameters(model):
        assert parameter.tensor.grad.dtype == torch.float32
    save_converted(model, plan, tmp_path / "folder")
    loaded = load_converted(tmp_path / "folder")
    assert dtypes_of(loaded) == {torch.float32}
    for mine, theirs in zip(position_parameters(loaded), position_parameters(model), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor)
    folder = f"local-dir:{tmp_path / 'folder'}"
    assert dtypes_of(timm.create_model(folder, pretrained=True, dtype=dtype)) == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_no_position_is_rounded_when_a_network_changes_its_dtype(dtype):
    model, _ = converted(torch.float32, "gaussian")
    before = [parameter.tensor.detach().clone() for parameter in position_parameters(model)]
    model.to(dtype)
    for parameter, exact in zip(position_parameters(model), before, strict=True):
        assert torch.equal(parameter.tensor, exact.to(parameter.tensor.dtype))


def test_positions_that_are_assigned_in_bfloat16_are_in_float32():
    model, _ = converted(torch.float32)
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert dtypes_of(model) == {torch.float32}


def test_positions_below_float32_are_told_and_the_cure_lets_them_move():
    model, _ = converted(torch.bfloat16, "gaussian", size=17)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert dtypes_of(model) == {torch.bfloat16}
    first = position_parameters(model)[0].tensor
    torch.nn.init.constant_(first, 7.3)
    first.grad = torch.ones_like(first)

    def moves():
        before = first.detach().clone()
        torch.optim.SGD([first], lr=0.01).step()
        return before - first

    assert not moves().any()
    tracker = tuning.PositionTracker(model)
    told = r"positions and \d+ more in torch.bfloat16, in which usual steps are rounded away"
    for call in (lambda: tuning.param_groups(model, lr=1e-3), lambda: tracker.update(0)):
        with pytest.warns(UserWarning, match=told) as warned:
            call()
        assert [warning.filename for warning in warned] == [__file__]
        assert "model.to(torch.bfloat16) gives positions float32" in str(warned[0].message)
    model.to(torch.bfloat16)  # the cure
    assert dtypes_of(model) == {torch.float32}
    assert first.grad.dtype == torch.float32
    assert model.stages[0].blocks[0].conv_dw.weight.dtype == torch.bfloat16
    torch.testing.assert_close(moves(), torch.full_like(first, 0.01), rtol=0, atol=1e-6)
    tuning.param_groups(model, lr=1e-3)  # no warning
    tracker.update(1)
