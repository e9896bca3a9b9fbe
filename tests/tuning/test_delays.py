"""The schedule of delays: sigma shrinks, then positions are rounded."""

import itertools

import pytest
import torch
from torch import nn

import dcls_convert
from dcls_convert import tuning
from dcls_convert.errors import DclsConvertError
from dcls_convert.running.compare_outputs import relative_error

WINDOW = 25
RULES = {
    "format": 1,
    "rules": [
        {
            "match": {"dims": 1, "kernel_size": 1},
            "grow": "back",
            "dilated_size": WINDOW,
            "kernel_count": 1,
            "interpolation": "gaussian",
        }
    ],
}


def network():
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 8, 1, bias=False), nn.ReLU(), nn.Conv1d(8, 3, 1, bias=False)]
    return nn.Sequential(*layers)


def converted(tie="none"):
    model = network()
    report = dcls_convert.convert_(
        model, rules=RULES, init="random", positions="uniform", tie=tie, input_size=(4, 60)
    )
    return model, report


def shifted(layer, spikes):
    """Sum of inputs (N, I, T), each shifted by the delays of a layer and weighted."""
    delays = WINDOW // 2 - layer.positions[0, :, :, 0]  # (O, I)
    outputs = spikes.new_zeros(len(spikes), layer.out_channels, spikes.shape[-1])
    for output, channel in torch.cartesian_prod(*map(torch.arange, delays.shape)):
        delay = int(delays[output, channel])
        weight = layer.weight[output, channel, 0]
        steps = spikes[:, channel, : spikes.shape[-1] - delay]
        outputs[:, output, delay:] += weight * steps
    return outputs


def test_sigma_shrinks_by_a_constant_factor_from_half_the_window_to_the_initial_one():
    model, _ = converted()
    widths = []
    for epoch in range(6):
        tuning.shrink_sigma_(model, epoch / 4)
        (value,) = model[0].sigma.unique().tolist()
        widths.append(value - 0.27)
        assert torch.equal(model[2].sigma.unique(), model[0].sigma.unique())
    assert widths[0] == pytest.approx(WINDOW // 2)
    assert widths[4:] == pytest.approx([0.23, 0.23])  # the authors' last SIG
    factors = [later / earlier for earlier, later in itertools.pairwise(widths[:5])]
    assert factors == pytest.approx([factors[0]] * 4, rel=1e-4)
    assert not model[0].sigma.requires_grad


def test_after_rounding_layers_shift_by_whole_steps_and_are_saved_and_folded_so(tmp_path):
    model, report = converted()
    tuning.shrink_sigma_(model, 1)
    tuning.round_positions_(model)
    spikes = (torch.rand(2, 4, 60) < 0.2).float()
    with torch.no_grad():
        expected = shifted(model[2], shifted(model[0], spikes).relu())
    torch.testing.assert_close(model(spikes), expected)
    dcls_convert.save_converted(model, report.plan, tmp_path / "delays")
    loaded = dcls_convert.load_converted(tmp_path / "delays", model=network())
    torch.testing.assert_close(loaded(spikes), expected)
    assert dcls_convert.verify_folder(tmp_path / "delays", model=network()).ok
    dcls_convert.fold_to_dense_(loaded)
    torch.testing.assert_close(loaded(spikes), expected)


def test_rounded_positions_are_no_longer_trained_and_sigmas_are_gone():
    model, _ = converted()
    model(torch.rand(1, 4, 60)).sum().backward()
    tuning.round_positions_(model)
    assert {name.split(".")[1] for name in tuning.no_weight_decay(model)} == {"positions"}
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert trained == ["0.weight", "2.weight"]
    assert model[0].positions.grad is None


def test_tied_layers_are_rounded_together():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*[nn.Conv1d(4, 4, 1) for _ in range(3)]))
    rules = {"format": 1, "rules": [{**RULES["rules"][0], "stage_pattern": "^0"}]}
    dcls_convert.convert_(
        model, rules=rules, init="random", positions="uniform", input_size=(4, 60)
    )
    assert model[0][1].is_tied
    tuning.shrink_sigma_(model, 0.5)
    tuning.round_positions_(model)
    assert model[0][1].sigma is None
    spikes = (torch.rand(2, 4, 60) < 0.2).float()
    layer = model[0][1]
    torch.testing.assert_close(layer(spikes), shifted(layer, spikes) + layer.bias.reshape(-1, 1))


def test_the_narrower_elements_are_at_last_the_less_rounding_changes():
    spikes = (torch.rand(2, 4, 60) < 0.2).float()
    changes = []
    for last in (0.5, 0.3):
        model, _ = converted()
        with torch.no_grad():
            model[0].positions.round_()
        tuning.shrink_sigma_(model, 1, last=last)
        before = model[0](spikes)
        tuning.round_positions_(model)
        changes.append(relative_error([(before, model[0](spikes))]))
    assert changes[0] > 0.1
    assert changes[1] < 0.01
    with pytest.raises(DclsConvertError, match="last="):
        tuning.shrink_sigma_(converted()[0], 1, last=0.27)


@pytest.mark.parametrize("progress", [-0.1, float("nan"), float("inf"), "0", None])
def test_other_progress_is_refused(progress):
    model, _ = converted()
    with pytest.raises(DclsConvertError, match="progress="):
        tuning.shrink_sigma_(model, progress)


def test_a_model_without_sigmas_is_refused():
    with pytest.raises(DclsConvertError, match="no Gaussian elements"):
        tuning.shrink_sigma_(network(), 0)
    with pytest.raises(DclsConvertError, match="no DCLS layers"):
        tuning.round_positions_(network())
