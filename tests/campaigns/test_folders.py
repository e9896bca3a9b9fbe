"""Checkpoint folders, damaged and sealed again: refused in one line, or the right model; nothing else is opened."""

import shutil
import sys

import pytest
import timm
import torch
from hypothesis import strategies as st
from safetensors import SafetensorError

from dcls_convert.checkpoints.folder import CONFIG, FILES, REPORT, WEIGHTS, read_plan
from dcls_convert.checkpoints.inspection import inspect_folder
from dcls_convert.checkpoints.load import load_converted
from dcls_convert.checkpoints.verify import rebuild_here, verify_folder
from dcls_convert.errors import DclsConvertError
from dcls_convert.export.formats import fold_checkpoint

from ..audit_hook import unwatched
from ..checkpoints.folders import contents, run, seal
from ..command_line import ended
from ..conftest import TINY
from .campaign import Finding, check_refusal, refusal
from .folder_edits import EDITS, NOT_ITS_OWN

pytestmark = pytest.mark.campaign

# What a damaged folder may still raise through timm: timm's, torch's and the hub's own errors.
OF_TIMM = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, OSError, LookupError)
NEVER_IMPORTED = f"{__package__}.canary"


def page(folder):
    """`inspect --html`, as its user runs it."""
    html = folder.with_name("page.html")
    code, _, err = ended("inspect", folder, "--html", html)
    if code not in (0, 2):
        raise Finding(f"inspect --html ends with {code}: {err[-300:]}")
    if code == 2:
        raise DclsConvertError(err.splitlines()[-1].removeprefix("error: "))
    return html.read_text()


def fold(folder):
    fold_checkpoint(folder, "timm", folder.with_name("folded"))
    return timm.create_model(f"local-dir:{folder.with_name('folded')}", pretrained=True)


READERS = {
    "load": load_converted,
    "verify": lambda folder: verify_folder(folder, rebuild=rebuild_here),
    "inspect": lambda folder: inspect_folder(folder).to_json(),
    "page": page,
    "fold": fold,
    "diff": lambda folder: read_plan(folder).diff(read_plan(folder.with_name("good"))),
    "timm": lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True),
}
# The slow ones are tried less often.
CHOICES = st.sampled_from([*["load", "timm"] * 4, *["verify"] * 6, *["inspect", "diff"] * 2, "fold", "page"])

OF_SEALING = (RecursionError, SafetensorError)  # of what is too damaged to be sealed


def regular(path):
    return short_file(path) and not path.is_symlink()


def short_file(path):
    return path.is_file() and path.stat().st_size < 1 << 24


def damaged(good, folder, edits, sealed):
    """Whether the folder could be made, as one that nobody wrote: an edit may leave nothing to the next one."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    try:
        for edit in edits:
            if not all(regular(folder / name) for name in FILES):
                return False
            edit(folder)
        if sealed and all(regular(folder / name) for name in FILES):
            seal(folder)
    except (
        OSError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        SafetensorError,
    ):
        return False
    return not is_copy(folder, good.with_name("other"))


def is_copy(folder, other):
    return all(regular(folder / name) and (folder / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def check_loaded(model, wanted):
    """But for what is changed on purpose: positions are clamped, and a head for other classes is new."""
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("positions")}
    pairs = [(own[name], tensor) for name, tensor in wanted.items() if name in own and own[name].shape == tensor.shape]
    if not all(torch.equal(one.double().nan_to_num(), other.double().nan_to_num()) for one, other in pairs):
        raise Finding("other weights than those that were written")


def check_verified(found, changed):
    for each in found.checks:
        check_refusal(f"{each.name}: {each.detail}")
    if changed is None:
        return
    folder, good, right = changed
    same = all(short_file(folder / name) for name in FILES)  # links to files, as in a hub's cache, and another card
    same = same and all((folder / name).read_bytes() == (good / name).read_bytes() for name in (CONFIG, REPORT))
    if found.ok and not (same and same_tensors(contents(folder / WEIGHTS)[0], right)):
        raise Finding("verify finds a changed folder good")


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_page(text, scripts):
    if text.lower().count("<script") != scripts or not text.replace("\n", "").isprintable():
        raise Finding("a name went into the page as it is")


def test_folders(campaign, tmp_path, monkeypatch):
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"  # without a file of defaults
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    torch.save(timm.create_model(TINY).state_dict(), NOT_ITS_OWN)
    for name, seed in (("good", 0), ("other", 1)):
        run(TINY, "--dilated-size", "9", "--seed", seed, "--output", place / name)
    good, folder = place / "good", place / "damaged"
    right, plan = contents(good / WEIGHTS)[0], read_plan(good).hash
    made = [place / "page.html", place / "folded"]

    def check(given):
        edits, sealed, reader = given
        with unwatched():
            shutil.rmtree(made[1], ignore_errors=True)
            made[0].unlink(missing_ok=True)
            if not damaged(good, folder, edits, sealed):
                return None
        if reader == "timm" and not regular(folder / CONFIG):  # timm reads it before this package can
            return None
        found, refused = refusal(lambda: READERS[reader](folder), *(OF_TIMM if reader == "timm" else ()))
        if NEVER_IMPORTED in sys.modules:
            raise Finding("a module that data names was imported")
        if refused is not None:
            if len(list(place.iterdir())) != 3:
                raise Finding("something is left behind")
            return False
        if reader == "verify":
            check_verified(found, None if sealed else (folder, good, right))
        if reader in ("load", "timm"):
            check_loaded(found, contents(folder / WEIGHTS)[0] if sealed else right)
            if not sealed and read_plan(folder).hash != plan:
                raise Finding("another plan than the one that was written")
        if reader == "page":
            check_page(found, scripts)
        return True

    healthy = {name: reader(good) for name, reader in READERS.items()}  # which imports what they need
    scripts = healthy["page"].lower().count("<script")
    edits = st.lists(EDITS, min_size=1, max_size=2)
    campaign.run(st.tuples(edits, st.booleans(), CHOICES), check, folder=place)
