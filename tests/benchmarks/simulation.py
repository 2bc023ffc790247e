"""Simulate conversations over 10, 100 and 1,000 engines, with the code that chooses in a fleet.

    python tests/benchmarks/simulation.py [--engines 10 100 1000] [--seconds 60] [--load 0.7]
        [--way prefix ...] [--failures] [--compare-all] [--seed 1]
        [--plot docs/performance/simulation.svg]

`Pool` is the real one. An engine is a double: its prompts and tokens take simulated time, and its
prompt cache keeps the conversations that were used last. The clock of the event loop jumps to the
next timer, so that no time passes while engines work, and a seed gives the same figures each time.
The cost of a decision is CPU time of this process. It is the only figure that differs between runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import selectors
import statistics
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.plots import picture
from latimer.backends.base import Batch, Finish, Generation, Model, Piece, Prompt, Text, TokenIds
from latimer.backends.errors import EngineError, EngineUnavailable
from latimer.backends.fleet import pool as module
from latimer.backends.fleet.breaker import Breaker, RetryBudget
from latimer.backends.fleet.config import Affinity
from latimer.backends.fleet.place import Place
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.queue import Ticket
from support.engines.echo import Echo

# An engine: calls at a time, prompt tokens a second, seconds of a token, tokens of its cache.
PLACES, PROMPT_SPEED, TOKEN_SECONDS, CACHE, CONTEXT = 8, 4_000.0, 0.03, 65_536, 32_768
# Conversations: tokens of the common system prompt, and medians of a message and of an answer,
# whose lengths have a logarithmic normal distribution; the mean of turns and of pauses in seconds.
SYSTEM, MESSAGE, ANSWER, SPREAD, LONGEST = 400, 100, 100, 1.0, 4_000
TURNS, MOST_TURNS, PAUSE = 6, 30, 5.0
# The share of the time after which figures count, and the seconds that a dead engine is dead.
WARM, DEAD = 1 / 3, 20.0
# One of so many decisions has its Python calls counted instead of its time.
COUNTED = 16
WAYS: dict[str, Affinity] = {
    "prefix": "prefix",
    "session": "session",
    "least busy": "none",
    "round robin": "none",
}
PANELS = {
    "reuse": "prompt tokens reused, % of an endless cache",
    "balance": "requests of the busiest engine, times the mean",
    "p50": "first token, p50, ms",
    "p99": "first token, p99, ms",
    "micros": "CPU time of a decision, µs",
}

T = TypeVar("T")


class Jump(selectors.BaseSelector):
    """A selector that waits for nothing: it advances the time."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept the event loop's own pipe, which nobody writes to."""
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Accept it again."""
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return no files."""
        return {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the time to the next timer."""
        assert timeout is not None, "everything waits, and no timer is set"
        self.now += max(timeout, 0.0)
        return []


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer."""

    def __init__(self) -> None:
        self.jump = Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        """Return the simulated seconds."""
        return self.jump.now


def simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in simulated time, which `time.monotonic` has, too."""
    loop = JumpingLoop()
    with (
        asyncio.Runner(loop_factory=lambda: loop) as runner,
        mock.patch("time.monotonic", loop.time),
    ):
        return runner.run(main)


class Engine(Echo):
    """An engine that takes simulated time.

    Prompts are evaluated one after the other. A call beyond its slots waits.

    Attributes:
        cache: the tokens of each conversation in the prompt cache; the last one used at the end.
        is_dead: True if it answers nothing.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.facts = Model("demo", CONTEXT, None, "", "", False, "fp", 7, places=PLACES)
        self.name = name
        self.cache: OrderedDict[TokenIds, int] = OrderedDict()
        self.is_dead = False
        self._tokens = 0
        self._free = PLACES
        self._line: deque[asyncio.Future[None]] = deque()
        self._evaluates_until = 0.0
        # Waits of calls, which end when the engine dies.
        self._waits: dict[asyncio.Future[None], None] = {}

    def die(self) -> None:
        """Fail all calls, and forget all prompts."""
        self.is_dead, self._evaluates_until, self._tokens = True, 0.0, 0
        self.cache.clear()
        for wait in [*self._waits]:
            if not wait.done():
                wait.set_exception(EngineUnavailable("It is dead."))

    async def health(self) -> None:
        """Raise an error while it is dead."""
        if self.is_dead:
            raise EngineUnavailable("It is dead.")

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job in one of the slots."""
        await self.health()
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            await self._wait(turn)
        try:
            yield self.batches(job)
        finally:
            while self._line and self._line[0].done():
                self._line.popleft()
            if self._line:
                self._line.popleft().set_result(None)
            else:
                self._free += 1

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Evaluate the prompt, yield the first token, generate the others, yield the end."""
        await self.health()
        ids = job.prompt.content
        assert not isinstance(ids, Text)
        assert job.max_tokens is not None
        size = len(ids)
        name = tuple(ids[SYSTEM : SYSTEM + 4])
        cached = min(self.cache.get(name, SYSTEM if self.cache else 0), size - 1)
        now = asyncio.get_running_loop().time()
        start = max(now, self._evaluates_until)
        self._evaluates_until = start + (size - cached) / PROMPT_SPEED
        await self._sleep(self._evaluates_until + TOKEN_SECONDS - now)
        self._keep(name, size)
        yield [Piece(0, b"a", token_count=1)]
        await self._sleep((job.max_tokens - 1) * TOKEN_SECONDS)
        self._keep(name, size + job.max_tokens)
        yield [Finish(0, "length", None, size, job.max_tokens, cached)]

    def _keep(self, name: TokenIds, size: int) -> None:
        self._tokens += size - self.cache.pop(name, 0)
        self.cache[name] = size
        while self._tokens > CACHE:
            self._tokens -= self.cache.popitem(last=False)[1]

    async def _sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        wait = loop.create_future()
        timer = loop.call_later(seconds, _end, wait)
        try:
            await self._wait(wait)
        finally:
            timer.cancel()

    async def _wait(self, wait: asyncio.Future[None]) -> None:
        self._waits[wait] = None
        try:
            await wait
        finally:
            del self._waits[wait]


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)


class Measured(Pool):
    """A pool that measures its decisions.

    Attributes:
        micros: the CPU time of each choice of an engine.
        total: that of all choices and of all looks at waiting calls.
        calls: the Python calls of some choices.
    """

    micros: array[float]
    calls: list[int]
    total = 0.0
    longest = 0.0
    _inside = False

    def grant(self) -> None:
        """Measure a look at waiting calls."""
        if self._inside or not (self._line.requests or self._parked):
            super().grant()
            return
        # The garbage of a whole simulation is not collected within a look.
        gc.disable()
        self._inside, start = True, time.thread_time()
        try:
            super().grant()
        finally:
            self._inside = False
            taken = time.thread_time() - start
            gc.enable()
            self.total += taken
            self.longest = max(self.longest, taken)

    def _choose(self, place: Place, now: float | None = None, parks: bool = True) -> Replica | None:
        if len(self.micros) % COUNTED == 0:
            self.micros.append(self.micros[-1] if self.micros else 0.0)
            with counted(self.calls):
                return super()._choose(place, now, parks)
        start = time.thread_time()
        found = super()._choose(place, now, parks)
        taken = time.thread_time() - start
        self.micros.append(taken * 1e6)
        if not self._inside:
            self.total += taken
        return found


class RoundRobin(Measured):
    """A pool that gives each call the next engine, where it waits for a slot."""

    _next = -1

    def _choose(self, place: Place, now: float | None = None, parks: bool = True) -> Replica | None:
        for _ in self.replicas:
            self._next = (self._next + 1) % len(self.replicas)
            replica = self.replicas[self._next]
            if replica.state == "ready" and replica not in place.failed:
                place.replica, place.taken = replica, 1
                replica.running += 1
                return replica
        return None


@contextmanager
def counted(calls: list[int]) -> Iterator[None]:
    """Count the Python calls of a block, without the one that it measures with."""
    count = 0

    def note(_frame: FrameType, what: str, _argument: object) -> None:
        nonlocal count
        count += what == "call"

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        # The end of this function is a call, too.
        calls.append(count - 1)


@dataclass
class Turn:
    """A message and its answer, in tokens, after a pause in seconds."""

    message: int
    answer: int
    pause: float


@dataclass
class Result:
    """Figures of a run; times are in seconds, and CPU times in microseconds.

    Attributes:
        firsts: the times to the first token.
        cached, endless: the prompt tokens from caches, and those that an endless cache would have.
        cut: the answers that ended in the middle because their engine died.
        failed: the requests that failed in another way.
        running, balances, waiting: each second, the share of the taken places, those of the busiest
            engine as a multiple of the mean, and the waiting requests.
        left: the places and requests that were left at the end.
        micros, request_micros: the CPU time of a choice, and of all choices and looks at waiting
            requests for each request.
        longest: the CPU milliseconds of the longest look at waiting requests.
        calls: the Python calls of a choice.
    """

    requests: int = 0
    firsts: list[float] = field(default_factory=list)
    cached: int = 0
    endless: int = 0
    cut: int = 0
    failed: int = 0
    running: list[float] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    left: int = 0
    micros: float = 0.0
    calls: float = 0.0
    request_micros: float = 0.0
    longest: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return the figures that a seed determines, by name; times in milliseconds."""
        cuts = statistics.quantiles(self.firsts, n=100)
        return {
            "requests": self.requests,
            "reuse": 100 * self.cached / self.endless,
            "load": 100 * statistics.fmean(self.running),
            "balance": statistics.fmean(self.balances),
            "p50": cuts[49] * 1000,
            "p99": cuts[98] * 1000,
            "waiting": statistics.fmean(self.waiting),
            "cut": self.cut,
            "failed": self.failed,
        }


def conversations_of(chance: random.Random, count: int) -> list[list[Turn]]:
    """Return the turns of conversations."""

    def length(median: int) -> int:
        return min(1 + int(median * chance.lognormvariate(0.0, SPREAD)), LONGEST)

    found = []
    for _ in range(count):
        turns: list[Turn] = []
        size = SYSTEM
        while len(turns) < MOST_TURNS and (not turns or chance.random() > 1 / TURNS):
            turn = Turn(length(MESSAGE), length(ANSWER), chance.expovariate(1 / PAUSE))
            size += turn.message + turn.answer
            if size > CONTEXT:
                break
            turns.append(turn)
        found.append(turns)
    return found


def seconds_of(conversations: Sequence[Sequence[Turn]]) -> tuple[float, float]:
    """Return the mean seconds of a slot, and those of all, for a conversation that never waits."""
    turns = [turn for conversation in conversations for turn in conversation]
    busy = sum(turn.message / PROMPT_SPEED + turn.answer * TOKEN_SECONDS for turn in turns)
    pauses = sum(turn.pause for turn in turns)
    return busy / len(conversations), (busy + pauses) / len(conversations)


class Simulation:
    """A number of engines and their conversations.

    Args:
        way: one of `WAYS`.
        load: the share of the slots that is taken if every prompt is cached and nothing waits.
        seconds: the time in which conversations begin.
        fails: 5 % of the engines die, one after the other, and come back.
    """

    def __init__(
        self, engines: int, way: str, *, load: float, seconds: float, fails: bool, seed: int
    ) -> None:
        self.way, self.seconds, self.fails, self.load = way, seconds, fails, load
        self.chance = random.Random(seed)
        self.draw = random.Random(seed).random
        self.engines = [Engine(f"e{index}") for index in range(engines)]
        self.result = Result()

    async def run(self) -> Result:
        """Run conversations, and all requests to their end."""
        clock = asyncio.get_running_loop().time
        kind = RoundRobin if self.way == "round robin" else Measured
        # In turns, an engine gets calls that wait in its own queue.
        places = 10**6 if self.way == "round robin" else None
        replicas = [Replica(engine.name, engine, places) for engine in self.engines]
        for replica in replicas:
            replica.breaker = Breaker(clock)
        self.pool = pool = kind("demo", replicas, 10**6, WAYS[self.way], self.draw)
        pool.budget = RetryBudget(clock=clock)
        pool.micros, pool.calls = array("d"), []
        pool.start()
        await pool.ask_all()
        self.begun = clock()
        tasks = [asyncio.create_task(self._sample())]
        if self.fails:
            tasks.append(asyncio.create_task(self._kill()))
        await self._arrive()
        await asyncio.gather(*tasks)
        await pool.aclose()
        result = self.result
        result.left = sum(one.running for one in replicas) + pool.waiting
        result.micros = statistics.median(pool.micros) if pool.micros else 0.0
        result.calls = statistics.fmean(pool.calls) if pool.calls else 0.0
        result.request_micros = pool.total / result.requests * 1e6
        result.longest = pool.longest * 1000
        return result

    async def _arrive(self) -> None:
        """Begin conversations at random times, and wait for all requests."""
        busy, whole = seconds_of(conversations_of(random.Random(0), 5_000))
        rate = self.load * PLACES * len(self.engines) / busy
        # Those that would have begun before.
        early = int(rate * whole)
        conversations = conversations_of(self.chance, early + int(rate * self.seconds))
        tasks = []
        for number, turns in enumerate(conversations):
            if number >= early:
                await asyncio.sleep(self.chance.expovariate(rate))
            tasks.append(asyncio.create_task(self._converse(number, turns, number < early)))
        await asyncio.gather(*tasks)

    async def _converse(self, number: int, turns: Sequence[Turn], is_early: bool) -> None:
        chance = random.Random(number)
        if is_early:
            await asyncio.sleep(chance.uniform(0, 2 * PAUSE))
        ids = [*range(SYSTEM), number % 50_000, number // 50_000]
        clock = asyncio.get_running_loop().time
        for index, turn in enumerate(turns):
            if clock() - self.begun > self.seconds:
                return
            had = len(ids) if index else SYSTEM
            ids += array("H", chance.randbytes(2 * turn.message))
            while not await self._ask(tuple(ids), turn.answer, str(number), had):
                await asyncio.sleep(1.0)
            ids += array("H", chance.randbytes(2 * turn.answer))
            await asyncio.sleep(turn.pause)

    async def _ask(self, ids: tuple[int, ...], answer: int, session: str, had: int) -> bool:
        """Send a turn; return False if its answer was cut."""
        clock, result = asyncio.get_running_loop().time, self.result
        ticket = Ticket()
        ticket.session = session if self.way == "session" else ""
        job = Generation(Prompt(ids), answer, ticket=ticket)
        start, first, cached = clock(), 0.0, 0
        result.requests += 1
        try:
            async with self.pool.open(job) as batches:
                async for batch in batches:
                    first = first or clock() - start
                    last = batch[-1]
                    if isinstance(last, Finish):
                        cached = last.cached_tokens
        except EngineError:
            if first:
                result.cut += 1
            else:
                result.failed += 1
            return False
        if WARM * self.seconds <= start - self.begun <= self.seconds:
            result.firsts.append(first)
            result.cached += cached
            result.endless += had
        return True

    async def _sample(self) -> None:
        """Look at the engines each second."""
        await asyncio.sleep(WARM * self.seconds)
        for _ in range(int((1 - WARM) * self.seconds)):
            running = [one.running for one in self.pool.replicas if one.state == "ready"]
            mean = statistics.fmean(running)
            self.result.running.append(mean / PLACES)
            self.result.balances.append(max(running) / mean if mean else 1.0)
            self.result.waiting.append(self.pool.waiting)
            await asyncio.sleep(1.0)

    async def _kill(self) -> None:
        """Let 5 % of the engines die in the second third of the time, and come back."""
        chosen = self.chance.sample(self.engines, max(len(self.engines) // 20, 1))
        await asyncio.sleep(WARM * self.seconds)
        await asyncio.gather(*(self._die(engine) for engine in chosen))

    async def _die(self, engine: Engine) -> None:
        await asyncio.sleep(self.chance.uniform(0, self.seconds / 3))
        engine.die()
        await asyncio.sleep(DEAD)
        engine.is_dead = False


def simulate(
    engines: int,
    way: str,
    *,
    load: float = 0.7,
    seconds: float = 60.0,
    fails: bool = False,
    seed: int = 1,
) -> Result:
    """Simulate a fleet; see `Simulation`."""
    one = Simulation(engines, way, load=load, seconds=seconds, fails=fails, seed=seed)
    return simulated(one.run())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--way", choices=WAYS, nargs="+", default=[*WAYS])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--failures", action="store_true", help="5 %% of the engines die")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare-all", action="store_true", help="for every decision")
    parser.add_argument("--plot", type=Path, help="an SVG file for the last number of engines")
    options = parser.parse_args()
    if options.compare_all:
        mock.patch.object(module, "MOST_COMPARED", 10**6).start()
    # As `latimer serve` does.
    gc.set_threshold(10_000, 4, 1_000)
    print(
        "| engines | chosen by | requests | reused | load | busiest | first token, p50 | p99 "
        "| waiting | cut | failed | CPU µs, decision | request | ms, longest look | calls |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    drawn: dict[str, dict[str, float]] = {}
    for engines in options.engines:
        for way in options.way:
            result = simulate(
                engines,
                way,
                load=options.load,
                seconds=options.seconds,
                fails=options.failures,
                seed=options.seed,
            )
            shown = result.figures()
            drawn[way] = {**shown, "micros": result.micros}
            costs = (
                f"{result.micros:.0f} | {result.request_micros:.0f} | {result.longest:.1f} | "
                f"{result.calls:.0f}"
            )
            # Turns take no decision.
            costs = " | | | " if way == "round robin" else costs
            print(
                f"| {engines:,} | {way} | {result.requests:,} | {shown['reuse']:.1f}% | "
                f"{shown['load']:.0f}% | {shown['balance']:.2f} | {shown['p50']:.0f} ms | "
                f"{shown['p99']:.0f} ms | {shown['waiting']:.1f} | {result.cut} | "
                f"{result.failed} | {costs} |",
                flush=True,
            )
    if options.plot:
        options.plot.parent.mkdir(exist_ok=True)
        options.plot.write_text(picture(drawn, PANELS))


if __name__ == "__main__":
    main()
