"""Command lines in harsh places, at random points: the disk, memory, permissions, names, folders, streams, processes.

One line of error and the documented exit code; the old output byte for byte or the new one whole; nothing beside it.
"""

import functools
import multiprocessing
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from dcls_convert.checkpoints import verify
from dcls_convert.compare import workers

from ..command_line import run as here
from .campaign import Finding, check_line
from .forks import command, forked
from .nets import build
from .places import CACHES, FOLDER_HARMS, PROCESS_HARMS, little_memory, not_allowed, obey_permissions, stream

pytestmark = pytest.mark.campaign

ABORTED = (-signal.SIGABRT, 127)  # without memory: C++, and the loader of libraries; nothing can say why

OWN = f"{build.__module__}:build"
LARGE = f"{__name__}:large"
SIZES = ("--dilated-size", "9", "--input-size", "3x32x32")
PARTIAL = re.compile(r"place/\.[^/]+\.[0-9a-f]{8}\.partial(/.*)?")
# A line, and its outputs; {} is the folder that may be harsh.
LINES = {
    ("convert", OWN, *SIZES, "--output", "{}/out"): ["out"],
    ("convert", OWN, *SIZES, "--json", "--output", "{}/deep/er/out"): ["deep/er/out"],
    ("convert", OWN, *SIZES, "--checkpoint", "weights.pth", "--quiet", "--output", "{}/out"): ["out"],
    ("convert", OWN, *SIZES, "--html", "--output", "{}/out"): ["out"],
    ("convert", LARGE, *SIZES, "--output", "{}/out"): ["out"],
    ("fold", "good", "--trust-code", "--output", "{}/out"): ["out"],
    ("inspect", "good", "--html", "{}/page.html"): ["page.html"],
    ("inspect", "good", "--html", "{}/page.html", "--picture", "{}/a.png"): ["page.html", "a.png"],
    ("inspect", "good", "--json", "--picture", "{}/a.pdf"): ["a.pdf"],
    ("sweep", OWN, "--sizes", "7,9", "--csv", "--picture", "{}/a.png"): ["a.png"],
    ("verify", "good", "--trust-code"): [],
    ("diff", "good", "other"): [],
    ("inspect", "good", "--plan"): [],
    ("convert", OWN, "--dry-run", "--rules", "rules.yaml"): [],
}
SLOW = {
    ("fold", "good", "--trust-code", "--format", "onnx", "--output", "{}/a.onnx"): ["a.onnx"],
    ("fold", "good", "--trust-code", "--format", "pt2", "--output", "{}/a.pt2"): ["a.pt2"],
    ("models", "timm:test_resnet", "--jobs", "1", "--json"): [],
}
HARMS = {harm.__name__: harm for harm in FOLDER_HARMS | PROCESS_HARMS}


def large() -> torch.nn.Module:
    """Of 16 MB, most of which is no kernel."""
    return torch.nn.Sequential(build(4096), torch.nn.Linear(4096, 1024))


def cases(allowed):
    """A line, whether its paths are absolute, whether old outputs are there to be replaced, and the harms."""
    folder, process = (
        [st.tuples(st.just(harm.__name__), values) for harm, values in harms]
        for harms in (((harm, FOLDER_HARMS[harm]) for harm in allowed), PROCESS_HARMS.items())
    )
    harms = st.tuples(
        st.lists(st.one_of(folder), max_size=1) if folder else st.just([]),
        st.lists(st.one_of(process), max_size=2, unique_by=lambda harm: harm[0]),
    ).filter(any)
    lines = st.sampled_from([*list(LINES) * 5, *SLOW])
    return st.tuples(lines, st.booleans(), st.booleans(), harms).filter(lambda case: not has_lost_fonts(case))


def has_lost_fonts(case):
    """Whether matplotlib may find other fonts, with which it draws another picture."""
    line, _, _, (_, process) = case
    return "--picture" in line and any(name == "faults" and values[0] == "os.scandir" for name, values in process)


def snapshot(folder):
    """Everything in the folder, by path: bytes of files, targets of links, None for folders.

    Not what libraries keep in the folder that a variable names for that.
    """
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
        if not any(path.is_relative_to(folder / name) for name in CACHES)
    }


def part(found, output):
    return {path: content for path, content in found.items() if path == output or path.startswith(f"{output}/")}


def quick():
    """Fork what else starts a Python that imports torch."""
    workers.multiprocessing = multiprocessing  # whose contexts are these
    workers.multiprocessing.get_context = lambda _: multiprocessing.context.ForkContext()
    verify.rebuild_in_fresh_process = verify.rebuild_here


def complete(line, base, *, absolute, force):
    words = [word.format("place") for word in line]
    if absolute:
        names = ("good", "other", "weights.pth", "rules.yaml", "place")
        words = [str(base / word) if word.startswith(names) else word for word in words]
    return [*words, "--force"] if force else words


def run(line, harms=()):
    acts = [functools.partial(HARMS[harm], value) for harm, value in harms]
    return command(line, [quick, obey_permissions, *acts])


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Folders and files for the command lines to name, and an empty one for their outputs."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("good", 0), ("other", 1)):
        here("convert", OWN, *SIZES, "--seed", seed, "--output", name)
    Path("rules.yaml").write_text("format: 1\nrules: [{match: {kind: depthwise}, dilated_kernel_size: 7}]\n")
    torch.save(build().state_dict(), "weights.pth")
    for word in ("inspect", "fold"):  # here, so that no fork must import what they need
        here(word, "good", *["--trust-code"] * (word == "fold"))
    shutil.rmtree("good-folded")
    Path("place").mkdir()
    return tmp_path


def fill(base, outputs):
    """An empty place, or one with old outputs."""
    shutil.rmtree(base / "place")
    (base / "place").mkdir()
    for output in outputs:
        path = base / "place" / output
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old") if path.suffix else shutil.copytree(base / "other", path)


@functools.cache
def reference(base, line):
    """How a line ends where nothing is harsh, and what it writes."""
    fill(base, ())
    ended = run(complete(line, base, absolute=False, force=False))
    assert ended.code == 0, (line, ended)
    return ended, snapshot(base)


class Try:
    """One line in one place."""

    def __init__(self, base, case):
        self.base = base
        self.line, self.absolute, force, (self.folder_harms, self.harms) = case
        self.outputs = [f"place/{output}" for output in (LINES | SLOW)[self.line]]
        self.force = force and bool(self.outputs)
        self.wanted, self.new = reference(base, self.line)
        self.streams = {value[0] for harm, value in self.harms if harm == stream.__name__}

    def run(self):
        """All of it, in a process of its own."""
        fill(self.base, (LINES | SLOW)[self.line] if self.force else ())
        self.before = snapshot(self.base)
        undo = [HARMS[harm](self.base / "place", value) for harm, value in self.folder_harms]
        self.ended = run(complete(self.line, self.base, absolute=self.absolute, force=self.force), self.harms)
        for each in undo:
            each()
        self.after = snapshot(self.base)
        self.aborted = self.ended.code in ABORTED and any(harm == little_memory.__name__ for harm, _ in self.harms)
        if not self.aborted:
            self.check_end()
        self.check_folder()
        return self.ended.code

    def fail(self, why):
        raise Finding(f"{why}; {self.ended}"[:3000])

    def plain(self, text):
        """Without the layout, and what differs with absolute paths."""
        return text.replace(f"{self.base}/", "").split()

    def check_end(self):
        code, out, err = self.ended.code, self.ended.out, self.ended.err
        unprinted = "stdout" in self.streams
        unread = ("stream", ("stdout", "gone")) in self.harms  # as with `| head`, of which nothing is said
        silent = "stderr" in self.streams or (code == 1 and (unread or self.line[0] == "models"))
        if "Traceback" in out + err or "this is a bug" in err:
            self.fail("a bug")
        if code not in (0, 2, 3) and not (code == 1 and (unprinted or self.line[0] == "models")):
            self.fail("not a documented exit code")
        if code == 0 and unprinted:
            self.fail("done, but nothing was printed")
        if code == 0 and not unprinted and self.plain(out) != self.plain(self.wanted.out):
            self.fail(f"done, but printed something else than {self.wanted.out}")
        if code == 0 and "stderr" not in self.streams and self.plain(err) != self.plain(self.wanted.err):
            self.fail(f"done, but said something else than {self.wanted.err}")
        if code != 0 and not silent:
            if [line for line in err.splitlines() if line.startswith("error: ")] != err.splitlines()[-1:]:
                self.fail("not one line of error, the last")
            check_line(err.splitlines()[-1])

    def check_folder(self):
        code, err = self.ended.code, "".join(self.ended.err.split())
        written = [self.is_new(output) for output in self.outputs]
        if code == 0 and not all(written):
            self.fail("done, but not written")
        named = "waswritten" in err or "iswhole" in err or "stderr" in self.streams or len(self.outputs) > 1
        if code != 0 and any(written) and not (self.aborted or named):
            self.fail("written, but not said so")
        before, after = self.without_outputs(self.before), self.without_outputs(self.after)
        left = {path for path in before.keys() | after.keys() if before.get(path, "") != after.get(path, "")}
        stays = {path for path in left if PARTIAL.fullmatch(path) and (self.aborted or "isleftthere" in err)}
        if left - stays:
            self.fail(f"left {sorted(left - stays)}")
        if left or self.aborted:
            self.check_next_run()

    def is_new(self, output):
        """Whether an output is the new one; it may be the old one, too, but nothing else."""
        found = part(self.after, output)
        if found == part(self.new, output):
            return True
        if found != part(self.before, output):
            self.fail(f"{output} is neither the old one nor the new one: {sorted(found)}")
        return False

    def without_outputs(self, found):
        """All else, but for the folders above the outputs."""
        own = {path for output in self.outputs for path in part(found, output)}
        above = {str(parent) for output in self.outputs for parent in Path(output).parents}
        free = above if any(path in self.after for path in self.outputs) or self.aborted else set()
        return {path: content for path, content in found.items() if path not in own | free}

    def check_next_run(self):
        self.ended = run(complete(self.line, self.base, absolute=self.absolute, force=bool(self.outputs)))
        self.after = snapshot(self.base)
        if self.ended.code != 0 or not all(self.is_new(output) for output in self.outputs):
            self.fail("the next run failed")
        if self.without_outputs(self.after) != self.without_outputs(self.before):
            self.fail("the next run left something")


def test_places(campaign, base):
    """Each case runs in a fork, where whatever is wrong is raised as a Finding; `campaign` counts and reports them."""
    reasons = {harm: forked(functools.partial(not_allowed, harm, base / "place")) for harm in FOLDER_HARMS}
    for harm, reason in reasons.items():
        if reason is not None:
            print(f"\nwithout {harm.__name__}: {reason}")
    codes = Counter()
    campaign.run(
        cases([harm for harm, reason in reasons.items() if reason is None]),
        lambda case: codes.update([forked(Try(base, case).run)]),
    )
    print(f"exit codes: {dict(sorted(codes.items()))}")
