"""Random starts: the scale of outputs, the source of weights, and where positions are drawn."""

import copy

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from dcls_convert.conversion.in_memory import convert_
from dcls_convert.options import INTERPOLATION_NAMES, POSITIONS
from dcls_convert.reports.report import report_markdown
from dcls_convert.starts.start import has_norms, output_power

from ..planning.nets import IMAGE, Net, depthwise
from ..rules import rules_of

NOISE_SHAPE = (64, 8, 24, 24)


def converted(model, size, image, **options):
    convert_(model, dilated_size=size, init="random", input_size=image, **options)
    return model


@given(
    growth=st.tuples(st.sampled_from([0, 2, 6]), st.sampled_from([0, 4])),
    count=st.integers(1, 9),
    interpolation=st.sampled_from(INTERPOLATION_NAMES),
    positions=st.sampled_from(POSITIONS),
    seed=st.integers(0, 99),
)
def test_without_norms_outputs_for_rectified_noise_keep_their_mean_square(
    growth, count, interpolation, positions, seed
):
    torch.manual_seed(seed)
    conv = nn.Conv2d(8, 8, (3, 5), groups=8, bias=False, dtype=torch.float64)
    size = (3 + growth[0], 5 + growth[1])
    noise = torch.randn(NOISE_SHAPE, dtype=torch.float64).relu()
    before = conv(noise).square().mean()
    options = {"kernel_count": count, "interpolation": interpolation, "positions": positions}
    rules = rules_of({"padding": "any"})
    model = converted(nn.Sequential(conv), size, (8, 24, 24), rules=rules, seed=seed, **options)
    layer = model[0]
    assert output_power(layer.kernel()) == pytest.approx(output_power(conv.weight))
    layer.padding = (0, 0)  # zeros of a padding would lower the mean square
    torch.testing.assert_close(layer(noise).square().mean(), before, rtol=0.1, atol=0)


def test_with_norms_the_weights_of_random_elements_are_cells_of_the_old_kernels():
    for name in ("test_convnext", "test_resnet"):
        model = timm.create_model(name)
        cells = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for module in converted(model, "+4", (3, 64, 64)).modules():
            if hasattr(module, "kernel_count"):
                assert torch.isin(module.weight, cells).all()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("side", ["back", "ahead"])
def test_elements_start_where_the_old_kernel_lies_or_over_what_meets_the_map(side, positions):
    """The window of 40 cells is longer than the map of 30: its farthest cells meet only padding."""
    rules = rules_of({"grow": side, "dilated_size": 40})
    model = nn.Sequential(nn.Conv1d(64, 64, 5, padding=4))
    convert_(
        model,
        rules=rules,
        init="random",
        positions=positions,
        kernel_count=2,
        input_size=(64, 30),
    )
    found = model[0].positions
    if side == "ahead":
        found = -1 - found  # the window's limits are -20 and 19
    low, high = {"normal": (17 - 3, 17 + 2), "kernel": (15, 19), "uniform": (-10, 19)}[positions]
    assert low <= found.min() < low + 2
    assert high - 1 < found.max() <= high


@given(map_size=st.tuples(st.integers(1, 9), st.integers(1, 9)), kernel=st.sampled_from([3, 4]))
def test_uniform_elements_all_meet_the_map_and_the_report_counts_windows_that_exceed_it(
    map_size, kernel
):
    window = kernel + 8
    conv = nn.Conv2d(4, 4, kernel, padding="same", groups=4, bias=False)
    model = nn.Sequential(conv)
    options = {"dilated_size": window, "init": "random", "positions": "uniform", "kernel_count": 9}
    report = convert_(model, input_size=(4, *map_size), **options)
    layer = model[0]
    layer(torch.rand(1, 4, *map_size) + 0.1).sum().backward()
    if kernel % 2:  # even windows are half a cell off the centre of their map
        assert (layer.weight.grad > 0).all()

    dense = layer.fuse()
    dense.weight.grad = None
    dense(torch.rand(1, 4, *map_size) + 0.1).sum().backward()
    assert report.layers_beyond_map == bool((dense.weight.grad == 0).any())
    mentioned = "meet only padding" in report_markdown(report)
    assert mentioned == bool(report.layers_beyond_map)


def test_uniform_elements_that_layers_share_meet_the_maps_of_all_of_them():
    """The maps have 8 cells and 4."""
    model = nn.Sequential(depthwise(3, 64, stride=2, padding=1), depthwise(3, 64))
    rules = rules_of({"stage_pattern": "(?P<both>[01])"})
    converted(model, 17, (64, 8, 8), positions="uniform", rules=rules)
    assert model[1].is_tied
    assert 2.9 < model[0].positions.abs().max() <= 3


def test_norms_are_told_from_other_classes_with_such_names():
    for module in (nn.BatchNorm2d(3), FrozenBatchNorm2d(3), nn.LayerNorm(3)):
        assert has_norms(nn.Sequential(module))
    weight_norm = torch.nn.utils.parametrizations.weight_norm

    class NormalDecoder(nn.Conv2d):
        pass

    networks = [timm.create_model("nf_regnet_b0"), weight_norm(nn.Conv2d(3, 3, 3))]
    for module in (*networks, NormalDecoder(3, 3, 3)):
        assert not has_norms(nn.Sequential(module))


@pytest.mark.parametrize("init", ["fit", "random"])
def test_only_random_starts_depend_on_the_seed_and_none_on_the_global_generator(init):
    unconverted = Net()

    def positions(seed):
        model = copy.deepcopy(unconverted)
        global_state = torch.get_rng_state()
        convert_(model, dilated_size=7, input_size=IMAGE, init=init, seed=seed)
        assert torch.equal(torch.get_rng_state(), global_state)
        torch.rand(5)  # changes the state of the global generator, which must not matter
        return model.layer1[0].positions

    first = positions(0)
    assert torch.equal(first, positions(0))
    assert torch.equal(first, positions(1)) == (init == "fit")


@pytest.mark.parametrize(("positions", "reach"), [("normal", 2.5), ("kernel", 2), ("uniform", 6)])
def test_random_positions_are_near_the_centre_or_over_the_old_kernel_or_over_the_window(
    positions, reach
):
    model = nn.Sequential(depthwise(5, 32))
    convert_(model, dilated_size=13, input_size=(32, 16, 16), init="random", positions=positions)
    drawn = model[0].positions.detach().abs()
    assert drawn.max() <= reach
    if positions != "normal":  # uniform: the mean distance from the centre is half the reach
        assert drawn.max() > 0.95 * reach
        assert drawn.mean() == pytest.approx(reach / 2, rel=0.1)
