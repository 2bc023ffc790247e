"""Responses that run in the background, and their events (contract of responses, 9.6).

They live in this process: a response that is stored is in the store when it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, Protocol

from ...backends.errors import LatimerError
from ..store.records import Stored, time_of

_END = b"\n\n"
# Comments keep a connection open; they are not events of the response.
_COMMENT = b":"


class EventLog:
    """A growing list of numbered events.

    Attributes:
        size: the bytes of all events.
        has_ended: True if no event follows.
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self.size = 0
        self.has_ended = False

    @property
    def count(self) -> int:
        """The number of events so far."""
        return len(self._events)

    def add(self, data: bytes) -> None:
        """Add whole events; JSON contains no line ends, so each empty line ends an event."""
        new = [part + _END for part in data.split(_END) if part and not part.startswith(_COMMENT)]
        self._events += new
        self.size += sum(map(len, new))
        if new:
            self._wake()

    def after(self, number: int) -> bytes:
        """Return the events after the one with a number."""
        return b"".join(self._events[number + 1 :])

    def end(self) -> None:
        """End the log; its readers then end."""
        self.has_ended = True
        self._wake()

    async def read(self, after: int, seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the events after the one with a number, as they are added.

        Args:
            seconds: the time without an event after which it yields nothing, as empty bytes, so
                that the reader can show that it is there; 0 for never.
        """
        at = after + 1
        while True:
            new = self._events[at:]
            if new:
                at += len(new)
                yield b"".join(new)
            elif self.has_ended:
                return
            else:
                try:
                    async with asyncio.timeout(seconds or None):
                        await self._news.wait()
                except TimeoutError:
                    yield b""

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


# Seconds for which a response that has ended, and its events, stay here.
KEPT = 600.0
# The bytes of requests and events of ended responses that stay here; the oldest are forgotten.
MOST = 32 << 20
# The events before the engine begins.
_QUEUED = 2
# The statuses of a response that has not ended.
RUNNING = frozenset({"queued", "in_progress"})


def _no_events(_error: LatimerError) -> bytes:
    """Return the events for an error after the end: none."""
    return b""


class Job:
    """A response in the background.

    Args:
        owner: the digest of the client's API key.
        request_id: the id of the request.
        begun: the response object at its beginning.
        body: the request's body, as it is stored.
        size: the size of the request in bytes.
        keepalive: the seconds of silence after which a reader of the events gets a comment; 0 for
            never.

    Attributes:
        begun, request_id, body: as given.
        task: the work, if it was started.
        log: the events of the response.
        is_cancelled: True if the client ended it.
        is_deleted: True if it must not be stored.
        is_ending: True if only the store is left to wait for, so that nothing can end it earlier.
        is_stored: True if it is in the store, where others may delete it.
        fault: returns the last events for an error, which it adds to the log.
    """

    fault: Callable[[LatimerError], bytes]

    def __init__(
        self,
        owner: str,
        request_id: str,
        begun: Mapping[str, Any],
        body: Mapping[str, Any],
        size: int,
        keepalive: float,
    ) -> None:
        self.owner = owner
        self._request_size = size
        self.keepalive = keepalive
        self.request_id = request_id
        self.body = body
        self.log = EventLog()
        self.is_cancelled = self.is_deleted = self.is_ending = self.is_stored = False
        self.begun = begun
        self._ended: Mapping[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.begun["id"])

    @property
    def size(self) -> int:
        """The estimated memory that it takes, in bytes of JSON."""
        return self._request_size + self.log.size

    @property
    def reply(self) -> Mapping[str, Any]:
        """The response object as it is now."""
        if self._ended is not None:
            return self._ended
        status = "queued" if self.log.count <= _QUEUED else "in_progress"
        return {**self.begun, "status": status}

    def stored(self) -> Stored:
        """Return the response as the store would."""
        reply = dict(self.reply)
        return Stored(
            self.id,
            reply["object"],
            self.owner,
            time_of(self.id) or 0,
            reply["model"],
            self.request_id,
            reply["metadata"],
            dict(self.body),
            reply,
        )

    def end(self, reply: Mapping[str, Any]) -> None:
        """Note the response object at the end."""
        self._ended = reply

    def rest(self) -> None:
        """Let go of the work, which has ended; it has the request and its connection."""
        self.task, self.fault = None, _no_events

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work, which ends with a call of `end`."""
        self.task = asyncio.get_running_loop().create_task(work)
        return self.task

    async def cancel(self, delete: bool = False) -> None:
        """End the work for the client.

        Args:
            delete: True to store nothing.
        """
        if not self.is_ending:
            self.is_cancelled, self.is_deleted = True, delete
        await self.stop()

    async def stop(self) -> None:
        """Cancel the work unless it is ending, and wait until it has ended."""
        task = self.task
        if task is not None and not task.done():
            if not self.is_ending:
                task.cancel()
            await asyncio.wait([task])


class Elsewhere(Protocol):
    """Responses in the background of other processes of the server.

    Attributes:
        loss: what the error for an unknown response adds.
    """

    loss: str

    @property
    def mark(self) -> str:
        """The digits of this process in the ids of responses, or empty."""
        ...

    async def add(self, job: Job) -> None:
        """Let the other processes find a response that has begun here.

        Raises:
            StoreUnavailable: the store is required for this response, and does not take it.
        """
        ...

    def end(self, job: Job) -> None:
        """Note that a response has ended here, and can still be streamed."""
        ...

    def remove(self, name: str) -> None:
        """Note that a response is not here any more."""
        ...

    async def find(self, owner: str, name: str) -> Stored | None:
        """Return a response that another process runs, or that failed with its process."""
        ...

    async def may_have(self, owner: str, name: str) -> bool:
        """Return True if a response that is not found may be in another process that runs."""
        ...

    async def stop(self, owner: str, name: str, delete: bool) -> bool:
        """Let the process that runs a response end it, and wait for that.

        Args:
            delete: True to store nothing of it.

        Returns:
            False if the response still runs.
        """
        ...

    async def aclose(self) -> None:
        """Wait until the notes are made."""
        ...


class Background:
    """The responses in the background of one process: those that run, and those that just ended.

    Attributes:
        elsewhere: what other processes of the server have; None if there are none.
    """

    elsewhere: Elsewhere | None = None

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        # The ids of responses that have ended, from the oldest.
        self._ended: dict[str, asyncio.TimerHandle] = {}
        self._size = 0

    @property
    def mark(self) -> str:
        """The digits of this process in the ids of responses, or empty."""
        return "" if self.elsewhere is None else self.elsewhere.mark

    def start(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        """Run a response in the background."""
        self._jobs[job.id] = job
        job.start(work).add_done_callback(lambda _: self.keep(job))

    async def announce(self, job: Job) -> None:
        """Let other processes of the server find a response; see `Elsewhere.add`."""
        if self.elsewhere is not None:
            await self.elsewhere.add(job)
            if job.log.has_ended:
                self.elsewhere.end(job)

    def find(self, owner: str, name: str) -> Job | None:
        """Return the response with an id, if it is here and its owner has this key."""
        job = self._jobs.get(name)
        return job if job is not None and job.owner == owner else None

    def forget(self, name: str) -> None:
        """Forget a response that has ended."""
        timer = self._ended.pop(name, None)
        if timer is not None:
            timer.cancel()
            self._size -= self._jobs.pop(name).size
            if self.elsewhere is not None:
                self.elsewhere.remove(name)

    async def wait(self, seconds: float) -> None:
        """Wait until all responses have ended, or for some seconds."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def aclose(self) -> None:
        """End all responses, and forget them."""
        await asyncio.gather(*(job.stop() for job in self._jobs.values()))
        for name in [*self._ended]:
            self.forget(name)
        if self.elsewhere is not None:
            await self.elsewhere.aclose()

    def keep(self, job: Job) -> None:
        """Keep a response that has ended for a while, unless its client deleted it."""
        self._jobs[job.id] = job
        job.log.end()
        job.rest()
        if self.elsewhere is not None:
            self.elsewhere.end(job)
        if job.is_deleted:
            del self._jobs[job.id]
            if self.elsewhere is not None:
                self.elsewhere.remove(job.id)
            return
        loop = asyncio.get_running_loop()
        # The current context has the request.
        self._ended[job.id] = loop.call_later(KEPT, self.forget, job.id, context=Context())
        self._size += job.size
        while self._size > MOST and len(self._ended) > 1:
            self.forget(next(iter(self._ended)))
