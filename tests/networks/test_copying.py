"""A network is copied to meta, whatever it has computed and kept; its plan does not change."""

import dataclasses
import functools

import pytest
import timm
import torch
from torch import nn

from dcls_convert import convert_, find_convs, load_converted, save_converted
from dcls_convert.networks.copying import meta_copy

from ..planning.nets import depthwise


@dataclasses.dataclass
class Kept:
    table: torch.Tensor


class Keeps(nn.Module):
    """Computes a table at its first call, and keeps it."""

    def __init__(self, keep):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.conv = depthwise()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.keep = keep
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.keep(2 * self.scale)
        return self.conv(self.stem(x)) * self.found(self.kept)

    def found(self, kept):
        if isinstance(kept, Kept):
            return kept.table
        if isinstance(kept, functools.partial):
            return kept.args[0]
        if isinstance(kept, dict):
            return self.found(kept["last"])
        if isinstance(kept, list):
            return self.found(kept[0])
        return kept


WAYS = {
    "attribute": lambda table: table,
    "list": lambda table: [table],
    "dict in a dict": lambda table: {"last": {"last": [table]}},
    "dataclass": Kept,
    "argument": lambda table: functools.partial(print, table),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_network_has_kept_does_not_change_its_plan(way, tmp_path):
    torch.manual_seed(0)
    model = Keeps(WAYS[way]).eval()
    image = torch.randn(1, 3, 9, 14)
    before = find_convs(model, (3, 9, 14))
    expected = model(image)
    assert find_convs(model, (3, 9, 14)) == before
    assert meta_copy(model)(image.to("meta")).shape == expected.shape
    assert model.found(model.kept).grad_fn is not None  # the model itself is not changed
    report = convert_(model, kernel_count="exact", init="exact", input_size=(3, 9, 14))
    torch.testing.assert_close(model(image), expected)
    save_converted(model, report.plan, tmp_path / "folder")
    loaded = load_converted(tmp_path / "folder", model=Keeps(WAYS[way])).eval()
    torch.testing.assert_close(loaded(image), expected)


def test_timm_networks_that_keep_attention_biases_are_planned_as_new_ones():
    model = timm.create_model("efficientvit_m0").eval()
    before = find_convs(model)
    model(torch.randn(1, 3, 224, 224))
    assert find_convs(model) == before
    assert before.macs is not None
