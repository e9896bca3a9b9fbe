"""timm's `reparameterize_model` keeps the outputs of converted networks with branches."""

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

from dcls_convert import convert_, fold_to_dense_, load_converted, save_converted
from dcls_convert.networks.copying import copy_network

NOT_MERGED = "some branches of the network have other windows"
FAMILIES = ["repghostnet_050", "lcnetv2_small"]
SLOW_FAMILIES = [
    "fastvit_t8",
    "fastvit_mci0",
    "ghostnetv3_050",
    "iformer_t",
    "mobileone_s0",
    "nextvit_small",
    "repvgg_a0",
    "repvit_m0_9",
    "shvit_s1",
]


def randomised(model):
    """Give BatchNorms statistics that a merge must take into account."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def assert_same(outputs, expected):
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
@pytest.mark.filterwarnings(f"ignore:{NOT_MERGED}:UserWarning")
@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)]
)
def test_every_family_of_timm_with_branches_keeps_its_outputs(name):
    model = randomised(timm.create_model(name))
    convert_(model, dilated_size="+4", init="random", positions="kernel")
    image = torch.randn(1, *model.pretrained_cfg["input_size"])
    expected = model(image)
    assert_same(reparameterize_model(copy_network(model))(image), expected)
    fold_to_dense_(model)
    assert_same(reparameterize_model(copy_network(model))(image), expected)


class Branches(nn.Module):
    """Adds convolutions of two sizes, and merges them as RepLKNet does."""

    def __init__(self, small=3):
        super().__init__()
        self.large = nn.Conv2d(4, 4, 7, padding=3, groups=4)
        self.small = nn.Conv2d(4, 4, small, padding=small // 2, groups=4)
        self.missing_cells = (7 - small) // 2
        self.merged = None

    def forward(self, x):
        if self.merged is not None:
            return self.merged(x)
        return self.large(x) + self.small(x)

    def reparameterize(self):
        merged = nn.Conv2d(4, 4, 7, padding=3, groups=4)
        small = nn.functional.pad(self.small.weight, [self.missing_cells] * 4)
        merged.weight.data = self.large.weight + small
        merged.bias.data = self.large.bias + self.small.bias
        self.merged = merged
        del self.large
        del self.small


@torch.no_grad()
@pytest.mark.parametrize(("small", "merges"), [(3, True), (1, False)])
@pytest.mark.parametrize("folded", [False, True])
def test_branches_that_grow_alike_are_merged_and_others_are_kept(small, merges, folded):
    model = nn.Sequential(Branches(small))
    report = convert_(model, dilated_size="+4", init="random", input_size=(4, 20, 20))
    image = torch.randn(1, 4, 20, 20)
    expected = model(image)
    if folded:
        fold_to_dense_(model)
    if merges:
        model = reparameterize_model(model)
    else:
        with pytest.warns(UserWarning, match=NOT_MERGED):
            model = reparameterize_model(model)
    assert (model[0].merged is not None) == merges
    torch.testing.assert_close(model(image), expected)
    assert len(report.layers) == (2 if small > 1 else 1)
    if merges:
        assert model[0].merged.kernel_size == (11, 11)


@torch.no_grad()
def test_a_folder_of_a_folded_network_keeps_its_branches(tmp_path):
    model = randomised(timm.create_model("repghostnet_050"))
    report = convert_(model, dilated_size="+4", init="random", positions="kernel")
    save_converted(model, report.plan, tmp_path / "folder")
    loaded = load_converted(tmp_path / "folder").eval()
    image = torch.randn(1, 3, 64, 64)
    expected = model(image)
    with pytest.warns(UserWarning, match=NOT_MERGED):
        assert_same(reparameterize_model(loaded)(image), expected)
