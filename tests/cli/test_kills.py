"""A conversion with --force over an old folder, killed at any moment: the old or the new folder is there, whole.

DCLS_CONVERT_KILLS=200 kills conversions at 200 moments for each signal; `pytest -m processes` does a few.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from dcls_convert.checkpoints.folder import FILES
from dcls_convert.checkpoints.output import clean_up
from dcls_convert.checkpoints.verify import rebuild_here, verify_folder
from dcls_convert.cli.app import EXIT_INTERRUPTED

from ..command_line import run
from ..conftest import TINY

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork and renameat2"),
]

MOMENTS = int(os.environ.get("DCLS_CONVERT_KILLS", "8"))
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LAST_SECONDS = 1.0  # of a conversion, over which the moments are spread
TRIES = 3  # for one moment, where the conversion ends before it is killed
CONVERSION = (TINY, "--dilated-size", "9", "--force", "--quiet", "--output")


def whole(folder):
    return verify_folder(folder, rebuild=rebuild_here).ok


def write(folder, version):
    folder.mkdir(exist_ok=True)
    for name, content in version.items():
        (folder / name).write_bytes(content)


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def versions(tmp_path_factory):
    """The files of the old folder and of the new one, which are whole by verify."""
    base = tmp_path_factory.mktemp("versions")
    for name, options in (("old", ["--seed", "1"]), ("new", [])):
        run(*CONVERSION, base / name, *options)
        assert whole(base / name)
    found = {name: read(base / name) for name in ("old", "new")}
    assert found["old"].keys() == found["new"].keys() == set(FILES)
    return found


@contextlib.contextmanager
def converter(folder, how="exchange"):
    """A function that starts a conversion, sends a signal after some seconds, and returns exit code and duration."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.cli.killed_worker", how, *CONVERSION, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "ready\n"

        def convert(number=None, after=0.0):
            process.stdin.write("\n")
            process.stdin.flush()
            pid, began = int(process.stdout.readline()), time.monotonic()
            if number is not None:
                time.sleep(after)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            code = int(process.stdout.readline())
            return code, time.monotonic() - began

        yield convert


def killed(convert, number, prepare):
    """Kill a conversion at every moment; yields the exit codes, also of conversions that ended before their kill.

    The time that a conversion takes depends on the machine's load, so it is measured again and again.
    """
    for moment in range(MOMENTS):
        if moment % 10 == 0:
            code, seconds = convert()
            assert code == 0
        for _ in range(TRIES):
            prepare()
            code, took = convert(number, seconds - min(seconds, LAST_SECONDS) * (1 - (moment + 0.5) / MOMENTS))
            yield code
            if code:
                break
            seconds = took


def version_of(folder, versions):
    found = read(folder)
    return next(name for name, version in versions.items() if version == found)


@pytest.mark.parametrize("number", KILLS, ids=lambda number: number.name)
def test_the_old_or_the_new_folder_is_there_at_every_moment(tmp_path, versions, number):
    folder, seen = tmp_path / "out", Counter()
    with converter(folder) as convert:
        for code in killed(convert, number, lambda: write(folder, versions["old"])):
            version = version_of(folder, versions)
            assert code in (0, -number) or (code == EXIT_INTERRUPTED and number != signal.SIGKILL)
            assert code or version == "new"
            if number != signal.SIGKILL:
                assert [path.name for path in tmp_path.iterdir()] == ["out"]
            if (version, code) not in seen or seen.total() % 10 == 0:
                assert whole(folder)
            seen[version, code] += 1
        print(f"{number.name}: {dict(seen)}")
        assert MOMENTS < 100 or {version for version, code in seen if code} == {"old", "new"}
        assert convert()[0] == 0  # the next run
    assert version_of(folder, versions) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", KILLS, ids=lambda number: number.name)
def test_without_an_exchange_of_names_the_next_run_finds_one_of_both(tmp_path, versions, number):
    """SIGKILL between two renames hides the old folder until then."""
    folder = tmp_path / "out"
    with converter(folder, "steps") as convert:
        for _ in killed(convert, number, lambda: write(folder, versions["old"])):
            if number == signal.SIGKILL:
                clean_up(folder)  # as the next run does
            version_of(folder, versions)
            assert [path.name for path in tmp_path.iterdir()] == ["out"]
