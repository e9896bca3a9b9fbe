"""What a network's code caches outside the network is the same after it was traced on meta."""

from functools import lru_cache
from typing import ClassVar

import pytest
import torch
from torch import nn

from dcls_convert import find_convs

from ..planning.nets import depthwise

IMAGE = (4, 9, 14)
TABLES = {}
LATEST = None


@lru_cache
def cached(height, width):
    return torch.ones(height, width)


def through_another_function(height, width):
    return cached(height, width)


def in_a_dictionary(height, width):
    if (height, width) not in TABLES:
        TABLES[height, width] = (torch.ones(height, width), "ones")
    return TABLES[height, width][0]


def in_a_variable(height, width):
    global LATEST
    if LATEST is None:
        LATEST = torch.ones(height, width)
    return LATEST


def of_a_closure():
    @lru_cache(maxsize=1)
    def inner(height, width):
        return torch.ones(height, width)

    return lambda height, width: inner(height, width)


class Holder:
    tables: ClassVar[dict] = {}
    latest = None

    @classmethod
    def in_a_dictionary(cls, height, width):
        return cls.tables.setdefault((height, width), torch.ones(height, width))

    @staticmethod
    @lru_cache
    def cached(height, width):
        return torch.ones(height, width)

    @classmethod
    def in_an_attribute(cls, height, width):
        if cls.latest is None:
            cls.latest = torch.ones(height, width)
        return cls.latest


class Net(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.conv = depthwise()
        self.grid = grid

    def forward(self, x):
        return self.conv(x + self.grid(*x.shape[-2:]))


GRIDS = {
    "lru_cache": cached,
    "through another function": through_another_function,
    "in a closure": of_a_closure(),
    "dictionary": in_a_dictionary,
    "global variable": in_a_variable,
    "dictionary of a class": Holder.in_a_dictionary,
    "lru_cache of a class": Holder.cached,
    "attribute of a class": Holder.in_an_attribute,
}


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch):
    cached.cache_clear()
    Holder.cached.cache_clear()
    TABLES.clear()
    Holder.tables.clear()
    monkeypatch.setitem(globals(), "LATEST", None)
    monkeypatch.setattr(Holder, "latest", None)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_a_trace_neither_uses_nor_changes_what_is_cached(name, has_run):
    model = Net(GRIDS[name])
    image = torch.randn(1, *IMAGE)
    plain_output = model.conv(image + 1)
    tables = [model.grid(*IMAGE[1:])] if has_run else []
    convs = find_convs(model, IMAGE)
    assert convs.macs is not None, convs.macs_note
    assert [site.name for site in convs.sites] == ["conv"]
    torch.testing.assert_close(model(image), plain_output)
    if has_run and "lru_cache" not in name and "function" not in name and "closure" not in name:
        assert model.grid(*IMAGE[1:]) is tables[0]


def test_a_cache_that_the_network_does_not_fill_is_kept():
    table = cached(3, 3)
    find_convs(Net(in_a_dictionary), IMAGE)
    assert cached(3, 3) is table


def test_caches_are_restored_if_the_network_does_not_run():
    def fails(height, width):
        in_a_dictionary(height, width)
        return cached(height, width) + torch.ones(7)

    table = in_a_dictionary(*IMAGE[1:])
    assert find_convs(Net(fails), IMAGE).macs is None
    assert in_a_dictionary(*IMAGE[1:]) is table
    assert cached(*IMAGE[1:]).device.type == "cpu"
