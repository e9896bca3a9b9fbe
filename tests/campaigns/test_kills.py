"""Command lines killed at random moments: the old or the new output is there, whole, and nothing else stays."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import psutil
import pytest
from hypothesis import strategies as st

from dcls_convert.checkpoints.verify import rebuild_here, verify_folder
from dcls_convert.cli.app import EXIT_INTERRUPTED, EXIT_MISTAKE
from dcls_convert.cli.console import EXIT_UNPRINTED
from dcls_convert.output import clean_up

from ..conftest import TINY
from .campaign import Finding
from .nets import build

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork, prctl and renameat2"),
]

SECONDS_TO_AGAIN = 0.02  # at most; cleaning takes some milliseconds
SECONDS_TO_END = 20.0  # for what the program started, after itself
OWN = f"{build.__module__}:build"
CONVERT = (OWN, "--dilated-size", "9", "--input-size", "3x32x32", "--quiet")
COMMANDS = {  # an output is written to `out` with some suffix
    "convert": (*CONVERT, "--output", "out"),
    "exact": (*CONVERT, "--init", "exact", "--output", "out"),
    "fold": ("fold", "tiny", "--quiet", "--output", "out"),
    "page": ("inspect", "own", "--trust-code", "--html", "out.html"),
    "picture": ("inspect", "own", "--trust-code", "--picture", "out.png"),
    "models": ("models", "timm:test_convnext*", "--json", "--jobs", "1"),
}
FIRST = ((*CONVERT, "--seed", "1", "--output", "own"), (TINY, "--dilated-size", "9", "--quiet", "--output", "tiny"))
KEPT = {line[-1] for line in FIRST}
WEIGHTS = {"convert": 14, "exact": 5, "page": 4, "fold": 1, "picture": 1, "models": 0.5}  # how often each is killed
WRITING = "output._partial begins"  # from this place on, the output is being written
NAMING, NAMED = "output._publish begins", 30  # from this place on, for about so many, it gets its name
INTERRUPTS = ("INT", "TERM", "HUP")
HARMLESS = ("PIPE", "stdout", "stderr")  # the signal, which Python ignores, and readers that go away


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What happens to a process, and when."""

    act: str  # a signal's name, or the stream whose reader goes away
    moment: float  # 0 to 1: of the seconds that the command takes, or of the places that it passes
    turn: float = 0.0  # 0 to 1: of the times that it passes the place
    timed: bool = False
    again: float = 0.0  # seconds until the same signal comes once more; 0 where it does not


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line that is killed, perhaps while another process with the same one is stopped at some place."""

    command: str
    force: bool = True
    old: bool = True  # whether an output is there before
    steps: bool = False  # the file system cannot exchange names
    kill: Kill
    stopped: Kill | None = None


def random_case(random):
    [command] = random.choices(list(WEIGHTS), WEIGHTS.values())
    if command == "models":
        return Case(command=command, force=False, old=False, kill=random_kill(random, ["KILL", *INTERRUPTS]))
    force = random.random() < 0.75
    old = force and random.random() < 0.75
    stopped = random_kill(random, ["STOP"]) if random.random() < 0.3 else None
    return Case(
        command=command,
        force=force,
        old=old,
        steps=old and stopped is None and random.random() < 0.5,
        kill=random_kill(random, ["KILL", "KILL", *INTERRUPTS, *HARMLESS]),
        stopped=stopped,
    )


def random_kill(random, acts):
    act = random.choice(acts)
    timed = act not in ("STOP", "stdout", "stderr") and random.random() < 0.3
    again = random.choice([0.0, SECONDS_TO_AGAIN * random.random()]) if act in INTERRUPTS else 0.0
    return Kill(act=act, moment=random.random(), turn=random.random(), timed=timed, again=again)


cases = st.integers(0, 2**32).map(lambda seed: random_case(Random(seed)))  # even ones; hypothesis likes borders


class Worker:
    """Runs command lines in forks of one process, see `killed_worker`."""

    def __init__(self, place, lines):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(place.with_name("temp")),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.campaigns.killed_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=place,
        )
        self.tell(lines)
        assert self.answer() == "ready"

    def tell(self, message):
        self.busy = True
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        self.busy = False
        return json.loads(line)

    def ask(self, **question):
        self.tell(question)
        return self.answer()

    def end(self):
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            process.kill()
        with self.process:
            pass


@dataclass(frozen=True, kw_only=True)
class Practice:
    """What a command does when nothing kills it."""

    new: object  # its output
    seconds: float
    places: tuple[tuple[str, int], ...]  # in the order in which they are reached, and how often each is passed

    def place(self, share):
        """A sixth of the shares before the output is written, a sixth after, a third in its code, a third where it is
        given its name."""
        names = [name for name, _ in self.places]
        begun, named = (names.index(name) if name in names else 0 for name in (WRITING, NAMING))
        of_output = [place for place in self.places if place[0].startswith("output.")]
        near = self.places[named : named + NAMED]
        parts = [self.places[:begun], self.places[begun:], of_output, of_output, near, near]
        chosen = parts[int(6 * share)] or self.places
        return chosen[int(6 * share % 1 * len(chosen))]


class Killer:
    """Kills command lines in a folder, and says what they should not have done."""

    def __init__(self, base):
        self.folder, self.logs, self.temp = (base / name for name in ("place", "logs", "temp"))
        for each in (self.folder, self.logs, self.temp):
            each.mkdir()
        self.practices, self.seen = {}, Counter()
        self._worker_started()
        self.old = read(self.folder / "own")
        assert whole(self.folder / "own")

    def _worker_started(self):
        lines = [line for name, line in COMMANDS.items() if name != "models"]  # which would leave a process
        self.worker = Worker(self.folder, [forced(line) for line in (*FIRST, *lines)])
        self._clear()

    def check(self, case):
        """Raise Finding where the case breaks a promise."""
        try:
            self._check(case, self.practice(case))
        finally:
            if self.worker.busy:  # something hung
                self.worker.end()
                self._worker_started()

    def practice(self, case):
        """How the command runs by itself, which is found once."""
        key = case.command, case.force, case.old, case.steps
        if key not in self.practices:
            output, began = self._prepared(case), time.monotonic()
            pid = self._start(case, "practice", places=str(self.logs / "places"))
            assert self.worker.ask(wait=pid) == 0
            seconds, new = time.monotonic() - began, read(output)
            assert not output.is_dir() or whole(output)
            places = json.loads((self.logs / "places").read_text())
            self.practices[key] = Practice(new=new, seconds=seconds, places=tuple(places.items()))
        return self.practices[key]

    def _clear(self):
        for path in self.folder.iterdir():
            if path.name not in KEPT:
                remove(path)

    def _prepared(self, case):
        output = self.folder / COMMANDS[case.command][-1]
        self._clear()
        if case.old:
            write(output, self.old_of(output))
        return output

    def old_of(self, output):
        return b"old" if output.suffix else self.old

    def _start(self, case, name, act=None, place=None, places=None, again=0.0):
        line = COMMANDS[case.command]
        job = {
            "arguments": forced(line) if case.force else line,
            "steps": case.steps,
            "act": act,
            "place": place,
            "again": again,
        }
        files = {stream: str(self.logs / f"{name}.{stream}") for stream in ("stdout", "stderr")}
        for file in files.values():
            Path(file).write_text("")
        return self.worker.ask(start=job | files | {"places": places})

    def _killed(self, case, kill, practice, name):
        """The process's id, and where or when it is to be killed."""
        if kill.timed:
            return self._start(case, name), kill.moment * practice.seconds
        place, times = practice.place(kill.moment)
        turn = 1 + int(kill.turn * times)
        return self._start(case, name, kill.act, (place, turn), again=kill.again), (place, turn)

    def _check(self, case, practice):
        output, codes, moments = self._prepared(case), {}, {}
        if case.stopped:
            first, moments["first"] = self._killed(case, case.stopped, practice, "first")
            codes["first"] = self.worker.ask(wait=first)
        second, moments["second"] = self._killed(case, case.kill, practice, "second")
        if case.kill.timed:
            for seconds in filter(None, (moments["second"], case.kill.again)):
                time.sleep(seconds)
                os.kill(second, getattr(signal, f"SIG{case.kill.act}"))  # it is no other's yet, if it has ended
        codes["second"] = self.worker.ask(wait=second)
        if codes.get("first") == "stopped":
            os.kill(first, signal.SIGCONT)
            codes["first"] = self.worker.ask(wait=first)
        try:
            self._judge(case, practice, output, codes)
        except Finding as finding:
            raise Finding(f"{case}: killed at {moments}: {finding}") from None

    def _judge(self, case, practice, output, codes):
        if left := self.worker.ask(left=SECONDS_TO_END):
            raise Finding(f"processes are left: {left}")
        killed = codes["second"] == -signal.SIGKILL
        for name, code in codes.items():
            printed = (self.logs / f"{name}.stderr").read_text(errors="replace")
            check_code(case, case.kill.act if name == "second" else "STOP", code, printed)
            if not killed:
                check_messages(case, code, printed)
        if killed and case.steps:
            clean_up(output)  # as the next run does
        found = read(output)
        version = "new" if found == practice.new else "old" if found == self._before(case, output) else "broken"
        self.seen[case.kill.act, version, codes["second"]] += 1
        if version == "broken" or (
            version == "old" and not {0, EXIT_MISTAKE, EXIT_UNPRINTED}.isdisjoint(codes.values())
        ):
            raise Finding(f"ended with {codes}, and the {version} output is there: {listed(found)}")
        if killed:
            self._check_next(case, practice, output)
        if left := sorted({path.name for path in self.folder.iterdir()} - KEPT - {output.name}):
            raise Finding(f"{left} left beside the output")
        if left := sorted(path.name for path in self.temp.iterdir()):
            raise Finding(f"{left} left in the folder of temporary files")

    def _before(self, case, output):
        return self.old_of(output) if case.old else None

    def _check_next(self, case, practice, output):
        """The next run cleans up, and ends well."""
        remove(self.temp)
        self.temp.mkdir()
        if case.command == "models":
            return
        pid = self._start(replace(case, force=True), "next")
        if code := self.worker.ask(wait=pid):
            raise Finding(f"the next run ended with {code}: {(self.logs / 'next.stderr').read_text()}")
        if read(output) != practice.new:
            raise Finding(f"the next run wrote something else: {listed(read(output))}")


def check_code(case, act, code, printed):
    allowed = {0}
    if act in INTERRUPTS:
        allowed.add(EXIT_INTERRUPTED)
    if act == "KILL":
        allowed.add(-signal.SIGKILL)
    if act == "stdout":
        allowed.add(EXIT_UNPRINTED)
    if case.stopped and not case.force:
        allowed.add(EXIT_MISTAKE)  # the other one was faster
    if code not in allowed:
        raise Finding(f"{act} ended with {code}, not with one of {sorted(allowed)}: {printed[-2000:]!r}")


def check_messages(case, code, text):
    """One line of error where there is an error, at the end; where it is to be quiet, notes are all else."""
    lines = text.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    wanted = {EXIT_INTERRUPTED: ["error: interrupted"], EXIT_MISTAKE: errors[-1:]}.get(code, [])
    others = lines[: len(lines) - len(wanted)]
    quiet = "--quiet" in COMMANDS[case.command]
    if errors != wanted or "Traceback" in text or (quiet and not all(line.startswith("note: ") for line in others)):
        raise Finding(f"ended with {code}, and printed {text[-2000:]!r}")


def forced(line):
    return line if line[0] == "models" else (*line, "--force")


def whole(folder):
    return verify_folder(folder, rebuild=rebuild_here).ok


def read(path):
    """A file's bytes, those of a folder's files, or None."""
    if path.is_dir():
        return {each.name: read(each) for each in path.iterdir()}
    return path.read_bytes() if path.exists() else None


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.mkdir()
        for name, each in content.items():
            write(path / name, each)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def listed(content):
    return {name: len(each) for name, each in content.items()} if isinstance(content, dict) else repr(content)[:50]


def test_kills(campaign, tmp_path):
    killer = Killer(tmp_path)
    campaign.shrink = False  # times do not repeat
    try:
        campaign.run(cases, killer.check)
    finally:
        killer.worker.end()
        print(
            *(
                f"{act}, exit code {code}: {version}, {n} times"
                for (act, version, code), n in sorted(killer.seen.items())
            ),
            sep="\n",
        )
