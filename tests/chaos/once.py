"""Each case once: the run on a stage, the checks of every case, and the table of the results."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.case import ALL, FAKE_KOBOLD, FAKE_SERVER, INSIDE, REAL, Case
from chaos.cases import CASES
from chaos.client import Reply, Request
from chaos.stage import Stage

# Latimer's arguments: a time limit for silence, which koboldcpp does not have, and one thread in
# process, because threads that share cores with other tests mostly wait for each other.
_TIMEOUT = ("--engine-timeout", "2")
WORDS: dict[str, tuple[str, ...]] = {
    FAKE_SERVER: _TIMEOUT,
    FAKE_KOBOLD: (),
    REAL: _TIMEOUT,
    INSIDE: ("--context", "4096", "--parallel", "4", "--threads", "1", "--gpu-layers", "0"),
}
# Seconds by which a small request can take longer than alone: the median and the maximum.
LATER, LATEST = 0.25, 1.0
# Limits of connections to an engine: open at a time, and kept after a case.
CONNECTIONS = 160
IDLE = 64
# Seconds beyond its own limit after which a case is given up.
MOST = 60.0


@dataclass
class Outcome:
    """The result of a case."""

    case: Case
    engine: str
    seconds: float
    violations: list[str]
    notes: list[str] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)


async def run(
    engines: Sequence[str] = ALL, *, short: bool = False, kind: str = "", name: str = ""
) -> AsyncIterator[Outcome]:
    """Run cases on each engine, and yield their outcomes.

    Args:
        short: True for the cases of the short form only.
        kind: a part of the cases' class.
        name: a part of the cases' names.
    """
    cases = [
        case
        for case in CASES
        if kind in case.kind and name in case.name and (case.short or not short)
    ]
    for engine in engines:
        own = [case for case in cases if engine in case.engines]
        if not own:
            continue
        stage = Stage(engine, *WORDS[engine])
        await stage.start()
        try:
            for case in own:
                yield await attempt(stage, case)
        finally:
            await stage.stop()


async def attempt(stage: Stage, case: Case) -> Outcome:
    """Run a case, and restart a Latimer that crashed or hangs."""
    start = time.monotonic()
    if case.alone:
        violations = await _act(stage, case)
        seconds = time.monotonic() - start
        outcome = Outcome(case, stage.engine, seconds, violations, stage.notes, stage.seen)
        stage.notes, stage.seen = [], []
        return outcome
    violations = await _attempt(stage, case)
    if violations and (not stage.latimer.alive or any("afterwards" in one for one in violations)):
        await stage.restart()
    return Outcome(case, stage.engine, time.monotonic() - start, violations)


async def _act(stage: Stage, case: Case) -> list[str]:
    try:
        async with asyncio.timeout(case.seconds + MOST):
            return await case.act(stage, case)
    except Exception as error:
        return [f"the case broke: {error!r}"]


async def _attempt(stage: Stage, case: Case) -> list[str]:
    latimer, fake = stage.latimer, stage.fake
    latimer.forget_peak()
    memory = latimer.memory()
    if fake is not None:
        fake.faults.update(case.calls)
        fake.most = fake.open
    beside: list[Reply] = []
    others = asyncio.create_task(_send_beside(stage, beside))
    if not case.beside:
        others.cancel()
    violations = await _act(stage, case)
    if fake is not None:
        for path in case.calls:
            fake.faults.pop(path, None)
    if not latimer.alive:
        code = latimer.process.returncode
        others.cancel()
        return [*violations, f"the process ended with {code}", *latimer.fresh_problems()]
    violations += await _judge_beside(others, beside, stage)
    violations += await stage.witness()
    violations += latimer.fresh_problems() if latimer.alive else []
    grown = latimer.memory("VmHWM") - memory
    if grown > case.memory:
        violations.append(f"the process grew by {grown:.0f} MiB, more than {case.memory:.0f}")
    if fake is not None:
        if fake.most > CONNECTIONS:
            violations.append(f"{fake.most} connections to the engine")
        if fake.open > IDLE + 1:
            violations.append(f"{fake.open} connections to the engine stay open")
        if fake.working:
            violations += await stage.calm()
    return violations + stage.canary.fresh()


async def _send_beside(stage: Stage, replies: list[Reply]) -> None:
    # Send the case's request first.
    await asyncio.sleep(0.02)
    while True:
        replies.append(Reply(Request(""), seconds=time.monotonic(), problem="waits"))
        replies[-1] = await stage.small()
        await asyncio.sleep(0.02)


async def _judge_beside(
    others: asyncio.Task[None], replies: list[Reply], stage: Stage
) -> list[str]:
    """Judge the small requests during a case; a waiting one counts with its time so far."""
    if replies and replies[-1].problem == "waits":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while replies[-1].problem == "waits":
                    await asyncio.sleep(0.01)
        if replies[-1].problem == "waits":
            replies[-1].seconds = time.monotonic() - replies[-1].seconds
    others.cancel()
    await asyncio.gather(others, return_exceptions=True)
    # Errors do not count: without its engine, Latimer has no other reply.
    times = [reply.seconds for reply in replies if reply.problem or reply.status == 200]
    if not times:
        return []
    middle, most = statistics.median(times) - stage.alone, max(times) - stage.alone
    # The median of one or two requests says little on a busy machine.
    if middle > (LATER if len(times) > 2 else 2 * LATER) or most > LATEST:
        return [
            f"small requests waited: {middle * 1000:.0f} ms longer than alone in the middle, "
            f"{most * 1000:.0f} ms at most, of {len(times)}"
        ]
    return []


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return a Markdown table of each class and engine, and each violation in full."""
    lines = ["| class | engine | tried | held | violated | violations |",
             "|---|---|--:|--:|--:|--:|"]  # fmt: skip
    for kind, engine in sorted({(one.case.kind, one.engine) for one in outcomes}, key=_order):
        own = [one for one in outcomes if (one.case.kind, one.engine) == (kind, engine)]
        lines.append(f"| {kind} | {engine} | {_counts(own)} |")
    lines += [f"| **all** | | {_counts(outcomes)} |", "", f"{seconds:.0f} s in all.", ""]
    lines += [
        f"- {one.case.kind}, {one.case.name}: {note}" for one in outcomes for note in one.notes
    ]
    if seen := [row for outcome in outcomes for row in outcome.seen]:
        lines += ["", "## What was seen while the store failed", ""]
        lines.append("| fault | chat with `store: true` | reads | `/health` | log | afterwards |")
        lines += ["|---|---|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in seen), ""]
    violated = [outcome for outcome in outcomes if outcome.violations]
    lines += ["## Violations", ""] if violated else []
    for outcome in violated:
        lines.append(f"- **{outcome.case.kind}, {outcome.case.name}** ({outcome.engine})")
        lines += [f"  - {one}" for one in outcome.violations]
    return "\n".join(lines) + "\n"


def _order(group: tuple[str, str]) -> tuple[int, str, str]:
    number = group[0].split()[0]
    return (int(number) if number.isdigit() else 99, *group)


def _counts(outcomes: Sequence[Outcome]) -> str:
    violated = sum(bool(outcome.violations) for outcome in outcomes)
    violations = sum(len(outcome.violations) for outcome in outcomes)
    return f"{len(outcomes)} | {len(outcomes) - violated} | {violated} | {violations}"
