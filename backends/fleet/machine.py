"""The engines of one machine, which are loaded when requests need them, within its memory.

A request uses a `Member`, which waits until the engine is loaded. An engine that runs requests is
never unloaded. One task for each machine carries out the plans of `plan.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..base import Backend, Model
from ..errors import EngineUnavailable, LatimerError
from .breaker import Breaker
from .config import MEMORY, MOST_WAIT
from .loading import MOST_RETRY, EngineLoader, not_loaded, wait
from .plan import FIRST_LOAD, View, plan
from .replica import Demand, LoadState, Replica, State

log = logging.getLogger("latimer")

# Seconds that a request waits for an engine, unless it streams.
LOAD_WAIT = 600.0
# The host memory of a machine that has several memories.
RAM = "ram"
# The reason of an unload that the metric of swaps does not count.
BY_OPERATOR = "the operator asked for it"
_numbers = itertools.count()


class Member:
    """An engine of a machine; a `Loader` for the requests of its model.

    Args:
        loader: loads and unloads it.
        load_wait: seconds that a request waits which does not stream; None for no limit.

    Attributes:
        key: identifies it in plans; a changed engine and its successor have the same name.
        is_pinned, idle: as in `Loader`.
        running: the number of requests that use it.
        loads, unloads: how often it was loaded, and unloaded for others or because it was idle.
        load_seconds: the seconds that its last load took.
        never: why it cannot be loaded at all, once a request needed it; empty if it can.
        is_closed: True if new requests wait, because the engine is about to be unloaded.
        waiting: the time at which each waiting request arrived.
        used: the time at which the last request ended.
        task: its load or unload, while it runs.
        is_ending: True while it leaves the machine, whose memory it takes until it has ended.
    """

    def __init__(
        self, machine: Machine, loader: EngineLoader, load_wait: float | None = LOAD_WAIT
    ) -> None:
        self.loader = loader
        self.key = str(next(_numbers))
        self.is_pinned, self.idle = loader.is_pinned, loader.idle
        self.load_wait = load_wait
        self.running = self.loads = self.unloads = 0
        self.load_seconds = FIRST_LOAD
        self.is_closed = self.is_ending = False
        self.never = ""
        self.waiting: dict[asyncio.Future[None], float] = {}
        self.model: Model | None = None
        self.used = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self._machine = machine
        self._pools: dict[Demand, Replica] = {}
        loader.changed = self._changed
        machine.add(self)

    @property
    def name(self) -> str:
        """The name of its engine."""
        return self.loader.name

    @property
    def pools(self) -> Collection[Demand]:
        """The models that it serves."""
        return self._pools

    @property
    def state(self) -> LoadState:
        """The state of the engine."""
        return self.loader.state

    @property
    def backend(self) -> Backend:
        """The backend of the engine."""
        return self.loader.backend

    @property
    def pause(self) -> float:
        """The seconds until a failed load may be repeated."""
        return MOST_RETRY if self.never else self.loader.pause

    @property
    def memory(self) -> Mapping[str, int]:
        """The bytes that it takes of each memory; empty if unknown."""
        return self.loader.memory

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
            LatimerError: it was loaded, and describes no model.
        """
        if self.is_ready:
            self.running += 1
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting[ready] = time.monotonic()
        self._machine.look()
        try:
            in_time = await wait(ready, self.note, self.load_wait)
        except BaseException:
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                self.release()
            raise
        finally:
            self.waiting.pop(ready, None)
            self._machine.look()
        if not in_time:
            message = f"The engine {self.name} is not ready ({self.note()})."
            raise not_loaded(f"{message} Send the request again later.", self._rest())
        error = ready.exception()
        if isinstance(error, EngineUnavailable):
            # A new error, since an error that is raised again grows its traceback each time.
            raise not_loaded(error.message, error.retry_after or 1.0)
        if error is not None:
            raise error.with_traceback(None)

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

    def attach(self, pool: Demand, replica: Replica) -> None:
        """Keep the state of a pool's replica from now on."""
        self._pools[pool] = replica

        def ended() -> None:
            if not replica.running:
                self._machine.look()

        replica.join(ended)
        self.show()

    def want(self) -> None:
        """Look at the calls that wait, and load the engine when there is room for it."""
        self._machine.look()

    def doubt(self) -> None:
        """Look soon whether the engine is still loaded, since a request has failed."""
        self.loader.doubt()

    def _changed(self) -> None:
        self.show()
        self._machine.look()

    def show(self) -> None:
        """Give the replicas the state of the engine."""
        state: State = self.state
        if state == "ready" and not self.is_ready:
            # It will be loaded again when the calls that wait have their turn.
            state = "unloaded"
        elif state == "failed" and not self.loader.pause:
            state = "unloaded"
        reason = self.loader.failure if state in ("failed", "unloaded") else ""
        if state == "unloaded" and self.never:
            state, reason = "failed", self.never
        pools = [*self._pools.items()]
        changed = {
            replica
            for _, replica in pools
            if replica.state != "draining" and (replica.state, replica.reason) != (state, reason)
        }
        if state != "ready":
            for replica in changed:
                replica.set(state, reason)
        elif self.model is not None:
            changed = {replica for replica in changed if replica.state != "unavailable"}
            for replica in changed:
                replica.backend = self.backend
                replica.state = "unavailable"
            # Each model of an engine must know what it serves.
            for pool, replica in pools:
                if replica in changed:
                    pool.admit(replica, self.model)

    async def learn(self) -> None:
        """Ask the engine for its model, after it was loaded, and for what lists say about it."""
        self.model = await self.backend.model()
        for pool, replica in [*self._pools.items()]:
            # What was loaded again has not failed yet.
            replica.breaker = Breaker()
            await pool.read_facts(self.backend)

    @property
    def is_used(self) -> bool:
        """True if a request uses the engine."""
        return bool(self._busy())

    def _busy(self) -> int:
        """Return the number of requests that use the engine."""
        return self.running + sum(replica.running for replica in {*self._pools.values()})

    def _waited(self, now: float) -> float | None:
        """Return the seconds that the first request has waited which needs the engine."""
        found = [now - since for since in self.waiting.values()]
        found += [pool.oldest for pool, own in self._pools.items() if _waits_for(pool, own)]
        return max(found, default=None)

    async def remember(self) -> None:
        """Measure the memory of the engine, unless it is declared."""
        size, kind = await asyncio.to_thread(self.loader.measure), self._machine.kind
        if size is not None and kind is not None:
            self.loader.note_memory(kind, size)

    def view(self, now: float) -> View:
        """Return what `plan` knows about the engine."""
        state = self.loader.state
        return View(
            self.key,
            is_loaded=state in ("ready", "loading") or self.task is not None or self.is_ending,
            is_settled=self.task is None and not self.is_ending,
            is_pinned=self.is_pinned and not self.is_ending,
            running=self._busy(),
            waited=self._waited(now),
            unused=now - max(self.used, self.loader.since, *self._ends()),
            ready_for=now - self.loader.since,
            idle=self.idle,
            # A server that has one model at a time has room for it.
            need=self.loader.memory or ({} if self.loader.place else None),
            load_seconds=self.load_seconds,
            name=self.name,
            is_missing=bool(self.loader.failure) and any(pool.waiting for pool in self._pools),
            place=self.loader.place,
        )

    def _ends(self) -> list[float]:
        return [replica.used_at for replica in self._pools.values()]

    def note(self) -> str:
        """Describe what a request waits for, as one line."""
        # A ready engine is asked for its model before it serves requests.
        if self.loader.state in ("loading", "ready"):
            seconds = time.monotonic() - self.loader.since
            return f"loading {self.name} for {seconds:.0f} s"
        return f"waiting for memory to load {self.name}"

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

    def leave(self) -> None:
        """Leave the machine; for an engine that was never used."""
        self._machine.members.remove(self)

    async def aclose(self) -> None:
        """Unload the engine at once, and release its backend."""
        self.is_ending = True
        if self.task is not None and self.state != "loading":
            await asyncio.wait([self.task])
        self.refuse(not_loaded("The engine is not served any more.", 1.0))
        self._pools.clear()
        try:
            await self.loader.aclose()
        finally:
            await self._machine.remove(self)


def _waits_for(pool: Demand, replica: Replica) -> bool:
    """Return True if the calls of a pool wait for one of its engines, and for no other.

    Calls that have failed on the engines in use wait for the next one.
    """
    if not pool.waiting or replica.state == "draining" or replica not in pool.replicas:
        return False
    others = [one for one in pool.replicas if one is not replica]
    if replica.state in ("ready", "loading"):
        return True
    failed = pool.stranded
    if not failed and any(one.state in ("ready", "loading") for one in others):
        return False
    able = (one for one in pool.replicas if one.is_loadable and one not in failed)
    return next(able, replica) is replica


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

    def limit(self, memory: Mapping[str, int] | None, most_wait: float) -> None:
        """Change the memory and the wait."""
        self.memory, self.most_wait = memory, most_wait
        # A fleet is built before its event loop runs; nothing was planned then.
        if self._owner is not None:
            self.look()

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

    def unloaded(self, member: Member) -> None:
        """End the calls of `unload` that wait for an engine."""
        done = self._unloading.pop(member, None)
        if done is not None:
            done.set_result(None)

    async def remove(self, member: Member) -> None:
        """Remove an engine that has ended."""
        self.unloaded(member)
        if member in self.members:
            self.members.remove(member)
            if self.members:
                self.look()
            elif self._owner is not None:
                self._owner.cancel()
                await asyncio.wait([self._owner])

    async def aclose(self) -> None:
        """Unload all engines."""
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.wait([self._owner])
        self._has_ended = True
        for member in self.members:
            member.refuse(not_loaded("The server is shutting down.", 1.0))
        await asyncio.gather(*(member.loader.aclose() for member in self.members))
        for member in [*self._unloading]:
            self.unloaded(member)

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
        views = [member.view(now) for member in self.members]
        made = plan(views, self.memory, self.most_wait)
        for member, view in zip(self.members, views, strict=True):
            if member.never or view.waited is not None:
                self._refuse(member, made.never.get(member.key, ""))
            is_closed = member.key in made.closed or member in self._unloading
            if is_closed != member.is_closed:
                member.is_closed = is_closed
                member.show()
            if member.task is not None or member.is_ending:
                continue
            if member in self._unloading and not member.is_used:
                member.task = self._start(self._unload(member, BY_OPERATOR))
            elif member.loader.pause:
                member.refuse(member.loader.unavailable())
            elif member.key in made.load:
                if self._makes_way(made.replaced.get(member.key), member.name):
                    member.task = self._start(self._load(member))
            elif member.key in made.unload and not member.is_used:
                other = made.room_for.get(member.key)
                reason = "it was idle" if other is None else f"room for {other}"
                member.task = self._start(self._unload(member, reason))
            elif member.is_ready and member.waiting:
                member.admit()
        pauses = [member.pause for member in self.members if member.pause]
        for member in self.members:
            member.show()
        return min([*pauses, *([] if made.again is None else [made.again])], default=None)

    def _refuse(self, member: Member, reason: str) -> None:
        """Refuse the requests for an engine that can never be loaded, if there is a reason.

        `show` fails the calls that wait for its models.
        """
        before, member.never = member.never, reason
        if reason:
            message = f"The engine '{member.name}' cannot be loaded: {reason}."
            member.refuse(not_loaded(message, MOST_RETRY))
            if reason != before:
                fields = {"engine": member.name, "reason": reason}
                log.warning(message, extra={"event": "load_failed", "fields": fields})

    def _makes_way(self, key: str | None, name: str) -> bool:
        """Note that the load of an engine unloads another one, if it does.

        Returns:
            False if the operator has the other one unloaded now.
        """
        member = next((one for one in self.members if one.key == key), None)
        if member in self._unloading:
            return False
        if member is not None:
            member.loader.leave()
            member.unloads += 1
            # How long that takes is a part of the load.
            words = "unloads %s with the next load"
            self._note(member, "engine_unloaded", words, None, f"room for {name}")
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.look())
        return task

    async def _load(self, member: Member) -> None:
        begun = time.monotonic()
        try:
            await member.loader.load()
            await member.remember()
            await member.learn()
        except Exception as error:
            if not isinstance(error, LatimerError):
                log.exception("loading %s failed", member.name)
                error = EngineUnavailable(f"The engine '{member.name}' could not be loaded.")
            if member.loader.is_ready:
                # It was ready, and cannot be used.
                await member.loader.reject(error.message.rstrip("."))
            member.task = None
            member.refuse(error)
        else:
            member.loads += 1
            member.load_seconds = max(time.monotonic() - begun, 0.001)
            member.task = None
            self._note(member, "engine_loaded", "has loaded %s", member.load_seconds)
            # Those that waited are served, even if others have waited for too long meanwhile.
            member.admit()
        finally:
            member.task = None
            member.show()

    def _note(
        self, member: Member, event: str, words: str, seconds: float | None, reason: str = ""
    ) -> None:
        """Log that an engine was loaded or unloaded.

        Args:
            words: what it did with its model, `%s`.
            seconds: how long that took; None if that is not known.
        """
        # Its models by their names here; llama-server reports the name of a file.
        model = ", ".join(pool.name for pool in member.pools) or member.name
        sizes = [f"{size / 2**30:.2f} GiB of {kind}" for kind, size in member.memory.items()]
        details = [*sizes, *filter(None, [reason])]
        end = f" ({', '.join(details)})" if details else ""
        fields: dict[str, Any] = {"engine": member.name, "model": model}
        if seconds is not None:
            words += f" in {seconds:.1f} s"
            fields["seconds"] = round(seconds, 3)
        fields["memory"] = dict(member.memory)
        if reason:
            fields["reason"] = reason
        log.info(
            f"engine %s {words}%s", member.name, model, end,
            extra={"event": event, "fields": fields},
        )  # fmt: skip

    async def _unload(self, member: Member, reason: str) -> None:
        begun = time.monotonic()
        try:
            await member.remember()
            await member.loader.unload()
            member.unloads += reason != BY_OPERATOR
            seconds = time.monotonic() - begun
            self._note(member, "engine_unloaded", "has unloaded %s", seconds, reason)
        finally:
            member.task = None
            self.unloaded(member)
