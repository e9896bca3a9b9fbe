"""A campaign: random inputs for some seconds, each held to what the program promises; what breaks it is made small.

`pytest -m campaign -n 0 -s --seconds 600 --seed 7` prints for each campaign how many inputs were tried, and writes the
smallest input of each finding to a folder, which it names.
"""

import contextlib
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from dcls_convert.errors import DclsConvertError

BATCH = 200  # inputs between two looks at the clock
MOST_SECONDS = 60  # for one input
MOST_MEMORY = 2 << 30  # bytes that one input may add
MOST_FINDINGS = 5  # of one campaign; then it ends
LONGEST_LINE = 1_000  # characters of an error; paths and names may be long


class Finding(AssertionError):
    """The program broke a promise."""


@dataclass(kw_only=True)
class Campaign:
    """How long and from which seed; and what was found."""

    name: str
    seconds: float
    seed: int
    shrink: bool = True  # look for the smallest input of a finding
    tried: int = 0
    findings: list[tuple[Any, str]] = field(default_factory=list)  # the smallest input, and why

    def run(self, inputs: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
        """Check random inputs until the time is over; whatever `check` raises is a finding."""
        end = time.monotonic() + self.seconds
        batch = 0
        while time.monotonic() < end and len(self.findings) < MOST_FINDINGS:
            self._run_batch(inputs, check, self.seed + batch, end)
            batch += 1
        print(f"\n{self.name}: {self.tried:,} tried, {len(self.findings)} findings (seed {self.seed})")
        if self.findings:
            folder = Path(tempfile.mkdtemp(prefix=f"campaign-{self.name.replace(' ', '-')}-"))
            for number, (found, why) in enumerate(self.findings):
                (folder / f"{number}.txt").write_text(
                    f"{found!r}\n\n{why}", encoding="utf-8", errors="backslashreplace"
                )
            last = [why.strip().splitlines()[-1] for _, why in self.findings]
            raise Finding(f"{self.name}: {len(self.findings)} findings in {folder}: {last}")

    def _run_batch(self, inputs: SearchStrategy[Any], check: Callable[[Any], None], seed: int, end: float) -> None:
        last: list[Any] = []

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate, *[Phase.shrink] * self.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @hypothesis.given(inputs)
        def batch(found: Any) -> None:
            if time.monotonic() > end and not self.findings:
                return
            self.tried += 1
            try:
                with limits():
                    check(found)
            except Exception:
                last[:] = found, traceback.format_exc()  # the smallest one is tried last
                raise

        try:
            batch()
        except Exception:
            if not last:
                raise
            self.findings.append((last[0], last[1]))


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """An input that takes too long or too much memory is a finding."""

    def too_long(*_: object) -> None:
        raise Finding(f"took more than {MOST_SECONDS} s")

    before, handler = peak(), signal.signal(signal.SIGALRM, too_long)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
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
        check_line(str(error))
        return None, str(error)
    except documented as error:
        return None, str(error)


def check_line(line: str) -> None:
    if not line or not line.isprintable() or len(line) > LONGEST_LINE:
        raise Finding(f"not one readable line: {line[:2000]!r}")
