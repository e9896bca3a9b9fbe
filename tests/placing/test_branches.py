"""timm's `reparameterize_model` never changes the outputs of a converted network in silence."""

import copy
import gc
import pickle
import weakref

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

from dcls_convert import PlanError, convert_, fold_to_dense_, load_converted, save_converted

# By family of timm: whether branches can still be merged after a fold.
MERGES_AFTER_A_FOLD = {
    "lcnetv2_small": True,
    "repghostnet_050": False,
    "fastvit_t8": False,
    "fastvit_mci0": False,
    "ghostnetv3_050": False,
    "iformer_t": True,
    "mobileone_s0": True,
    "nextvit_small": True,
    "repvgg_a0": True,
    "repvit_m0_9": False,
    "shvit_s1": False,
}
QUICK = ["lcnetv2_small", "repghostnet_050"]
FOLD_FIRST = "^fold the network before its branches are merged"
NOT_MERGED = "^the branches of .* can no longer be merged"


def randomised(model):
    """Give BatchNorms statistics that a merge must take into account."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def convert(model):
    convert_(model, dilated_size="+4", init="random", positions="kernel", input_size=(3, 224, 224))


def assert_same(outputs, expected):
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in MERGES_AFTER_A_FOLD
    ],
)
def test_every_family_merges_before_a_conversion_and_otherwise_keeps_outputs_or_refuses(name):
    network = randomised(timm.create_model(name))
    image = torch.randn(1, 3, 224, 224)
    merged_first = reparameterize_model(network)
    convert(merged_first)
    expected = merged_first(image)
    fold_to_dense_(merged_first)
    assert_same(merged_first(image), expected)

    convert(network)
    expected = network(image)
    with pytest.raises(PlanError, match=FOLD_FIRST):
        reparameterize_model(network)
    fold_to_dense_(network)
    assert_same(network(image), expected)
    if MERGES_AFTER_A_FOLD[name]:
        assert_same(reparameterize_model(network)(image), expected)
    else:
        with pytest.raises(PlanError, match=NOT_MERGED):
            reparameterize_model(network)


class Branches(nn.Module):
    """Adds convolutions of two sizes, and merges them as RepLKNet does."""

    def __init__(self):
        super().__init__()
        self.large = nn.Conv2d(3, 3, 7, padding=3, groups=3)
        self.small = nn.Conv2d(3, 3, 3, padding=1, groups=3)
        self.merged = None

    def forward(self, x):
        if self.merged is not None:
            return self.merged(x)
        return self.fuse(self.large(x), self.small(x))

    def fuse(self, a, b):
        """Not what timm means by this name."""
        return a + b

    def reparameterize(self):
        self.merged = nn.Conv2d(3, 3, 7, padding=3, groups=3)
        self.merged.weight.data = self.large.weight + nn.functional.pad(self.small.weight, [2] * 4)
        self.merged.bias.data = self.large.bias + self.small.bias


@torch.no_grad()
def test_a_merged_kernel_that_needs_more_padding_is_refused(tmp_path):
    """torch would run it, and return a smaller map."""
    model = nn.Sequential(Branches()).eval()
    report = convert_(model, dilated_size="+4", init="random", input_size=(3, 32, 32))
    image = torch.randn(1, 3, 32, 32)
    expected = model(image)
    save_converted(model, report.plan, tmp_path / "folder", report=report)
    loaded = load_converted(tmp_path / "folder", model=nn.Sequential(Branches())).eval()
    for network in (model, loaded, copy.deepcopy(model)):
        fold_to_dense_(network)
        assert_same(network(image), expected)
        with pytest.raises(PlanError, match=NOT_MERGED):
            network[0].reparameterize()


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_guarded_itself_and_freed_at_once_when_it_is_dropped(way):
    model = timm.create_model("lcnetv2_small")
    convert(model)
    copied = COPIES[way](model)
    with pytest.raises(PlanError, match=FOLD_FIRST):
        reparameterize_model(copied, inplace=True)
    copied = COPIES[way](model)
    references = [weakref.ref(parameter) for parameter in copied.parameters()]
    gc.disable()
    try:
        del copied
        assert not any(reference() is not None for reference in references)
    finally:
        gc.enable()
