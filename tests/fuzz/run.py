"""Fuzz the adapter over each engine for some minutes.

    python tests/fuzz/run.py [--minutes 30] [--seed N] [--engine NAME] [--findings FOLDER]

The engines share the minutes. The exit code is 1 with any finding. Each finding is a file that
`--replay` runs again.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import hypothesis
from fuzz.cases import Case, cases, from_json
from fuzz.engines import TARGETS, Engine, engine
from fuzz.findings import Finding, Findings, reduced
from fuzz.session import Died, Session
from hypothesis import HealthCheck, Phase, given, settings

# Cases between two checks of known completions, tasks, files and memory; and per hypothesis run.
LOOK_EVERY, AT_ONCE = 25, 200
# KiB by which the memory can grow from the second third to the last, and the checks it takes.
GROWTH, LOOKS = 48 * 1024, 40


class Over(BaseException):
    """The time is up, or the process is stuck.

    It is not an `Exception`, because hypothesis would report that as a failure.
    """


@dataclass
class Summary:
    """The totals of one engine."""

    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    longest: float = 0.0
    memory: list[int] = field(default_factory=list)
    restarts: int = 0

    def add(self, session: Session) -> None:
        """Add the counts of a process."""
        self.statuses += session.statuses
        turns, longest = session.turns()
        self.turns += turns
        self.longest = max(self.longest, longest)
        self.memory += session.memory

    def quantile(self, part: float) -> float:
        """Return the duration in ms that a fraction of all loop turns does not exceed."""
        left = part * sum(self.turns.values())
        for step, count in sorted(self.turns.items()):
            left -= count
            if left <= 0:
                return (step + 1) / 20
        return 0.0


class Run:
    """Cases over one engine, up to a time or a number of cases."""

    def __init__(self, name: str, seed: int, findings: Findings, most: int | None) -> None:
        self.name, self.seed, self.findings, self.most = name, seed, findings, most
        self.summary = Summary()

    def until(self, end: float) -> Summary:
        """Run cases, and start a new process whenever one ends."""
        with asyncio.Runner() as runner:
            while time.monotonic() < end and not self._is_done():
                with engine(self.name) as here:
                    self._one_engine(here, runner, end)
        return self.summary

    def _is_done(self) -> bool:
        return self.most is not None and self.summary.cases >= self.most

    def _one_engine(self, here: Engine, runner: asyncio.Runner, end: float) -> None:
        """Run cases until the process ends, which is a finding."""
        session = Session(here, runner)
        current: list[Case] = []
        try:
            while not self._is_done():
                self._go(session, end, current)
            self._look(session, current)
        except Over:
            self.summary.restarts += session.stuck
        except Died as died:
            self.summary.restarts += 1
            finding = Finding("died", str(died), session.errors())
            case = current[-1] if current else None
            self.findings.add(self.name, case, finding, self.seed, _reducing(here, runner))
        finally:
            with_memory = session.memory
            try:
                self.summary.add(session)
            except Died:
                self.summary.statuses += session.statuses
            session.close()
        self._check_memory(with_memory)

    def _go(self, session: Session, end: float, current: list[Case]) -> None:
        """Run the cases of one hypothesis run."""
        count = AT_ONCE if self.most is None else min(AT_ONCE, self.most - self.summary.cases)

        @hypothesis.seed(self.seed * 100_000 + self.summary.cases)
        @settings(
            max_examples=count, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(cases(self.name.endswith("_edited")))
        def one(case: Case) -> None:
            if time.monotonic() > end:
                raise Over
            self.summary.cases += 1
            current[:] = [*current[-4:], case]
            found = session.run(case)
            for finding in found:
                reduce = None if session.stuck else partial(reduced, run=session.run)
                self.findings.add(self.name, case, finding, self.seed, reduce)
            if session.stuck:
                raise Over
            if found or self.summary.cases % LOOK_EVERY == 0:
                self._look(session, current)

        one()

    def _look(self, session: Session, current: list[Case]) -> None:
        for finding in session.look():
            case = current[-1] if current else None
            self.findings.add(self.name, case, finding, self.seed)
        if session.stuck:
            raise Over

    def _check_memory(self, memory: list[int]) -> None:
        if len(memory) < LOOKS:
            return
        third = len(memory) // 3
        before = statistics.median(memory[third : 2 * third])
        after = statistics.median(memory[-third:])
        if after - before > GROWTH:
            what = f"{(after - before) / 1024:.0f} MiB more in the last third than in the second"
            self.findings.add(self.name, None, Finding("memory", what), self.seed)


def _reducing(here: Engine, runner: asyncio.Runner) -> Callable[[Case, Finding], Case]:
    """Return a function that reduces a case that ends the process, with a new process per try."""

    def run(case: Case) -> list[Finding]:
        session = Session(here, runner)
        try:
            return session.run(case)
        except Died as died:
            return [Finding("died", str(died), session.errors())]
        finally:
            session.close()

    return partial(reduced, run=run, seconds=60.0)


def show(summaries: dict[str, Summary], findings: Findings) -> None:
    """Print the summaries as a table."""
    print("| engine | cases | answers | findings | longest turn | p99.9 | memory, MiB | restarts |")
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    for name, one in summaries.items():
        statuses = ", ".join(f"{n} × {status}" for status, n in one.statuses.most_common())
        count = sum(n for (target, _), n in findings.counts.items() if target == name)
        memory = f"{one.memory[0] // 1024} → {one.memory[-1] // 1024}" if one.memory else ""
        print(
            f"| {name} | {one.cases} | {statuses} | {count} | {one.longest:.1f} ms | "
            f"{one.quantile(0.999):.2f} ms | {memory} | {one.restarts} |"
        )
    for (target, signature), count in findings.counts.most_common():
        print(f"{count} × {target}: {signature}")


def fuzz(
    targets: list[str], minutes: float, seed: int, findings: Findings, most: int | None = None
) -> dict[str, Summary]:
    """Fuzz the engines in sequence, each for an equal share of the time."""
    summaries = {}
    for name in targets:
        end = time.monotonic() + minutes * 60 / len(targets)
        summaries[name] = Run(name, seed, findings, most).until(end)
    return summaries


def replay(path: Path, target: str | None = None) -> list[Finding]:
    """Run the case of a file again, and check the process afterwards."""
    made = json.loads(path.read_text())
    with (
        asyncio.Runner() as runner,
        engine(target or made.get("target") or made["targets"][0]) as here,
    ):
        session = Session(here, runner)
        try:
            return session.run(from_json(made)) + session.look()
        except Died as died:
            return [Finding("died", str(died), session.errors())]
        finally:
            session.close()


def main() -> int:
    """Read the options, fuzz, and print the findings."""
    faulthandler.enable()
    parser = argparse.ArgumentParser(description="Fuzz the adapter over each engine.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engine", action="append", choices=TARGETS)
    parser.add_argument("--findings", type=Path, default=None)
    parser.add_argument("--replay", type=Path, default=None, help="a finding to run again")
    given = parser.parse_args()
    if given.replay is not None:
        found = replay(given.replay)
        for one in found:
            print(one.kind, one.what, one.details, sep="\n")
        return int(bool(found))
    seed = random.randrange(10**6) if given.seed is None else given.seed
    folder = given.findings or Path(tempfile.mkdtemp(prefix="latimer-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Seed {seed}; findings go to {folder}", flush=True)
    findings = Findings(folder)
    show(fuzz(given.engine or list(TARGETS), given.minutes, seed, findings), findings)
    return int(bool(findings.counts))


if __name__ == "__main__":
    sys.exit(main())
