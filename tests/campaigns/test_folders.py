"""Checkpoint folders, damaged and sealed again: refused in one line, or the right model; nothing else is opened."""

import copy
import json
import os
import shutil

import pytest
import timm
import torch
from hypothesis import strategies as st
from safetensors import SafetensorError

from dcls_convert.checkpoints.folder import CARD, CONFIG, FILES, REPORT, WEIGHTS
from dcls_convert.checkpoints.inspection import inspect_folder
from dcls_convert.checkpoints.load import load_converted
from dcls_convert.checkpoints.verify import rebuild_here, verify_folder

from ..checkpoints.folders import contents, run, seal
from ..conftest import TINY
from .campaign import Finding, check_line, refusal
from .texts import HOSTILE, plain

pytestmark = pytest.mark.campaign

NUMBERS = [-1, 0, 1, 2, 7, 3001, 20001, 2**31, 2**63, 10**30, 1.5, 1e300, True]
# What a damaged folder may still raise through timm: timm's, torch's and the hub's own errors.
OF_TIMM = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, OSError, LookupError)


def places(data, path=()):
    """Paths to all values of a JSON document."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


@st.composite
def json_edits(draw, name):
    """One or two values of a JSON file replaced, removed or doubled."""

    def edit(folder):
        if (folder / name).is_symlink() or not (folder / name).is_file():
            return
        data = json.loads((folder / name).read_text())
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
        (folder / name).write_text(json.dumps(data))

    values = st.sampled_from([*NUMBERS, *HOSTILE, None, [], {}, [3, 20001, 20001]]) | plain
    how = st.sampled_from(["replace", "replace", "replace", "remove", "rename", "double"])
    changes = draw(st.lists(st.tuples(st.integers(0, 2000), how, values), min_size=1, max_size=2))
    edit.__name__ = f"{name}: {changes!r}"
    return edit


@st.composite
def byte_edits(draw):
    name, cut = draw(st.sampled_from(FILES)), draw(st.none() | st.integers(0, 5000))
    changes = draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4))

    def edit(folder):
        if (folder / name).is_symlink() or not (folder / name).is_file():
            return
        data = bytearray((folder / name).read_bytes())
        if not data:
            return
        for place, value in changes:
            data[place % len(data)] = value
        (folder / name).write_bytes(data[:cut])

    edit.__name__ = f"{name}: bytes {changes!r}, cut at {cut}"
    return edit


@st.composite
def swaps(draw):
    """A file of another folder, a link, a pipe, a device or nothing in a file's place."""
    name, how = (
        draw(st.sampled_from(FILES)),
        draw(st.sampled_from(["other", "gone", "link", "pipe", "device", "folder"])),
    )

    def edit(folder):
        path = folder / name
        if how == "other":
            shutil.copy(folder.with_name("other") / name, path)
            return
        path.unlink()
        made = {
            "gone": lambda: None,
            "link": lambda: path.symlink_to("/etc/hostname"),
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
            "folder": path.mkdir,
        }
        made[how]()

    edit.__name__ = f"{name}: {how}"
    return edit


EDITS = st.one_of(json_edits(CONFIG), json_edits(CONFIG), json_edits(REPORT), byte_edits(), swaps())
READERS = {
    "load": lambda folder: load_converted(folder),
    "verify": lambda folder: verify_folder(folder, rebuild=rebuild_here),
    "inspect": lambda folder: inspect_folder(folder).to_json(),
    "timm": lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True),
}


def test_folders(campaign, tmp_path):
    for name, seed in (("good", 0), ("other", 1)):
        run(TINY, "--dilated-size", "9", "--seed", seed, "--output", tmp_path / name)
    right = contents(tmp_path / "good" / WEIGHTS)[0]

    def check(given):
        edits, sealed, reader = given
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        for edit in edits:
            try:
                edit(folder)
            except (OSError, LookupError, ValueError, TypeError):  # an earlier edit left nothing to edit
                return
        if sealed and all((folder / name).is_file() and not (folder / name).is_symlink() for name in FILES):
            try:
                seal(folder)
            except (SafetensorError, ValueError, LookupError, TypeError, AttributeError):  # too damaged to be sealed
                return
        found, refused = refusal(lambda: READERS[reader](folder), *(OF_TIMM if reader == "timm" else ()))
        if refused is not None:
            return
        if reader == "verify":
            for each in found.checks:
                check_line(f"{each.name}: {each.detail}")
        if reader in ("load", "timm"):
            own, written = found.state_dict(), contents(folder / WEIGHTS)[0] if sealed else right
            if any(name in own and not torch.equal(own[name], tensor) for name, tensor in written.items()):
                raise Finding("other weights than those that were written")

    edits = st.lists(EDITS, min_size=1, max_size=2)
    campaign.run(st.tuples(edits, st.booleans(), st.sampled_from(sorted(READERS))), check)
    assert CARD in FILES
