"""Findings: grouped by signature, reduced to a small case, and written to files."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.cases import Case, smaller, to_json

# Maximum number of files for one kind of finding; others are only counted.
MOST_FILES = 3


@dataclass(frozen=True)
class Finding:
    """A violation that a case has shown.

    Args:
        kind: "died", "answer", "log", "held", "witness", "left over", "memory" or "engine died".
        what: a description in one line.
        details: a traceback, stacks, or the output.
    """

    kind: str
    what: str
    details: str = ""

    @property
    def signature(self) -> str:
        """A text that findings with the same probable cause share."""
        frames = re.findall(r'File ".*?/(\w+\.py)", line \d+, in (\w+)', self.details)
        where = "" if self.kind == "answer" else str(frames[-1:])
        return f"{self.kind}: {re.sub(r'[0-9]+', '#', self.what)[:120]} {where}"


class Findings:
    """The findings of a run, and the folder of their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(
        self, target: str, case: Case | None, finding: Finding, seed: int,
        reduce: Callable[[Case, Finding], Case] | None = None,
    ) -> None:  # fmt: skip
        """Count a finding, and write it to a file unless its kind has enough of them."""
        key = (target, finding.signature)
        self.counts[key] += 1
        if self.counts[key] > MOST_FILES:
            return
        print(f"  {target}: {finding.signature}", flush=True)
        small = case
        if case is not None and reduce is not None and self.counts[key] == 1:
            small = reduce(case, finding)
        name = re.sub(r"\W+", "-", f"{target}-{finding.kind}-{finding.what}")[:80]
        made = {
            "target": target, "seed": seed, "kind": finding.kind, "what": finding.what,
            "details": finding.details[-20_000:],
            **({} if small is None else to_json(small)),
            "original": None if case is None or case is small else to_json(case),
        }  # fmt: skip
        path = self.folder / f"{name}-{self.counts[key]}.json"
        path.write_text(json.dumps(made, indent=1))


def reduced(
    case: Case, finding: Finding, run: Callable[[Case], list[Finding]], seconds: float = 30.0
) -> Case:
    """Return the smallest case found within a time limit that still shows a finding.

    Args:
        run: runs a case and returns its findings.
    """
    end = time.monotonic() + seconds

    def shows(one: Case) -> bool:
        return any(found.signature == finding.signature for found in run(one))

    if not shows(case):
        return case
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for less in smaller(case):
            if time.monotonic() > end:
                break
            if shows(less):
                case, changed = less, True
                break
    return case
