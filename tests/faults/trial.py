"""The run of a case on a stage, with the checks that apply to every case."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass, field

from faults.case import Case
from faults.client import Reply
from faults.stage import Stage
from faults.stored import Seen

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
    seen: list[Seen] = field(default_factory=list)


async def attempt(stage: Stage, case: Case) -> Outcome:
    """Run a case, and restart a Latimer that crashed or hangs."""
    start = time.monotonic()
    if case.alone:
        try:
            async with asyncio.timeout(case.seconds + MOST):
                violations = await case.act(stage, case)
        except Exception as error:
            violations = [f"the case broke: {error!r}"]
        notes, stage.notes = stage.notes, []
        seen, stage.seen = stage.seen, []
        return Outcome(case, stage.engine, time.monotonic() - start, violations, notes, seen)
    violations = await _attempted(stage, case)
    if violations and (not stage.latimer.alive or any("afterwards" in one for one in violations)):
        await stage.restart()
    return Outcome(case, stage.engine, time.monotonic() - start, violations)


async def _attempted(stage: Stage, case: Case) -> list[str]:
    latimer, fake = stage.latimer, stage.fake
    latimer.forget_peak()
    memory = latimer.memory()
    if fake is not None:
        fake.faults.update(case.calls)
        fake.most = fake.open
    beside: list[Reply] = []
    others = asyncio.create_task(_beside(stage, beside))
    if not case.beside:
        others.cancel()
    try:
        async with asyncio.timeout(case.seconds + MOST):
            violations = await case.act(stage, case)
    except Exception as error:
        violations = [f"the case broke: {error!r}"]
    finally:
        if fake is not None:
            for path in case.calls:
                fake.faults.pop(path, None)
    if not latimer.alive:
        code = latimer.process.returncode
        others.cancel()
        return [*violations, f"the process ended with {code}", *latimer.fresh_problems()]
    violations += await _finished(others, beside, stage)
    violations += await stage.witness()
    violations += latimer.fresh_problems() if latimer.alive else []
    grown = latimer.memory("VmHWM") - memory
    if grown > case.memory:
        violations.append(f"the process grew by {grown:.0f} MiB, more than {case.memory:.0f}")
    if fake is not None and fake.most > CONNECTIONS:
        violations.append(f"{fake.most} connections to the engine")
    if fake is not None and fake.open > IDLE + 1:
        violations.append(f"{fake.open} connections to the engine stay open")
    if fake is not None and fake.working:
        violations += await stage.calm()
    return violations + stage.canary.fresh()


async def _beside(stage: Stage, replies: list[Reply]) -> None:
    # Send the case's request first.
    await asyncio.sleep(0.02)
    while True:
        replies.append(Reply(seconds=time.monotonic(), problem="waits"))
        replies[-1] = await stage.small()
        await asyncio.sleep(0.02)


async def _finished(others: asyncio.Task[None], replies: list[Reply], stage: Stage) -> list[str]:
    """Judge the small requests during a case; a waiting one counts with its time so far."""
    if replies and replies[-1].problem == "waits":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while replies[-1].problem == "waits":
                    await asyncio.sleep(0.01)
        if replies[-1].problem == "waits":
            replies[-1] = Reply(seconds=time.monotonic() - replies[-1].seconds, problem="silent")
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
