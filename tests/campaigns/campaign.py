"""A campaign: random inputs for some seconds, each held to what the program promises; what breaks it is made small.

`pytest -m campaign -n 0 -s --seconds 600 --seed 7` prints for each campaign how many inputs were tried, and writes the
smallest input of each finding to a folder, which it names.
"""

import contextlib
import math
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from dcls_convert.errors import DclsConvertError, exhausted

from ..audit_hook import watched

BATCH = 200  # inputs between two looks at the clock
MOST_SECONDS = 60  # for one input
MOST_MEMORY = 2 << 30  # bytes that one input may add
MOST_FINDINGS = 5  # of one campaign; then it ends
SECONDS_TO_SHRINK = 20  # at most, for one finding; as many as the campaign itself takes where those are fewer
OUT_OF_MEMORY = exhausted(MemoryError()) or ""
LONGEST_LINE = 1_000  # characters of an error; paths and names may be long


class Finding(AssertionError):
    """The program broke a promise."""


class _TooLong(BaseException):
    """Not an Exception, which the program could take for one of a model's."""


@dataclass(kw_only=True)
class Campaign:
    """How long and from which seed; and what was found."""

    name: str
    seconds: float
    seed: int
    shrink: bool = True  # look for the smallest input of a finding
    first: bool = False  # end at the first finding, as it was found
    tried: int = 0
    accepted: int = 0
    refused: int = 0
    findings: list[tuple[Any, str]] = field(default_factory=list)  # the smallest input, and why

    def run(
        self,
        inputs: SearchStrategy[Any],
        check: Callable[[Any], bool | None],
        *,
        vary: Callable[[Any], Iterable[Any]] = lambda found: [found],
        folder: Path | None = None,
    ) -> None:
        """Check random inputs until the time is over; whatever `check` raises is a finding.

        Args:
            inputs: What hypothesis draws.
            check: Says whether the input was accepted (True) or refused (False), as promised.
            vary: Makes several inputs of what was drawn, which takes longer than checking.
            folder: The only one in which files may be opened meanwhile; then `audit_hook` watches.
        """
        end = time.monotonic() + self.seconds
        batch = 0
        while time.monotonic() < end and len(self.findings) < (1 if self.first else MOST_FINDINGS):
            self._run_batch(inputs.map(vary), self._watched(check, folder), self.seed + batch, end)
            batch += 1
        ways = f" ({self.accepted:,} accepted, {self.refused:,} refused)" if self.accepted + self.refused else ""
        clean = f"{self.tried - len(self.findings):,} clean{ways}"
        print(f"\n{self.name}: {self.tried:,} tried, {clean}, {len(self.findings)} findings (seed {self.seed})")
        if self.findings:
            folder = Path(tempfile.mkdtemp(prefix=f"campaign-{self.name.replace(' ', '-')}-"))
            for number, (found, why) in enumerate(self.findings):
                _write_finding(folder / str(number), found, why)
            last = [why.partition("\n")[0] for _, why in self.findings]
            raise Finding(f"{self.name}: {len(self.findings)} findings in {folder}: {last}")

    def _run_batch(
        self, inputs: SearchStrategy[Iterable[Any]], check: Callable[[Any], bool | None], seed: int, end: float
    ) -> None:
        last: list[Any] = []
        shrunk = math.inf  # when the finding has been made small long enough

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate, *[Phase.shrink] * (self.shrink and not self.first)],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @hypothesis.given(inputs)
        def batch(drawn: Iterable[Any]) -> None:
            nonlocal shrunk
            for found in drawn:
                if time.monotonic() > (shrunk if last else end):
                    return
                self.tried += not last  # the smaller ones that follow are no inputs of their own
                try:
                    accepted = check(found)
                except Exception as error:
                    shrunk = min(shrunk, time.monotonic() + min(self.seconds, SECONDS_TO_SHRINK))
                    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    last[:] = [(found, f"{what}\n\n{traceback.format_exc()}")]  # the smallest one is tried last
                    raise
                self.accepted += accepted is True and not last
                self.refused += accepted is False and not last

        try:
            batch()
        except Exception:  # or a warning of hypothesis about the finding
            if not last:
                raise
            self.findings += last

    def _watched(self, check: Callable[[Any], bool | None], folder: Path | None) -> Callable[[Any], bool | None]:
        def checked(found: Any) -> bool | None:
            with limits(), watched(folder, lazily=True) if folder else contextlib.nullcontext(()) as events:
                accepted = check(found)
            if events:
                raise Finding(f"data caused {events[0]}")
            return accepted

        return checked


def _write_finding(path: Path, found: Any, why: str) -> None:
    """The input in words with the reason, and beside it the bytes of an input that is a file, or ends in one."""
    path.with_suffix(".txt").write_text(f"{found!r}\n\n{why}", encoding="utf-8", errors="backslashreplace")
    data = found[-1] if isinstance(found, tuple) else found
    if isinstance(data, bytes):
        path.with_suffix(".bin").write_bytes(data)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """An input that takes too long or too much memory is a finding."""

    def too_long(*_: object) -> None:
        raise _TooLong

    before, handler = peak(), signal.signal(signal.SIGALRM, too_long)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:  # the machine's memory is for others, too
        resource.setrlimit(resource.RLIMIT_DATA, (4 * MOST_MEMORY, hard))
    signal.alarm(MOST_SECONDS)
    try:
        yield
    except _TooLong:
        raise Finding(f"took more than {MOST_SECONDS} s") from None
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGALRM, handler)
    if peak() - before > MOST_MEMORY:
        raise Finding(f"took {(peak() - before) / 2**30:.1f} GB")


def peak() -> int:
    """Bytes of memory that the process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refusal(work: Callable[[], Any], *documented: type[Exception]) -> tuple[Any, str | None]:
    """What the work gives, or the line with which it refuses; any other exception is a finding."""
    try:
        return work(), None
    except DclsConvertError as error:
        check_refusal(str(error))
        return None, str(error)
    except documented as error:
        return None, str(error)


def check_line(line: str) -> None:
    if not line or not line.isprintable() or len(line) > LONGEST_LINE:
        raise Finding(f"not one readable line: {line[:2000]!r}")


def check_refusal(line: str) -> None:
    """Of an input that has no reason to take all memory, either."""
    check_line(line)
    if OUT_OF_MEMORY in line:
        raise Finding(f"took all memory: {line}")
