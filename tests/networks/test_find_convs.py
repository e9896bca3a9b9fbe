"""`find_convs` finds every convolution once, as it is, and leaves the model as it was."""

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn.utils import parametrizations, prune

from dcls_convert import plan_conversion
from dcls_convert.errors import PlanError
from dcls_convert.networks.building import build_model
from dcls_convert.networks.find_convs import find_convs, find_convs_for
from dcls_convert.networks.source import ModelSource
from dcls_convert.networks.torchvision_inputs import assumed_inputs
from dcls_convert.reports.report import predict_report

from ..model_state import state_of
from ..planning.nets import depthwise

SPATIAL = {1: (14,), 2: (9, 14), 3: (5, 9, 7)}  # never square


class Holder(nn.Module):
    """One convolution among other things; the input has 4 channels."""

    def __init__(self, conv, call=lambda conv, x: conv(x).relu()):
        super().__init__()
        self.conv = conv
        self.call = call

    def forward(self, x):
        return self.call(self.conv, x)


class WithOrdinary(nn.Module):
    """An ordinary convolution, and after it a module that may be unusual."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd
        self.ordinary = depthwise()

    def forward(self, x):
        return self.odd(self.ordinary(x))


class OwnCall(nn.Conv2d):
    def __call__(self, x):
        return super().__call__(x.flip(-1))


FORMS = {
    "depthwise with multiplier": (
        "depthwise",
        lambda: nn.Conv2d(4, 12, (5, 3), groups=4, bias=False),
    ),
    "dense": (
        "dense",
        lambda: nn.Conv2d(4, 6, (3, 5), (1, 2), (2, 0), dilation=(2, 1), padding_mode="reflect"),
    ),
    "1-D": ("depthwise", lambda: nn.Conv1d(4, 8, 5, groups=4, stride=2)),
    "3-D": ("depthwise", lambda: nn.Conv3d(4, 4, (3, 5, 1), groups=4, padding=(1, 0, 0))),
}


# Fields of a site that a convolution has under the same name.
FIELDS = (
    "in_channels",
    "out_channels",
    "groups",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "padding_mode",
)


@pytest.mark.parametrize("form", FORMS)
def test_a_site_states_what_its_convolution_is(form):
    kind, build = FORMS[form]
    conv = build()
    dims = len(conv.kernel_size)
    convs = find_convs(Holder(conv), (4, *SPATIAL[dims]))
    (site,) = convs.sites
    output = conv(torch.zeros(1, 4, *SPATIAL[dims]))
    assert convs.skipped == ()
    assert (site.names, site.type, site.kind) == (("conv",), type(conv).__name__, kind)
    for name in FIELDS:
        assert getattr(site, name) == getattr(conv, name), name
    assert site.bias is (conv.bias is not None)
    assert site.dense_weights == conv.weight.numel()
    assert site.input_extent == SPATIAL[dims]
    assert site.macs(site.kernel_size) == convs.macs == output.numel() * conv.weight[0].numel()
    assert convs.params == sum(parameter.numel() for parameter in conv.parameters())


class Twice(nn.Module):
    """One object under two names, used on inputs of 8, 4 and 8 columns."""

    def __init__(self):
        super().__init__()
        self.first = depthwise()
        self.second = nn.Sequential(self.first)

    def forward(self, x):
        return self.first(self.second(self.first(x)[..., ::2]).repeat(1, 1, 1, 2))


def test_a_shared_object_is_one_site_under_all_its_names_and_counts_all_its_calls():
    convs = find_convs(Twice(), (4, 6, 8))
    (site,) = convs.sites
    assert site.names == ("first", "second.0")
    assert site.input_extent == (6, 4)
    assert site.output_positions == 6 * (8 + 4 + 8)
    assert convs.macs == site.macs((3, 3)) == 6 * (8 + 4 + 8) * 4 * 9
    assert convs.params == 4 * 9 + 4


def test_macs_count_the_windows_of_one_image_as_a_batch():
    convs = find_convs(Holder(depthwise(), lambda conv, x: conv(x.repeat(3, 1, 1, 1))), (4, 9, 14))
    (site,) = convs.sites
    assert site.macs((3, 3)) == convs.macs == 3 * 9 * 14 * 4 * 9
    assert site.input_extent == (9, 14)


def changed(conv, change):
    change(conv)
    return conv


def replaced_forward(conv):
    """Set a forward on the instance, as offloading hooks do."""
    forward = conv.forward
    conv.forward = lambda x: forward(x) * 2


ODD = {
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 3, padding=1), "transposed convolution"),
    "own __call__": (lambda: OwnCall(4, 4, 3, padding=1), "has a forward of its own"),
    "forward on the instance": (
        lambda: changed(depthwise(), replaced_forward),
        "forward of its own",
    ),
    "parametrised weight": (
        lambda: parametrizations.weight_norm(depthwise()),
        "its weight is parametrised",
    ),
    "pruned": (
        lambda: prune.l1_unstructured(depthwise(), "weight", 0.5),
        "its parameters are not those expected: unexpected weight_orig; missing weight",
    ),
    "lazy": (lambda: nn.LazyConv2d(4, 3, padding=1), "lazy"),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_unknown_kind_of_convolution_is_skipped_with_the_reason(odd):
    build, reason = ODD[odd]
    model = WithOrdinary(build())
    convs = find_convs(model, (4, 12, 12))
    (skip,) = convs.skipped
    assert [site.name for site in convs.sites] == ["ordinary"]
    assert (skip.name, skip.type) == ("odd", type(model.odd).__name__)
    assert reason in skip.reason
    assert (convs.macs is None) is (odd == "lazy"), "what is skipped counts, too"


@pytest.mark.parametrize("build", [depthwise, nn.Module], ids=["another convolution", "any module"])
def test_a_convolution_that_shares_its_weight_is_skipped(build):
    """The other holder would keep the old weight."""
    model = WithOrdinary(depthwise())
    model.other = changed(build(), lambda module: setattr(module, "weight", model.odd.weight))
    convs = find_convs(model, (4, 8, 8))
    assert [site.name for site in convs.sites] == ["ordinary"]
    assert convs.skipped[0].name == "odd"
    assert {skip.reason for skip in convs.skipped} == {"odd and other share its weight"}
    # A shared weight counts once.
    assert convs.params == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_network_of_a_library_is_left_exactly_as_it_was(device):
    model = timm.create_model("test_resnet").to(device).half()
    model.layer1.eval()
    model.layer2.requires_grad_(False)
    before = state_of(model)
    generator = torch.get_rng_state()
    convs = find_convs(model)
    assert convs.macs is not None
    assert find_convs(model) == convs
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_stem_takes_the_image_itself():
    """To have as many input channels as the image is not enough."""
    model = WithOrdinary(nn.Sequential(depthwise(), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 4, 3)))
    sites = find_convs(model, (4, 9, 14)).sites
    assert [site.name for site in sites if site.stem] == ["ordinary"]


@pytest.mark.parametrize(
    ("model", "input_size", "note"),
    [
        (Holder(depthwise()), (5, 8, 8), "does not run at 5x8x8"),
        (Holder(depthwise()), None, "no input size is known"),
    ],
)
def test_a_model_that_cannot_be_traced_has_no_macs_but_can_be_planned(model, input_size, note):
    convs = find_convs(model, input_size)
    assert convs.macs is None
    assert note in convs.macs_note
    (site,) = convs.sites
    assert (site.macs((3, 3)), site.input_extent) == (None, None)
    assert predict_report(plan_conversion(convs, dilated_size=7)).macs.before is None


@pytest.mark.parametrize(
    ("build", "requested", "expected"),
    [
        (lambda: nn.Conv1d(4, 4, 3), (4, 9), (4, 9)),
        (lambda: nn.Conv3d(4, 4, 3), (5, 8, 9), (3, 5, 8, 9)),  # 3 channels if none are stated
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3)), (8, 9), (3, 8, 9)),
    ],
)
def test_an_input_size_is_understood_by_its_length(build, requested, expected):
    assert find_convs(build(), requested).input_size == expected


@pytest.mark.parametrize("size", [(8,), (1, 2, 3, 4), (3, 0, 8), (3, 8.0, 8), 8, "3x8"])
def test_a_wrong_input_size_is_refused_with_what_it_must_be(size):
    with pytest.raises(PlanError, match=r"input size .* must be channels and"):
        find_convs(Holder(depthwise()), size)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_without_an_input_size_the_first_convolution_is_the_stem(channels):
    model = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    assert [site.stem for site in find_convs(model).sites] == [True, False]


@pytest.mark.parametrize(
    ("name", "args", "size"),
    [
        ("test_convnext", {"in_chans": 1}, (1, 160, 160)),
        ("test_vit", {"img_size": 64, "in_chans": 1}, (1, 64, 64)),
    ],
)
def test_a_timm_model_states_its_input_size_with_the_arguments_that_it_was_given(name, args, size):
    assert find_convs(timm.create_model(name, **args)).input_size == size


@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "mc3_18", "ssd300_vgg16"])
def test_macs_are_those_that_torchvision_states(name):
    """At the stated size; also for detectors, which need a real image to run to their end."""
    source = ModelSource(name=f"torchvision:{name}")
    model = build_model(source, device="meta")
    convs = find_convs_for(model, assumed_inputs(source, model))
    stated = torchvision.models.get_model_weights(name).DEFAULT.meta["_ops"]
    assert convs.macs / 1e9 == pytest.approx(stated, abs=0.0011)


@pytest.mark.filterwarnings("ignore:.*torch.jit:")
def test_a_network_with_a_scripted_module_is_traced():
    activation = torch.jit.script(nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(activation, nn.Conv2d(4, 4, 3)))
    assert find_convs(model, (3, 16, 16)).macs is not None
