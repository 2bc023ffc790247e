"""The queue of a store: bounded, and written in batches.

A response never waits for the database. Objects that the database cannot take now stay in the queue
until it can. What the queue cannot take is lost, counted, and logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from ...backends.queue import is_running, settle
from .errors import LATE, StoreUnavailable, Unwritable
from .records import Record, pack

log = logging.getLogger("latimer")

# Seconds that an object waits for others, and the largest number of objects in a transaction.
DELAY, BATCH = 0.2, 256
# The same for a store in memory, which no other process reads and which ends with this one.
MEMORY_DELAY = 0.6
# The bounds of the queue: objects, and bytes of their JSON.
MOST, MOST_BYTES = 20_000, 64 << 20
# Bytes of JSON that may wait as Python objects, which take up to 25 times as much.
LOOSE = 2 << 20
# Seconds between attempts while the database does not answer: the first, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
# Seconds after which a running attempt counts as failed.
PATIENCE = 3.0
# The timers for a patience, one after the other. Each is late by what the event loop is busy with.
_LOOKS = 5
# Seconds between two lines about lost objects.
QUIET = 10.0
# Seconds to write what waits, at the end of the process.
CLOSE_SECONDS = 5.0

Write = Callable[[Sequence[Record]], Awaitable[Sequence[Record]]]


class Writer:
    """The queue in front of a database, for requests of any event loops and threads.

    A task of one event loop writes at a time. The others have timers, which begin when it ends.
    What a loop has added that ends before its timer waits for the next object or flush.
    There is no lock: no thread stops between two steps with no call between them.

    Args:
        write: writes records in one transaction, and returns those that the database can never
            take; raises `StoreUnavailable`.
        delay: the seconds that an object waits for others.
        late: the reason when the database does not answer in time.
    """

    def __init__(self, write: Write, delay: float = DELAY, late: str = LATE) -> None:
        self._write = write
        self._late_reason = late
        self._delay = delay
        self._waiting: deque[Record] = deque()
        # The bytes of all objects, and of those that are not packed.
        self._bytes = self._loose = 0
        # The number of objects in the running attempt.
        self._trying = 0
        self._packing: asyncio.Task[None] | None = None
        # The numbers of records that were ever taken, and of those that are done.
        self._taken = self._done = 0
        # What flushes wait for: the number of records that must be done.
        self._flushes: dict[asyncio.Future[None], int] = {}
        # The event loop whose task writes, and the last such task.
        self._writing: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._timers: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}
        # True from `aclose` to the next object.
        self._is_closed = False
        self._pause = 0.0
        self._has_failed = False
        # The end of `_is_held`.
        self._unwritable_until = 0.0
        # The reason why the running attempt counts as failed.
        self._late: StoreUnavailable | None = None
        self._is_full = False
        self._silent_until = 0.0
        self._unreported = 0
        self.lost = 0

    @property
    def state(self) -> str:
        """See `records.Status`."""
        if self._unwritable_until and not self._waiting and not self._is_held:
            # What was not written is withdrawn, so only new objects can show more.
            self._recover()
        if self._is_full:
            return "full"
        return "unavailable" if self._has_failed else "ok"

    @property
    def _is_held(self) -> bool:
        """True while only a written object shows that the database takes changes."""
        return time.monotonic() < self._unwritable_until

    @property
    def waiting(self) -> int:
        """The number of objects that are not written yet."""
        return len(self._waiting)

    def has(self, id: str) -> bool:  # noqa: A002
        """Return True if an object waits, or items of a conversation."""
        return any(id in (record.id, record.conversation) for record in [*self._waiting])

    def add(self, record: Record) -> bool:
        """Queue an object; return False, and count it as lost, if the queue is full."""
        if len(self._waiting) >= MOST or self._bytes + record.size > MOST_BYTES:
            self._is_full = True
            self.lose(1, "its queue is full", record)
            return False
        self._waiting.append(record)
        self._bytes += record.size
        self._loose += record.size
        self._taken += 1
        # After the end of an app's lifespan, it may begin again.
        self._is_closed = False
        loop = asyncio.get_running_loop()
        if self._writing is not loop and loop not in self._timers:
            self._set_timer(loop, self._delay)
        if self._loose > LOOSE and not is_running(self._packing):
            self._packing = loop.create_task(self._pack())
        return True

    def _set_timer(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Begin to write after some seconds, unless another event loop writes then."""
        if self._is_closed:
            return
        for other in [*self._timers]:
            if other.is_closed():
                self._timers.pop(other, None)
        self._timers[loop] = loop.call_later(seconds, self._begin, loop)

    async def flush(self, patience: float | None = None) -> None:
        """Wait until every object that was added before is written.

        Args:
            patience: the seconds without a written object after which it raises. They are longer by
                the time for which the event loop is busy, since the database's answer waits, too.

        Raises:
            StoreUnavailable: an attempt to write them failed; they stay in the queue.
            TimeoutError: the patience is over; they stay in the queue, too.
        """
        target = self._taken
        loop = asyncio.get_running_loop()
        # After the end of another event loop's task, this one may have to write.
        while self._done < target:
            done = loop.create_future()
            self._flushes[done] = target
            try:
                late = None if self._start(loop) else self._late
                if late is not None:
                    raise _again(late)
                if self._writing is not loop and loop not in self._timers:
                    self._set_timer(loop, self._delay)
                # Objects that were written before this waits wake nobody.
                if self._done < target:
                    if patience is not None:
                        await self._wait(done, patience)
                    await done
            finally:
                self._flushes.pop(done, None)

    async def _wait(self, done: asyncio.Future[None], patience: float) -> None:
        """Wait for a future, or until nothing was written for as long as the patience."""
        left = _LOOKS
        try:
            while not done.done():
                if not left:
                    raise TimeoutError
                before = self._done
                await asyncio.wait([done], timeout=patience / _LOOKS)
                left = _LOOKS if self._done > before else left - 1
        except BaseException:
            done.cancel()
            raise

    def hurry(self) -> None:
        """Try again soon what an attempt could not write, because the database answers others.

        Without such an object, the database is available again.
        """
        self._pause = 0.0
        if not self._has_failed or (self._is_held and not self._waiting):
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(loop)
        if timer is None:
            if not self._waiting:
                self._recover()
        elif timer.when() > loop.time() + FIRST_PAUSE:
            timer.cancel()
            self._set_timer(loop, FIRST_PAUSE)

    def fail(self, error: StoreUnavailable) -> None:
        """Count the database as one that does not answer, until it answers somebody."""
        self._report(error)

    async def aclose(self) -> None:
        """Write what waits, in one last attempt of a few seconds."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.flush()
        except (StoreUnavailable, TimeoutError) as error:
            reason = getattr(error, "detail", self._late_reason)
            what = _objects(self.waiting, "is", "are")
            log.error("the store is not available: %s; %s lost", reason, what)
        self._is_closed = True
        timer = self._timers.pop(asyncio.get_running_loop(), None)
        if timer is not None:
            timer.cancel()
        # Another thread may replace it between two calls.
        task = self._task
        if is_running(task):
            task.cancel()

    def lose(self, count: int, reason: str, record: Record | None = None) -> None:
        """Count objects as lost; the log gets one line at most every `QUIET` seconds."""
        self.lost += count
        self._unreported += count
        now = time.monotonic()
        if now < self._silent_until:
            return
        self._silent_until = now + QUIET
        which = "" if record is None else f", the last one of request {record.request_id}"
        if record is not None and record.end_user:
            which += f" (user {record.end_user})"
        what = _objects(self._unreported, "was", "were")
        log.error("%s not stored, because %s%s", what, reason, which)
        self._unreported = 0

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start when the timer of an event loop ends, or look again later."""
        del self._timers[loop]
        if self._waiting and not self._is_closed and not self._start(loop):
            self._set_timer(loop, self._delay)

    def _start(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Write what waits; return False if a task does that, of this or another event loop."""
        writing = self._writing
        if writing is not None and writing.is_closed() and self._writing is writing:
            # Its task never ends.
            self._writing = self._late = None
        if self._writing is not None:
            return False
        self._writing = loop
        timer = self._timers.pop(loop, None)
        if timer is not None:
            timer.cancel()
        self._task = loop.create_task(self._run(loop))
        self._task.add_done_callback(self._end)
        return True

    def _end(self, task: asyncio.Task[None]) -> None:
        """Let others write, and write later what was added since the last batch."""
        loop, self._writing = task.get_loop(), None
        for done in [*self._flushes]:
            settle(done, None)
        if self._waiting and not task.cancelled() and loop not in self._timers:
            self._set_timer(loop, self._delay)

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write batches until the queue is empty, or the database does not answer."""
        while self._waiting:
            packing = self._packing
            if is_running(packing):
                # Otherwise both threads would encode the same objects.
                await asyncio.wait([packing])
            batch = list(islice(self._waiting, BATCH))
            try:
                rejected = await self._attempt(batch, loop)
            except StoreUnavailable as error:
                if isinstance(error, Unwritable):
                    self._unwritable_until = time.monotonic() + LONGEST_PAUSE
                self._report(error)
                self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
                self._set_timer(loop, self._pause)
                return
            except Exception as error:
                # Its message can have text of users. The batch must not be tried for ever.
                log.error("the store failed: %s", type(error).__name__)
                rejected = batch
            self._succeed(batch, rejected)

    async def _attempt(
        self, batch: Sequence[Record], loop: asyncio.AbstractEventLoop
    ) -> Sequence[Record]:
        """Write a batch; nobody waits longer than `PATIENCE` for it."""
        timer = loop.call_later(PATIENCE, self._give_up)
        self._trying = len(batch)
        try:
            return await self._write(batch)
        finally:
            timer.cancel()
            # A task that is garbage ends here, too, when another event loop writes.
            if self._writing is loop:
                self._trying = 0
                self._late = None

    def _give_up(self) -> None:
        """Count the running attempt as failed."""
        self._late = StoreUnavailable(self._late_reason)
        self._report(self._late)

    def _succeed(self, batch: Sequence[Record], rejected: Sequence[Record]) -> None:
        for record in batch:
            self._waiting.popleft()
            self._bytes -= record.size
            self._tighten(record)
        self._done += len(batch)
        for record in rejected:
            record.is_rejected = True
            self.lose(1, "the database cannot take them", record)
        # If nothing was written, the next object has to show that it can be.
        if not self._is_held or not all(record.is_withdrawn for record in batch):
            self._recover()
        for done in [*self._flushes]:
            if self._flushes.get(done, self._taken) <= self._done:
                settle(done, None)

    def _recover(self) -> None:
        """Count the database as one that answers, and log that once."""
        if self._has_failed:
            what = _objects(self.lost, "was", "were")
            log.warning("the store is available again; %s lost", what)
        self._has_failed = self._is_full = False
        self._pause = self._unwritable_until = 0.0

    async def _pack(self) -> None:
        """Let objects that have to wait take less memory."""
        waiting = list(islice(self._waiting, self._trying, None))
        loose = [one for one in waiting if one.is_loose]
        await asyncio.to_thread(pack, loose)
        for record in loose:
            self._tighten(record)

    def _tighten(self, record: Record) -> None:
        """Count an object as packed, or as written."""
        if record.is_loose:
            record.is_loose = False
            self._loose -= record.size

    def _report(self, error: StoreUnavailable) -> None:
        """Log that the database does not answer, once, and tell those who wait."""
        if not self._has_failed:
            what = _objects(self.waiting, "waits", "wait")
            log.error("the store is not available: %s; %s", error.detail, what)
        self._has_failed = True
        for done in [*self._flushes]:
            settle(done, _again(error))


def _objects(count: int, one: str, many: str) -> str:
    """Return a number of objects with a verb."""
    return f"{count} object {one}" if count == 1 else f"{count} objects {many}"


def _again(error: StoreUnavailable) -> StoreUnavailable:
    """Return the same error for another one who waits."""
    return StoreUnavailable(error.reason, error.detail)
