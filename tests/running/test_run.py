"""A network is run in one way: it sees copies, and afterwards nothing of it has changed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert import convert_, find_convs, fold_to_dense_, save_converted, verify_folder
from dcls_convert.networks.measure import measure
from dcls_convert.running.run import running

from ..model_state import state_of

IMAGE = (3, 12, 12)


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.use = use

    def energy(self, x):
        return F.softplus(self.conv(self.stem(x)))

    def forward(self, x):
        return self.use(self, x)


def in_place(net, x):
    x.sub_(0.5).div_(0.2)
    return net.energy(x)


def force(net, x):
    x = x.detach().requires_grad_(True)
    return -torch.autograd.grad(net.energy(x).sum(), x)[0]


def force_by_backward(net, x):
    x = x.detach().requires_grad_(True)
    net.energy(x).sum().backward()
    return x.grad


def unrolled(net, x):
    z = x.clone().requires_grad_(True)
    for _ in range(2):
        loss = (z - x).square().mean() + net.energy(z).square().mean()
        z = z - 0.5 * torch.autograd.grad(loss, z, create_graph=True)[0]
    return z


def bounded(net, x):
    with torch.no_grad():
        net.stem.weight.clamp_(-0.05, 0.05)
        net.stem.bias.data.add_(1)
    net.stem.requires_grad_(False)
    return net.energy(x)


def halved(net, x):
    net.stem.weight.data = net.stem.weight.data.half().float() * 0.5
    net.conv.bias.data = net.conv.bias.data[:1]
    return net.energy(x) if len(net.conv.bias) == 8 else F.conv2d(x, net.stem.weight)


USES = [in_place, force, force_by_backward, unrolled, bounded]


def expected_outputs(net, x):
    with running(net) as run:
        return run(x.clone()).detach()


@pytest.mark.parametrize("use", [*USES, halved])
def test_runs_are_alike_and_leave_nothing_behind(use):
    net = Net(use)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(net)
    gradients = [parameter.grad for parameter in net.parameters()]
    x = torch.rand(2, *IMAGE)
    x_before = x.clone()
    with running(net) as run:
        first, second = run(x), run(x)
    assert torch.equal(first, second)
    assert torch.equal(x, x_before)
    assert net.training
    assert state_of(net) == before
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("use", USES)
def test_a_conversion_measures_compares_saves_and_folds_such_a_network(use, tmp_path):
    net = Net(use).eval()
    x = torch.rand(2, *IMAGE)
    if use is not bounded:  # which changes its parameters at each call
        expected = net(x.clone()).detach()
    before = state_of(net)
    assert find_convs(net, IMAGE).not_measured is None
    assert state_of(net) == before
    report = convert_(net, kernel_count="exact", init="exact", dilated_size=9, input_size=IMAGE)
    assert report.not_measured is None
    assert [layer.name for layer in report.layers] == ["conv"]
    save_converted(net, report.plan, tmp_path / "saved")
    outputs = verify_folder(tmp_path / "saved", model=Net(use)).checks[-1]
    assert (outputs.name, outputs.ok) == ("outputs", True)
    fold_to_dense_(net)
    if use is not bounded:
        torch.testing.assert_close(net(x.clone()).detach(), expected)


def test_small_parameters_that_share_memory_keep_their_values():
    net = Net(lambda net, x: net.energy(x) + net.first.sum() + net.second.sum())
    memory = torch.zeros(2, 40_000)
    net.first = nn.Parameter(memory)
    net.second = nn.Parameter(memory.view(-1))
    find_convs(net, IMAGE)
    assert not memory.any()


def test_inputs_may_have_many_axes():
    class LightField(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            views = x.permute(0, 2, 3, 1, 4, 5)
            return self.conv(views.flatten(0, 2)).view(views.shape).permute(0, 3, 1, 2, 4, 5)

    convs = find_convs(LightField(), example_inputs=torch.randn(1, 3, 5, 5, 12, 14))
    assert convs.not_measured is None


def test_a_calibration_of_a_network_that_changes_its_input_reports_the_same():
    def by_copy(net, x):
        return net.energy((x - 0.5) / 0.2)

    images = torch.rand(12, *IMAGE)
    reports = []
    for use in (in_place, by_copy):
        torch.manual_seed(0)
        net = Net(use)
        reports.append(convert_(net, dilated_size=7, calibration=images, input_size=IMAGE))
    first, second = (report.outcome.output_error for report in reports)
    assert first == pytest.approx(second, rel=1e-3)


def test_an_output_is_traced_once_though_forward_is_tried_twice():
    with_gradients, without = Net(force), Net(lambda net, x: net.energy(x))
    of_force = find_convs(with_gradients, IMAGE)
    plain = find_convs(without, IMAGE)
    for site, other in zip(of_force.sites, plain.sites, strict=True):
        assert site.output_positions == other.output_positions
    assert of_force.macs > plain.macs  # the differentiation counts, too


class FramesInBatch(nn.Module):
    """Shifts channels between the 4 frames that a batch holds."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        frames = x.view(-1, 4, *x.shape[1:])
        moved = torch.cat([frames[:, 1:, :2], frames[:, :1, :2]], 1)
        return self.second(torch.cat([moved, frames[:, :, 2:]], 2).view_as(x))


class Groups(FramesInBatch):
    """Compares each image with the mean of its group of 4."""

    def forward(self, x):
        x = self.first(x)
        groups = x.view(4, -1, *x.shape[1:])
        return self.second((groups - groups.mean(0)).view_as(x))


@pytest.mark.parametrize("build", [FramesInBatch, Groups])
def test_a_batch_is_given_as_it_is_where_one_image_fails(build):
    images = torch.randn(4, *IMAGE)
    by_place = find_convs(build(), example_inputs=images)
    by_name = find_convs(build(), example_inputs={"x": images})
    assert by_place.inputs[0].shape == (4, *IMAGE)
    assert (by_place.macs, by_place.not_measured) == (by_name.macs, None)
    assert by_place.sites == by_name.sites
    assert convert_(build(), dilated_size=7, example_inputs=images, init="random").layers


@pytest.mark.parametrize("low", [0.0, 0.5])
def test_inputs_have_the_range_of_the_example(low):
    ranges = []

    def note_range(net, x):
        ranges.append((float(x.min()), float(x.max())))
        return net.energy(x)

    example = low + (1 - low) * torch.rand(1, *IMAGE)
    report = convert_(Net(note_range), dilated_size=9, example_inputs=example, init="random")
    assert report.plan.inputs[0].range == (float(example.min()), float(example.max()))
    for least, most in ranges:
        assert low <= least <= most <= 1


@pytest.mark.parametrize("domain", [torch.log, torch.sqrt, lambda x: x**0.3, lambda x: 1 / x.log()])
def test_where_normal_values_give_no_numbers_inputs_are_between_0_and_1(domain):
    convs = find_convs(Net(lambda net, x: net.energy(domain(x))), IMAGE)
    assert convs.inputs[0].range == (0.0, 1.0)
    assert convs.not_measured is None


def test_a_model_without_numbers_is_not_measured():
    convs = find_convs(Net(lambda net, x: net.energy(x) / 0 * 0), IMAGE)
    assert "no finite numbers" in convs.not_measured


def test_measuring_runs_an_ordinary_network_a_few_times():
    calls = 0

    def count(net, x):
        nonlocal calls
        calls += 1
        return net.energy(x)

    net = Net(count)
    inputs = find_convs(net, IMAGE).inputs
    calls = 0
    measure(net, {"conv": net.conv}, inputs)
    assert calls <= 6
