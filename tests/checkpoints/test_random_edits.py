"""Random edits of a checkpoint folder: every reader refuses it in one line, or gives what was written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import timm
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dcls_convert import DclsConvertError, load_converted
from dcls_convert.checkpoints.folder import CONFIG, WEIGHTS, config_hash
from dcls_convert.checkpoints.inspection import inspect_folder

from ..audit_hook import watched
from .folders import contents, places, same_states, seal, verify

# What a damaged folder may still raise through timm: timm's, torch's and the hub's own errors.
OF_TIMM = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, OSError, LookupError)
CANARY = "dcls_convert_canary"  # a module that does not exist
NUMBERS = [-1, 0, 1, 2, 7, 20001, 2 * 10**7, 2**31, 2**63, 10**30, 1.5, 1e300, True]
TEXTS = ["", "x", "..", "/etc/hostname", "\x1b[31m", "a\nb", "</script>", "\ud800", "gaussian", "stages.1", "head.fc"]
NAMES = [f"{CANARY}:build", *"os:getcwd hf-hub:a/b local-dir:/etc timm:../etc timm:test_vit timm:dcls_convert".split()]
VALUES = st.sampled_from([*NUMBERS, *TEXTS, *NAMES, None, [], {}, [3, 9999, 9999], [20001, 20001], [99, 9999]])
KEYS = st.sampled_from(
    "checkpoint_path pretrained cache_dir num_classes url file hf_hub_id custom_load classifier".split()
)


@st.composite
def json_edits(draw):
    """Values of config.json replaced, removed or added."""
    change = st.tuples(st.integers(0, 2000), st.sampled_from("rrrda"), VALUES, KEYS)
    changes = draw(st.lists(change, min_size=1, max_size=3))

    def edit(folder):
        data = json.loads((folder / CONFIG).read_text())
        for index, how, value, key in changes:
            paths = list(places(data))
            if not paths:
                return
            *above, last = paths[index % len(paths)]
            inner = data
            for step in above:
                inner = inner[step]
            if how == "d":
                del inner[last]
            elif how == "a" and isinstance(inner, dict):
                inner[key] = value
            else:
                inner[last] = value
        (folder / CONFIG).write_text(json.dumps(data))

    return edit


@st.composite
def byte_edits(draw):
    """Bytes of a file changed and the rest cut off."""
    name = draw(st.sampled_from([CONFIG, WEIGHTS]))
    changes = draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4))
    end = draw(st.none() | st.integers(0, 5000))

    def edit(folder):
        data = bytearray((folder / name).read_bytes())
        for place, value in changes:
            data[place % len(data)] = value
        (folder / name).write_bytes(data[:end])

    return edit


READERS = {
    "load": (load_converted, ()),
    "verify": (verify, ()),
    "inspect": (inspect_folder, ()),
    "timm": (lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True), OF_TIMM),
}


def versions(folder):
    """What of the files must not differ."""
    try:
        config = config_hash(json.loads((folder / CONFIG).read_bytes()))
    except Exception:
        config = None
    return config, (folder / WEIGHTS).read_bytes()


@pytest.fixture(scope="module")
def written(folders):
    """The model of the good folder; every reader has imported what it needs."""
    return {name: read(folders / "good") for name, (read, _) in READERS.items()}["load"]


@given(edit=json_edits() | byte_edits(), sealed=st.booleans(), reader=st.sampled_from(sorted(READERS)))
def test_an_edited_folder_is_refused_in_one_line_or_what_was_written(
    folders, written, tmp_path_factory, edit, sealed, reader
):
    """Sealed: the folder says that it was written so."""
    good, folder = folders / "good", Path(tmp_path_factory.mktemp("edited") / "folder")
    shutil.copytree(good, folder)
    edit(folder)
    if sealed:
        try:
            seal(folder)
        except Exception:
            assume(False)
    read, errors = READERS[reader]
    changed = versions(folder) != versions(good)
    with watched(folder) as events:
        try:
            result = read(folder)
        except (DclsConvertError, *errors) as error:
            result, refusal = None, str(error) if isinstance(error, DclsConvertError) else ""
    assert (events, CANARY in sys.modules) == ([], False)
    if result is None:
        assert refusal.isprintable()
        return
    if reader == "verify":
        assert all(f"{check.name}{check.detail}".isprintable() for check in result.checks)
        assert not (result.ok and changed and not sealed)
    elif reader != "inspect":
        state = contents(folder / WEIGHTS)[0] if sealed else written.state_dict()
        own = result.state_dict()
        pairs = [(own[name], state[name]) for name in own if name in state and own[name].shape == state[name].shape]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if a.dtype == b.dtype)
        assert sealed or (not changed and same_states(result, written))
