"""The output of `latimer conform` while checks run, and after them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

import click

from .check import Check, Verdict
from .profiles import NOT_JUDGED, PROFILES, causes, works
from .reports.explanation import explanation
from .reports.run import OUTCOMES, Run, kept
from .runner import NOT_ENDED

COLOURS = {"pass": "green", "fail": "red", "flaky": "yellow", "timeout": "magenta",
           "unsupported": "blue"}  # fmt: skip


class Live:
    """The lines of a run: one for each check that does not pass, and the progress on a terminal.

    Args:
        at_once: the number of checks that run concurrently.
    """

    def __init__(self, checks: Sequence[Check], at_once: int) -> None:
        self._counts: Counter[str] = Counter()
        self._total = len(checks)
        # In turns of one check alone.
        self._work = {check.id: 1.0 if check.alone else 1.0 / at_once for check in checks}
        self._left = self._all = sum(self._work.values())
        self._start = time.monotonic()
        self._shows = sys.stderr.isatty()

    def take(self, verdict: Verdict) -> None:
        """Print the verdict of a check that has ended."""
        self._counts[verdict.outcome] += 1
        self._left -= self._work[verdict.check.id]
        if verdict.outcome != "pass":
            self._clear()
            outcome = click.style(f"{verdict.outcome:<11}", fg=COLOURS.get(verdict.outcome))
            detail = " ".join(verdict.detail[:160].split())
            click.echo(f"{outcome} {verdict.check.level:<6} {verdict.check.id}: {plain(detail)}")
        if self._shows:
            click.echo(f"\r\x1b[K{self.progress()}", nl=False, err=True)

    def progress(self) -> str:
        """Return the number of checks that have ended, and an estimate of the time left."""
        done = self._counts.total()
        broken = sum(self._counts[one] for one in ("fail", "flaky", "timeout"))
        spent = time.monotonic() - self._start
        left = spent * self._left / max(self._all - self._left, 1e-9)
        words = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"
        return f"{done} of {self._total} checks, {broken} broken, about {words} left"

    def close(self) -> None:
        """Remove the line of the progress."""
        self._clear()

    def _clear(self) -> None:
        if self._shows:
            click.echo("\r\x1b[K", nl=False, err=True)


def plain(text: str) -> str:
    """Replace unprintable characters, which could control a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def explain(run: Run) -> None:
    """Print each newly broken check: its clause, the exchange, and the peers' verdicts."""
    for verdict in run.new:
        click.echo(plain(f"\n{explanation(run, verdict, kept)}"))


def summary(run: Run) -> None:
    """Print the counts of each group, how well each client works, and the counts of the run."""
    click.echo()
    for group, verdicts in run.groups().items():
        passed = sum(verdict.outcome == "pass" for verdict in verdicts)
        click.echo(f"{group:<16} {passed:>3} of {len(verdicts)}")
    click.echo()
    for name in PROFILES:
        result, wrong = works(name, run.verdicts)
        if result == NOT_JUDGED:
            continue
        named = causes(result, wrong, [one.check.id for one in wrong[:3]])
        click.echo(f"{name:<16} {result}{': ' if wrong else ''}{named}")
    click.echo()
    counts = ", ".join(f"{run.counts[one]} {one}" for one in OUTCOMES if run.counts[one])
    click.echo(f"{len(run.verdicts)} checks: {counts}")
    if run.limited:
        click.echo(
            f"Requests with status 429: {run.limited}. The server limits their rate. --at-once 1 "
            "sends fewer at a time."
        )
    if run.left:
        reason = run.left[0].detail.partition(": ")[2]
        cut = sum(one.detail.startswith(NOT_ENDED) for one in run.left)
        also = f", and {cut} did not end" if cut else ""
        click.echo(plain(f"{len(run.left) - cut} of them did not run{also}: {reason}"))
