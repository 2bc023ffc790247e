"""Runs of the suite against one server: taken, kept in a file, and compared with each other."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from latimer.conformance.check import Verdict, all_checks
from latimer.conformance.runner import Settings, judge
from suite.pages import BROKEN

# So many late responses can be due to other work of the machine: these checks run again alone.
FEW = 10
# The seconds of the checks that come last.
LAST = 60.0


def taken(settings: Settings, last: str = "") -> list[Verdict]:
    """Run all checks against a running server.

    Args:
        last: patterns of the checks that come last, with `LAST` seconds in all.
    """
    checks = all_checks()
    after = [one for one in checks if any(fnmatchcase(one.id, part) for part in last.split())]
    found = asyncio.run(judge(settings, [one for one in checks if one not in after]))
    late = [verdict.check for verdict in found if verdict.broken and "within" in verdict.detail]
    if late and len(late) <= FEW:
        found += asyncio.run(judge(replace(settings, at_once=1), late))
    if after:
        found += asyncio.run(judge(replace(settings, most=LAST), after))
    known = {verdict.check.id: verdict for verdict in found}
    return [known[one.id] for one in checks]


def again(run: Sequence[Verdict], settings: Settings, only: str) -> list[Verdict]:
    """Return a run with new verdicts of the checks that match patterns, and of those it lacks."""
    found = {one.check.id: one for one in run}
    checks = [
        one
        for one in all_checks()
        if one.id not in found or any(fnmatchcase(one.id, part) for part in only.split())
    ]
    found |= {one.check.id: one for one in asyncio.run(judge(settings, checks))}
    return [found[one.id] for one in all_checks()]


def settled(runs: Sequence[Sequence[Verdict]]) -> tuple[list[Verdict], list[str]]:
    """Return one verdict for each check, and a line for each check with different ones.

    A check that is broken in some runs only is flaky; another difference leaves the last verdict.
    """
    found, lines = [], []
    for several in zip(*runs, strict=True):
        outcomes = [verdict.outcome for verdict in several]
        last = several[-1]
        if len({*outcomes}) > 1:
            broken = [verdict for verdict in several if verdict.outcome in BROKEN]
            last = replace(broken[-1], outcome="flaky") if broken else last
            lines.append(f"{last.check.id}: {', then '.join(outcomes)}: {last.detail[:150]}")
        found.append(last)
    return found, lines


def kept(path: Path, whole: bool = True) -> list[list[Verdict]]:
    """Return the runs that a file has.

    Args:
        whole: return no run that lacks a check; checks that no longer exist never count.
    """
    known = {check.id: check for check in all_checks()}
    rows = pickle.loads(path.read_bytes()) if path.exists() else []  # noqa: S301
    found = [
        [Verdict(known[name], *values) for name, *values in run if name in known] for run in rows
    ]
    return [run for run in found if len(run) == len(known) or not whole]


def keep(path: Path, runs: Sequence[Sequence[Verdict]]) -> None:
    """Write runs into a file."""
    rows = [[(one.check.id, *_values(one)) for one in run] for run in runs]
    path.write_bytes(pickle.dumps(rows))


def _values(verdict: Verdict) -> tuple[Any, ...]:
    """Return the fields of a verdict after its check."""
    return tuple(getattr(verdict, one.name) for one in fields(verdict)[1:])
