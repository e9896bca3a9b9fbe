"""Ways to damage a checkpoint folder. Each is data, so that a finding can be read, and made again."""

import copy
import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from dcls_convert.checkpoints.folder import CONFIG, FILES, REPORT, WEIGHTS

from .texts import HOSTILE, plain

HUGE = 6 << 30  # bytes of a file without any on the disk
NUMBERS = [-1, 0, 1, 2, 7, 3001, 9999, 20001, 2 * 10**7, 2**31, 2**63, 10**30, 1.5, 1e300, True]
VALUES = [*NUMBERS, *HOSTILE, None, [], {}, [3, 20001, 20001], [3, 9999, 9999], [9999, 9999], [99, 9999]]
SOURCES = [
    "os:getcwd",
    "os.path:exists",
    "tests.campaigns.canary:build",
    "hf-hub:someone/model",
    "local-dir:/etc",
    "timm:../etc",
    "timm:test_vit",
    "timm:dcls_convert",
    "torchvision:resnet18",
    "torchvision:../x",
]
NOT_ITS_OWN = "weights.pth"  # in the working directory
ARGUMENTS = [
    ("checkpoint_path", NOT_ITS_OWN),
    ("checkpoint_path", "/etc/hostname"),
    ("pretrained", True),
    ("pretrained_cfg", {"file": "/etc/hostname"}),
    ("pretrained_cfg_overlay", {"url": "http://127.0.0.1:9/x"}),
    ("cache_dir", "/etc"),
    ("weights_backbone", "DEFAULT"),
    *[("num_classes", 2 * 10**7)] * 3,
    ("num_classes", 5),
    ("act_layer", "../x"),
    ("block", "a:b"),
    ("depths", [10**6]),
    ("dims", [2**40, 1, 1, 1]),
]
PREPROCESSING = [
    ("url", "http://127.0.0.1:9/x"),
    ("file", "/etc/hostname"),
    ("hf_hub_id", "someone/model"),
    ("hf_hub_filename", "x"),
    ("custom_load", True),
    ("state_dict", {}),
    ("source", "url"),
    ("input_size", [3, 20001, 20001]),
    ("classifier", "nope"),
    ("first_conv", ["a", "b"]),
    ("num_classes", 2 * 10**7),
]
LAYERS = [  # several fields of one layer, which alone would contradict the others
    {"dilated_size": [20001, 20001]},
    {"dilated_size": [3001, 3001]},
    *[{"dilated_size": [9001, 9001]}] * 2,
    {"dilated_size": [15, 15]},
    {"dilated_size": [20001, 20001], "kernel_count": 10**8},
    {"kernel_count": 10**6},
    {"in_channels": 10**9, "out_channels": 10**9, "groups": 10**9},
    {"in_channels": 2**62},
    {"kernel_size": [], "dilated_size": [], "dilation": []},
    {"dense_axes": [0, 1]},
    {"interpolation": "gaussian"},
    {"names": []},
    {"names": ["</script><script>alert(1)</script>"]},
    {"names": ["\x1b[31m"]},
    {"tie_group": None},
    {"tie_group": "other"},
]
BYTES = [
    b"",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b"null",
    b"NaN",
    b'{"a": 1' + b"0" * 10_000 + b"}",
    b"\0" * 100,
    b"\xff" * 8,
    b'{"architecture": "\\ud800", "model_args": {}}',
    b'{"architecture": "x", "architecture": "y"}',
]


def places(data, path=()):
    """Paths to all values of a JSON document."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(data, changes):
    """A JSON document with some places edited: number of the place, how, value."""
    for index, how, value in changes:
        found = list(places(data))
        *above, last = found[index % len(found)]
        inner = data
        for key in above:
            inner = inner[key]
        if how == "remove":
            del inner[last]
        elif how == "rename" and isinstance(inner, dict):
            inner[str(value)] = inner.pop(last)
        elif how == "double" and isinstance(inner, list):
            inner.append(copy.deepcopy(inner[last]))
        else:
            inner[last] = value
    return data


@dataclass(frozen=True)
class Json:
    """Values of a JSON file replaced, removed, renamed or doubled."""

    name: str
    changes: tuple[tuple[int, str, Any], ...]

    def __call__(self, folder):
        data = changed(json.loads((folder / self.name).read_text()), self.changes)
        (folder / self.name).write_text(json.dumps(data))


@dataclass(frozen=True)
class Config:
    """What a stranger would write into config.json, in all places that say the same."""

    source: str | None = None
    argument: tuple[str, Any] | None = None
    preprocessing: tuple[str, Any] | None = None
    plan: tuple[str, Any] | None = None
    layer: tuple[int, dict[str, Any]] | None = None

    def __call__(self, folder):
        data = json.loads((folder / CONFIG).read_text())
        args = data["model_args"]
        plan = args["plan"]
        if self.source is not None:
            plan["model"] = self.source
        if self.argument is not None:
            plan["model_args"] = dict([self.argument])
            data["model_args"] = {**plan["model_args"], "plan": plan}
        if self.preprocessing is not None:
            data["pretrained_cfg"].update([self.preprocessing])
        if self.plan is not None:
            plan.update([self.plan])
        if self.layer is not None:
            index, changes = self.layer
            self._change_layer(plan, plan["layers"][index % len(plan["layers"])], changes)
        (folder / CONFIG).write_text(json.dumps(data))

    def _change_layer(self, plan, layer, changes):
        """Its whole tie group has the same sizes."""
        group = layer["tie_group"]
        members = [other for other in plan["layers"] if other["tie_group"] == group] if group else [layer]
        for member in [layer] if {"names", "tie_group"} & changes.keys() else members:
            member.update(changes)


@dataclass(frozen=True)
class Bytes:
    """Bytes of a file changed, and the rest cut off; or all of them others."""

    name: str
    changes: tuple[tuple[int, int], ...] = ()
    cut: int | None = None
    instead: bytes | None = None

    def __call__(self, folder):
        data = bytearray((folder / self.name).read_bytes() if self.instead is None else self.instead)
        for place, value in self.changes if data else ():
            data[place % len(data)] = value
        (folder / self.name).write_bytes(data[: self.cut])


@dataclass(frozen=True)
class Swap:
    """Something else in a file's place."""

    name: str
    how: str

    def __call__(self, folder):
        path = folder / self.name
        path.unlink()
        SWAPS[self.how](path)


SWAPS = {
    "the other's": lambda path: shutil.copy(path.parent.with_name("other") / path.name, path),
    "nothing": lambda path: None,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "circle": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "huge": lambda path: (path.touch(), os.truncate(path, HUGE)),
}


@dataclass(frozen=True)
class Tensors:
    """One tensor changed; with or without the metadata that says what was written."""

    index: int
    how: str
    stamped: bool

    def __call__(self, folder):
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors, metadata = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()
        name = sorted(tensors)[self.index % len(tensors)]
        tensors |= {name: CHANGES[self.how](tensors[name])} if self.how != "gone" else {}
        tensors.pop(name if self.how == "gone" else "", None)
        save_file(tensors, folder / WEIGHTS, metadata=metadata if self.stamped else None)


CHANGES = {
    "same": lambda tensor: tensor,
    "NaN": lambda tensor: tensor * float("nan"),
    "huge": lambda tensor: tensor * 1e30,
    "negative": lambda tensor: -tensor,
    "half": lambda tensor: tensor.half(),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "integers": lambda tensor: tensor.int(),
    "shorter": lambda tensor: tensor[:-1].contiguous() if tensor.dim() else tensor,
    "flat": lambda tensor: tensor.reshape(-1),
    "gone": None,
}

names, indices = st.sampled_from(FILES), st.integers(0, 2000)
changes = st.tuples(
    indices,
    st.sampled_from(["replace", "replace", "replace", "remove", "rename", "double"]),
    st.sampled_from(VALUES) | plain,
)
EDITS = st.one_of(
    st.builds(Json, st.sampled_from([CONFIG, CONFIG, REPORT]), st.lists(changes, min_size=1, max_size=2).map(tuple)),
    st.one_of(
        st.builds(Config, source=st.sampled_from(SOURCES)),
        st.builds(Config, source=st.none() | st.sampled_from(SOURCES), argument=st.sampled_from(ARGUMENTS)),
        st.builds(Config, preprocessing=st.sampled_from(PREPROCESSING)),
        st.builds(
            Config,
            plan=st.just(("input_size", [3, 9999, 9999]))
            | st.tuples(st.sampled_from(["model", "input_size", "rules_text", "share"]), st.sampled_from(VALUES)),
        ),
        st.builds(Config, layer=st.tuples(indices, st.sampled_from(LAYERS))),
    ),
    st.builds(
        Bytes,
        names,
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4).map(tuple),
        st.none() | st.integers(0, 5000),
    ),
    st.builds(Bytes, names, instead=st.sampled_from(BYTES)),
    st.builds(Swap, names, st.sampled_from(sorted(SWAPS))),
    st.builds(Tensors, indices, st.sampled_from(sorted(CHANGES)), st.booleans()),
)
