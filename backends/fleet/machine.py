"""The engines of one machine: which of them are loaded, within its memory.

`plan` decides, without I/O, and the task of a `Machine` carries it out. A request uses a `Member`,
which waits until the engine is loaded. An engine that runs requests is never unloaded.

Requests of the models that are loaded are served first, so that alternating clients do not swap
models with each request. A request for another model waits for at most `most_wait` until the
engines in its way accept no more requests. An engine that was used a moment ago is kept for as long
as loading the other one takes: often its client sends the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import EngineUnavailable, LatimerError
from ..patience import wait
from .loading import EngineLoader, not_loaded

log = logging.getLogger("latimer")

# Seconds that a request waits before the engines in its way accept no more requests.
MOST_WAIT = 30.0
# Seconds that a load is expected to take before the first one.
FIRST_LOAD = 2.0
# The memory of a machine that has one, and the host memory of a machine that has several.
MEMORY, RAM = "memory", "ram"
# Seconds that a plain request waits for an engine.
LOAD_WAIT = 600.0


class View(NamedTuple):
    """What `plan` knows about a member.

    Args:
        is_loaded: True if it takes memory: it is loaded, or it is being loaded or unloaded.
        is_settled: True if it is neither being loaded nor unloaded.
        is_pinned: as in `EngineLoader`.
        running: the number of requests that use it.
        waited: seconds that its first waiting request has waited; None without one.
        unused: seconds since its last request ended.
        ready_for: seconds since it was loaded.
        idle: as in `EngineLoader`.
        need: its bytes by memory; None if they are unknown.
        load_seconds: the seconds that it takes to load.
    """

    name: str
    is_loaded: bool = False
    is_settled: bool = True
    is_pinned: bool = False
    running: int = 0
    waited: float | None = None
    unused: float = 0.0
    ready_for: float = 0.0
    idle: float | None = None
    need: Mapping[str, int] | None = None
    load_seconds: float = FIRST_LOAD

    @property
    def is_free(self) -> bool:
        """True if it is loaded, and no request uses it or waits for it."""
        return self.is_loaded and self.is_settled and not self.running and self.waited is None


@dataclass(slots=True)
class Plan:
    """What to do now.

    Args:
        load, unload: the members to load and to unload.
        closed: the members that accept no more requests, because others have waited too long.
        never: the members that cannot be loaded, with the reason.
        again: seconds until the plan may change by itself; None if it does not.
    """

    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)
    never: dict[str, str] = field(default_factory=dict)
    again: float | None = None

    def wake(self, seconds: float) -> None:
        """Plan again after some seconds."""
        self.again = seconds if self.again is None else min(self.again, seconds)


def plan(
    views: Sequence[View], memory: Mapping[str, int] | None, most_wait: float = MOST_WAIT
) -> Plan:
    """Decide which members to load and unload.

    Args:
        memory: the bytes of the machine's memories; None if they are not limited.
    """
    made = Plan()
    needs = _needs(views, memory)
    pinned = [view for view in views if view.is_loaded and view.is_pinned]
    # What is loaded, and what waits for room: a later one must not take it.
    taken = _sum([needs[view.name] for view in views if view.is_loaded])
    victims: list[View] = []
    wanted = [view for view in views if view.waited is not None and not view.is_loaded]
    for view in sorted(wanted, key=_waited, reverse=True):
        need = needs[view.name]
        reason = _never(need, [needs[one.name] for one in pinned], memory)
        if reason:
            names = ", ".join(f"'{one.name}'" for one in pinned)
            made.never[view.name] = reason.format(pinned=names)
            continue
        free = [one for one in views if one.is_loaded and one not in pinned + victims]
        chosen = _victims(need, free, needs, taken, memory)
        for victim in chosen:
            taken = _sum([taken, _negative(needs[victim.name])])
            _evict(view, victim, most_wait, made)
        taken = _sum([taken, need])
        victims += chosen
        if not victims and (memory is None or _fits([taken], memory)):
            made.load.append(view.name)
    for view in views:
        if view.is_free and view.idle is not None and view not in pinned + victims:
            if view.unused >= view.idle:
                made.unload.append(view.name)
            else:
                made.wake(view.idle - view.unused)
    return made


def _evict(view: View, victim: View, most_wait: float, made: Plan) -> None:
    """Unload a member for another one, or close it, or wait."""
    if not victim.is_settled:
        return
    # It serves for at least as long as its load took.
    rest = max(most_wait - _waited(view), victim.load_seconds - victim.ready_for)
    if victim.is_free:
        rest = min(rest, view.load_seconds - victim.unused)
    if rest > 0:
        made.wake(rest)
        return
    made.closed.add(victim.name)
    if not victim.running:
        made.unload.append(victim.name)


def _victims(
    need: Mapping[str, int],
    free: Sequence[View],
    needs: Mapping[str, Mapping[str, int]],
    taken: Mapping[str, int],
    memory: Mapping[str, int] | None,
) -> list[View]:
    """Return the members to unload for another one: unused ones first, then the least recent."""
    chosen: list[View] = []
    if memory is None:
        return chosen

    def fits(without: Sequence[View]) -> bool:
        return _fits([taken, need, *(_negative(needs[one.name]) for one in without)], memory)

    for one in sorted(free, key=lambda one: (not one.is_free, one.running > 0, -one.unused)):
        if fits(chosen):
            break
        chosen.append(one)
    # A small one that was chosen first may not be in the way any more.
    for one in [*chosen]:
        rest = [each for each in chosen if each is not one]
        if fits(rest):
            chosen = rest
    return chosen


def _never(
    need: Mapping[str, int], pinned: Sequence[Mapping[str, int]], memory: Mapping[str, int] | None
) -> str:
    """Return why a member can never be loaded; an empty text if it can."""
    if memory is None:
        return ""
    for name, size in need.items():
        if size > memory.get(name, 0):
            most = _gib(memory.get(name, 0))
            return f"it needs {_gib(size)} of the memory '{name}', which has {most}"
    if not _fits([need, *pinned], memory):
        return "the memory that it needs is taken by pinned engines: {pinned}"
    return ""


def _needs(
    views: Sequence[View], memory: Mapping[str, int] | None
) -> Mapping[str, Mapping[str, int]]:
    """Return what each member takes; where that is unknown, all that the pinned ones leave."""
    kept = _sum([view.need or {} for view in views if view.is_loaded and view.is_pinned])
    rest = {name: max(size - kept.get(name, 0), 0) for name, size in (memory or {}).items()}
    return {view.name: rest if view.need is None else view.need for view in views}


def _fits(sizes: Iterable[Mapping[str, int]], memory: Mapping[str, int]) -> bool:
    return all(size <= memory.get(name, 0) for name, size in _sum(sizes).items())


def _sum(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for size in sizes:
        for name, value in size.items():
            total[name] = total.get(name, 0) + value
    return total


def _negative(size: Mapping[str, int]) -> Mapping[str, int]:
    return {name: -value for name, value in size.items()}


def _waited(view: View) -> float:
    return view.waited or 0.0


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


class Member:
    """An engine of a machine; a `Loader` for the requests of its model.

    Args:
        load_wait: seconds that a request waits which does not stream; None for no limit.

    Attributes:
        loader: loads and unloads it.
        running: the number of requests that use it.
        loads: the number of its loads.
    """

    def __init__(
        self, machine: Machine, loader: EngineLoader, load_wait: float | None = LOAD_WAIT
    ) -> None:
        self.loader = loader
        self.load_wait = load_wait
        self.running = self.loads = 0
        self.load_seconds = FIRST_LOAD
        self.is_closed = False
        # The time at which each waiting request arrived.
        self.waiting: dict[asyncio.Future[None], float] = {}
        self.used = time.monotonic()
        # Its load or unload, while it runs.
        self.task: asyncio.Task[None] | None = None
        self._machine = machine
        machine.add(self)

    @property
    def name(self) -> str:
        """The name of its engine."""
        return self.loader.name

    @property
    def is_ready(self) -> bool:
        """True if a request can use it now."""
        return self.loader.state == "ready" and not self.is_closed and self.task is None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        """Use the engine, once it is loaded; it stays loaded meanwhile.

        Raises:
            EngineUnavailable: it cannot be loaded, or not in time.
        """
        await self.take()
        try:
            yield
        finally:
            self.release()

    async def take(self) -> None:
        """Wait until the engine is loaded; `release` allows that it is unloaded.

        Raises:
            EngineUnavailable: it cannot be loaded, or not in time.
        """
        if self.is_ready:
            self.running += 1
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting[ready] = time.monotonic()
        self._machine.look()
        try:
            in_time = await wait(ready, lambda: self._note(ready), self.load_wait)
        except BaseException:
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                self.release()
            raise
        finally:
            self.waiting.pop(ready, None)
            self._machine.look()
        if not in_time:
            raise not_loaded(f"{self._note(ready)}. Send the request again later.", self._rest())
        error = ready.exception()
        if isinstance(error, EngineUnavailable):
            # A new error, since an error that is raised again grows its traceback each time.
            raise not_loaded(error.message, error.retry_after or 1.0)

    def release(self) -> None:
        """Let another engine take its memory, when no other request uses it."""
        self.running -= 1
        if not self.running:
            self.used = time.monotonic()
            self._machine.look()

    def admit(self) -> None:
        """Let the requests that wait use the engine."""
        for ready in [*self.waiting]:
            del self.waiting[ready]
            if not ready.done():
                self.running += 1
                ready.set_result(None)

    def refuse(self, error: LatimerError) -> None:
        """Raise an error to the requests that wait."""
        for ready in [*self.waiting]:
            del self.waiting[ready]
            if not ready.done():
                ready.set_exception(error)
                # A request that has left does not read it.
                ready.exception()

    def remember(self) -> None:
        """Measure the memory of the engine, unless it is declared."""
        size, kind = self.loader.measure(), self._machine.kind
        if size is not None and kind is not None:
            self.loader.note_memory(kind, size)

    def view(self, now: float) -> View:
        """Return what `plan` knows about the engine."""
        state = self.loader.state
        return View(
            self.name,
            is_loaded=state in ("ready", "loading") or self.task is not None,
            is_settled=self.task is None,
            is_pinned=self.loader.is_pinned,
            running=self.running,
            waited=now - min(self.waiting.values()) if self.waiting else None,
            unused=now - max(self.used, self.loader.since),
            ready_for=now - self.loader.since,
            idle=self.loader.idle,
            need=self.loader.memory or None,
            load_seconds=self.load_seconds,
        )

    def _note(self, ready: asyncio.Future[None]) -> str:
        """Describe the wait of a request, as one line."""
        place = 1 + sum(one is not ready for one in _before(ready, self.waiting))
        if self.loader.state == "loading":
            seconds = time.monotonic() - self.loader.since
            return f"loading {self.name} for {seconds:.0f} s, place {place}"
        return f"waiting for memory to load {self.name}, place {place}"

    def _rest(self) -> float:
        """Return the seconds until a request may be served."""
        if self.loader.state == "loading":
            return self.load_seconds - (time.monotonic() - self.loader.since)
        return self._machine.most_wait

    async def load(self) -> None:
        """Load the engine, when there is room for it.

        Raises:
            EngineUnavailable: it cannot be loaded.
        """
        async with self.use():
            pass

    async def unload(self) -> None:
        """Unload the engine when no request uses it; the next request loads it again."""
        await self._machine.unload(self)


def _before(
    ready: asyncio.Future[None], waiting: Mapping[asyncio.Future[None], float]
) -> Iterable[asyncio.Future[None]]:
    for one in waiting:
        if one is ready:
            return
        yield one


class Machine:
    """The memory that engines share.

    One task loads and unloads them.

    Args:
        memory: the bytes of each of its memories; None if they are not limited.
        most_wait: seconds that a request waits before the engines in its way accept no more.
    """

    def __init__(
        self,
        name: str = "",
        memory: Mapping[str, int] | None = None,
        most_wait: float = MOST_WAIT,
    ) -> None:
        self.name = name
        self.memory = memory
        self.most_wait = most_wait
        self.members: list[Member] = []
        self._changed = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._has_ended = False
        self._unloading: dict[Member, asyncio.Future[None]] = {}

    @property
    def kind(self) -> str | None:
        """The memory that measured engines take; None if that is unknown."""
        if self.memory is None:
            return MEMORY
        if len(self.memory) == 1:
            return next(iter(self.memory))
        return RAM if RAM in self.memory else None

    def add(self, member: Member) -> None:
        """Add an engine; `Member` calls this."""
        self.members.append(member)

    def look(self) -> None:
        """Plan again, since something has changed."""
        self._changed.set()
        if (self._owner is None or self._owner.done()) and not self._has_ended:
            self._owner = asyncio.get_running_loop().create_task(self._own())

    async def unload(self, member: Member) -> None:
        """Unload an engine when no request uses it, or end its load."""
        if member.loader.state == "loading":
            await member.loader.unload()
            return
        done = self._unloading.get(member)
        if done is None:
            done = self._unloading[member] = asyncio.get_running_loop().create_future()
        self.look()
        await asyncio.shield(done)

    async def aclose(self) -> None:
        """Unload all engines."""
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.wait([self._owner])
        self._has_ended = True
        for member in self.members:
            member.refuse(not_loaded("The server is shutting down.", 1.0))
        await asyncio.gather(*(member.loader.aclose() for member in self.members))

    async def _own(self) -> None:
        while True:
            self._changed.clear()
            again = self._act()
            if again is None and not self._changed.is_set():
                # `look` starts the next one.
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again):
                    await self._changed.wait()

    def _act(self) -> float | None:
        """Carry out the plan; return the seconds until it may change by itself."""
        now = time.monotonic()
        made = plan([member.view(now) for member in self.members], self.memory, self.most_wait)
        for member in self.members:
            if member.name in made.never:
                message = f"The engine '{member.name}' cannot be loaded: {made.never[member.name]}."
                member.refuse(not_loaded(message, 60.0))
            member.is_closed = member.name in made.closed or member in self._unloading
            if member.task is not None:
                continue
            if member.name in made.load:
                member.task = self._start(self._load(member))
            elif member.name in made.unload or (member in self._unloading and not member.running):
                member.task = self._start(self._unload(member))
            elif member.is_ready and member.waiting:
                member.admit()
        return made.again

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.look())
        return task

    async def _load(self, member: Member) -> None:
        begun = time.monotonic()
        try:
            await member.loader.load()
        except LatimerError as error:
            member.refuse(error)
        else:
            member.loads += 1
            member.load_seconds = max(time.monotonic() - begun, 0.001)
            member.remember()
            # Those that waited are served, even if others have waited for too long meanwhile.
            member.admit()
        finally:
            member.task = None

    async def _unload(self, member: Member) -> None:
        try:
            member.remember()
            await member.loader.unload()
        finally:
            member.task = None
            done = self._unloading.pop(member, None)
            if done is not None:
                done.set_result(None)
