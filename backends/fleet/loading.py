"""Loading and unloading an engine: what a process, a model of a router and koboldcpp share.

One load serves all requests that wait for it, and none of them can cancel it. A load that fails is
not repeated at once: the pause doubles with each failure.

The adapter sets the request of a task in `REQUEST`. A stream sends comments while it waits for a
load, and any other request waits up to a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from ..base import Backend
from ..errors import EngineUnavailable, LatimerError, summed_up
from .replica import LoadState

log = logging.getLogger("latimer")

# Seconds before a failed load is repeated, and the longest such pause.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
# Seconds that an engine must be ready for, so that its end does not count as one more failure.
STABLE = 60.0
# The longest delay that a client is asked for: OpenAI's do not wait for more than two minutes.
MOST_RETRY = 60.0
# Seconds between two attempts to reach an engine that starts.
POLL = 0.1
# The beginning of a line of llama.cpp's log that is an error: its time, level, part and function.
_ERROR = re.compile(r"[\d.]+ E (?:\w{3} +)?(?:[\w()]+: +)?(?:error: )?")
_SAYS_ERROR = re.compile(r"error|failed", re.IGNORECASE)


class Waiting(Protocol):
    """A request that can wait."""

    async def wait(
        self, ready: asyncio.Future[Any], note: Callable[[], str], most: float | None
    ) -> bool:
        """Wait for an engine; return False if it is not ready in time.

        Args:
            ready: done when the engine is ready, or has failed; it is not cancelled.
            note: describes what the request waits for, as one line.
            most: the seconds that a request may wait which does not stream; None for no limit.
        """
        ...


# The request of the current task, and of the tasks that it starts.
REQUEST: ContextVar[Waiting | None] = ContextVar("latimer_request", default=None)


async def wait(
    ready: asyncio.Future[Any], note: Callable[[], str], most: float | None = None
) -> bool:
    """Wait for an engine on behalf of the current request; see `Waiting.wait`."""
    request = REQUEST.get()
    if request is not None:
        return await request.wait(ready, note, most)
    await asyncio.wait([ready], timeout=most)
    return ready.done()


def _nothing() -> None:
    return


def _ignore(_memory: Mapping[str, int]) -> None:
    return


def cause_of(tail: str) -> str:
    """Return the error in the last lines of an engine; an empty text if they have none.

    llama.cpp names the cause first, and other programs last.
    """
    lines = tail.splitlines()
    errors = [line[found.end() :] for line in lines if (found := _ERROR.match(line))]
    errors = errors[:1] or [line for line in lines if _SAYS_ERROR.search(line)][-1:]
    return summed_up(errors[0].strip(" .:")) if errors else ""


class LoadFailed(Exception):
    """A load that failed; `tail` has the last lines that the engine wrote."""

    def __init__(self, reason: str, tail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.tail = tail


def not_loaded(message: str, retry_after: float) -> EngineUnavailable:
    """Return the error of a request for an engine that is not loaded."""
    error = EngineUnavailable(message)
    error.retry_after = min(max(retry_after, 1.0), MOST_RETRY)
    return error


class EngineLoader(ABC):
    """An engine that is loaded and unloaded; a `Loader` of its replica.

    Args:
        name: its name in the configuration.
        start_timeout: seconds that a load may take.
        idle: seconds after the last request until it is unloaded; None for never.
        is_pinned: True if it is never unloaded for another model, or because it is idle.
        memory: the bytes that it takes, by the names of the machine's memories; empty if unknown.
        is_only: True if the server ends when the first load has failed.
        place: the server that has one model at a time, where a load unloads the model before it;
            empty for none.

    Attributes:
        state: unloaded, loading, ready, or failed.
        failure: why the last load or the engine itself has failed; empty since it was loaded, or
            unloaded as it should be.
        tail: the last lines that the engine wrote before it failed.
        since: when the state began, by `time.monotonic`.
        changed: called when the state has changed.
        measured: called with the memory when it was measured.
    """

    def __init__(
        self,
        name: str,
        *,
        start_timeout: float = 300.0,
        idle: float | None = None,
        is_pinned: bool = False,
        memory: Mapping[str, int] | None = None,
        is_only: bool = False,
        place: str = "",
    ) -> None:
        self.name = name
        self.place = place
        self.idle = idle
        self.is_pinned = is_pinned
        self.memory: Mapping[str, int] = dict(memory or {})
        self._is_declared = memory is not None
        self._ends_server = is_only
        self.state: LoadState = "unloaded"
        self.failure = self.tail = ""
        self.since = time.monotonic()
        self.changed: Callable[[], None] = _nothing
        self.measured: Callable[[Mapping[str, int]], None] = _ignore
        self.start_timeout = start_timeout
        self._failures = 0
        self._again = 0.0
        self._task: asyncio.Task[None] | None = None
        # True while a load that has failed or was cancelled ends the engine.
        self._is_abandoning = False
        self._changing = asyncio.Lock()

    @property
    @abstractmethod
    def backend(self) -> Backend:
        """The engine's backend; its calls fail unless the state is `ready`."""

    async def _answers(self) -> bool:
        """Return True if the engine says that it is ready, and which model it has."""
        try:
            await self.backend.health()
            await self.backend.model()
        except LatimerError:
            return False
        return True

    @abstractmethod
    async def _start(self) -> None:
        """Load the engine, and return when it is ready.

        Raises:
            LoadFailed: it cannot be loaded.
        """

    @abstractmethod
    async def _stop(self) -> None:
        """Unload the engine, or end a load; return when its memory is free."""

    @property
    def is_ready(self) -> bool:
        """True if the engine is loaded."""
        return self.state == "ready"

    async def obstacle(self) -> str:
        """Return why the engine cannot be loaded; an empty text if no reason is known."""
        return ""

    def measure(self) -> int | None:
        """Return the bytes of memory that the engine takes now; None if they cannot be measured.

        This runs in a thread, since it may take time.
        """
        return None

    def doubt(self) -> None:
        """Look soon whether the engine is still loaded, since a request has failed."""
        return

    def note_memory(self, kind: str, size: int) -> None:
        """Note the largest measured size of the engine, unless its memory is declared."""
        if not self._is_declared:
            self.memory = {kind: max(size, self.memory.get(kind, 0))}
            self.measured(self.memory)

    @property
    def pause(self) -> float:
        """The seconds until a failed load may be repeated."""
        return max(self._again - time.monotonic(), 0.0) if self.state == "failed" else 0.0

    async def load(self) -> None:
        """Load the engine, unless it is ready; join a load that has begun.

        Raises:
            EngineUnavailable: the load failed, or failed a moment ago.
        """
        if self.is_ready:
            return
        task = self._task
        if task is None or task.done():
            self.check()
            self._enter("loading")
            task = self._task = asyncio.create_task(self._load())
        # A caller that is cancelled does not cancel the load.
        await asyncio.wait([task])
        if not self.is_ready:
            raise self.unavailable()

    async def unload(self) -> None:
        """Unload the engine, or end its load; a failed engine may then be loaded again at once."""
        task = self._task
        if task is not None and not task.done():
            # A load that ends already must not leave the engine with its memory.
            if not (self._is_abandoning or task.cancelling()):
                task.cancel()
            await asyncio.wait([task])
        async with self._changing:
            # Its end is not a failure.
            self.failure = self.tail = ""
            self._enter("unloaded")
            await self._stop()
            self._failures, self._again = 0, 0.0

    def leave(self) -> None:
        """Note that the load of another engine unloads this one."""
        self._enter("unloaded")

    async def reject(self, reason: str) -> None:
        """Unload an engine that is loaded and cannot be used, as after a load that fails."""
        async with self._changing:
            tail = self._last_lines()
            # Its end is not one more failure.
            self._enter("unloaded")
            await self._abandon()
            self._fail(reason, tail)

    async def aclose(self) -> None:
        """Unload the engine if Latimer has loaded it, and release its backend."""
        if self.state != "unloaded":
            await self.unload()
        async with self._changing:
            # An unload that had begun has ended.
            await self.backend.aclose()

    def lost(self, reason: str, tail: str = "", silent: float = 0.0) -> None:
        """Note that a ready engine has ended by itself; at first it may be loaded again at once.

        Args:
            silent: the seconds that it did not answer before its end.
        """
        if self.state != "ready":
            return
        if time.monotonic() - self.since - silent > STABLE:
            self._failures = 0
        if self._failures:
            self._fail(reason, tail)
            return
        self._failures = 1
        self.failure, self.tail = reason, tail
        fields = {"engine": self.name, "reason": reason, "log": tail}
        self._enter("unloaded")
        last = f"\n{tail}" if tail else ""
        log.warning(
            "engine %s ended: %s; the next request that waits loads it again%s", self.name, reason,
            last,
            extra={"event": "engine_lost", "fields": fields},
        )  # fmt: skip

    async def _load(self) -> None:
        try:
            async with self._changing, asyncio.timeout(self.start_timeout):
                await self._start()
        except asyncio.CancelledError:
            await self._abandon()
            self._enter("unloaded")
        except TimeoutError:
            reason = f"it was not ready within {self.start_timeout:g} s"
            tail = self._last_lines()
            await self._abandon()
            self._fail(reason, tail)
        except LoadFailed as error:
            await self._abandon()
            self._fail(error.reason, error.tail)
        except Exception as error:
            await self._abandon()
            log.exception("loading %s failed", self.name)
            self._fail(repr(error), "")
        else:
            self.failure = self.tail = ""
            self._ends_server = False
            self._enter("ready")

    async def _abandon(self) -> None:
        self._is_abandoning = True
        try:
            with contextlib.suppress(Exception):
                await self._stop()
        finally:
            self._is_abandoning = False

    def _last_lines(self) -> str:
        """Return the last lines that the engine wrote, if they are known."""
        return ""

    def _enter(self, state: LoadState) -> None:
        self.state, self.since = state, time.monotonic()
        self.changed()

    def _fail(self, reason: str, tail: str) -> None:
        self._failures += 1
        pause = min(FIRST_PAUSE * 2 ** min(self._failures - 1, 30), LONGEST_PAUSE)
        self._again = time.monotonic() + pause
        self.failure, self.tail = reason, tail
        fields = {
            "engine": self.name, "reason": reason, "was": self.state,
            "seconds": round(time.monotonic() - self.since, 3), "next_attempt": pause, "log": tail,
        }  # fmt: skip
        self._enter("failed")
        following = "" if self._ends_server else f"; next attempt in {pause:g} s"
        last = f"\n{tail}" if tail else ""
        log.warning(
            "engine %s failed: %s%s%s", self.name, reason, following, last,
            extra={"event": "load_failed", "fields": fields},
        )  # fmt: skip

    def check(self) -> None:
        """Check that a load has not failed a moment ago.

        Raises:
            EngineUnavailable: it has.
        """
        if self.state == "failed" and time.monotonic() < self._again:
            raise self.unavailable()

    def unavailable(self) -> EngineUnavailable:
        """Return the error of a request for the engine, which is not loaded."""
        if self.state == "failed":
            rest = self._again - time.monotonic()
            message = f"The engine '{self.name}' could not be loaded: {self.failure}."
            return not_loaded(message, rest)
        return not_loaded(f"The engine '{self.name}' was unloaded. Send the request again.", 1.0)
