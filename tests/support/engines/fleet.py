"""Engines for tests of a fleet, which answer slowly, fail, or hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from latimer.backends.base import Batch, Finish, Generation, Model, Piece, Prompt, Text
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica

from support.engines.echo import Echo


class Engine(Echo):
    """An engine that says its name.

    Args:
        places: the calls that run at a time; more than these are noted in `most`.

    Attributes:
        gate: a call waits for it before its first event.
        fails: raised before the first event; `breaks` is raised after it.
        runs, most: the calls that run now, and the most that ran at a time.
        cached: the cached tokens that each call reports.
    """

    def __init__(self, name: str, places: int = 2) -> None:
        super().__init__(name)
        self.facts = replace(self.facts, places=places)
        self.name = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: Exception | None = None
        self.breaks: Exception | None = None
        self.runs = self.most = 0
        self.cached = 0
        self.asked = 0

    async def model(self) -> Model:
        """Return the model, or raise the error."""
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.facts

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job."""
        self.jobs.append(job)
        self.runs += len(job.seeds)
        self.most = max(self.most, self.runs)
        try:
            await asyncio.sleep(0)
            if self.fails is not None:
                raise self.fails
            yield self.batches(job)
        finally:
            self.runs -= len(job.seeds)

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Yield the name and a finish for each choice."""
        await self.gate.wait()
        content = job.prompt.content
        size = len(content.text) // 4 if isinstance(content, Text) else len(content)
        for choice in range(len(job.seeds)):
            yield [Piece(choice, self.name.encode(), token_count=1)]
            if self.breaks is not None:
                raise self.breaks
            yield [Finish(choice, "end", None, size, 1, min(self.cached, size))]


def job(text: str = "a", owner: str = "", choices: int = 1) -> Generation:
    """Return a job for the engines of a pool."""
    seeds = (None,) * choices
    return Generation(Prompt(Text(text)), 8, seeds=seeds, owner=owner, fingerprint="fp_echo")


def in_order() -> float:
    """Let the first of several engines that are as good be chosen first."""
    return 0.0


async def pool_of(
    *engines: Engine,
    queue: int = 64,
    affinity: str = "prefix",
    draw: Callable[[], float] = in_order,
) -> Pool:
    """Return a pool whose engines have all answered."""
    replicas = [Replica(engine.name, engine) for engine in engines]
    pool = Pool("demo", replicas, queue, affinity, draw)  # type: ignore[arg-type]
    await asyncio.gather(*(pool.ask(replica) for replica in replicas))
    return pool
