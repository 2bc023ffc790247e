"""A native generation, from its request until koboldcpp has ended it.

koboldcpp generates a whole response to its end even if nobody reads it, and looks at a stream's
connection twice a second only. It forgets an abort that arrives just before a generation begins. So
a call that may have begun is aborted until its response ends, and then the next call has its turn.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from ...schemas.native.koboldcpp import Perf
from ..base import Model
from ..errors import EngineError, EngineUnavailable, LatimerError
from ..http import HttpClient, Response
from .translate import ENGINE, to_error

T = TypeVar("T")

STREAM, WHOLE = "/api/extra/generate/stream", "/api/v1/generate"
# The largest number of bytes of a whole response, and of each of its tokens with ten alternatives.
MOST_HEAD, MOST_TOKEN = 2**20, 2**14
# Seconds between two aborts of a call; the engine itself sleeps 0.1 s before it answers one.
ABORT_EVERY = 0.1
# Seconds after a call was sent until the engine is asked for its model. Asked at once, the question
# is answered before the call begins: a short answer took 0.5 ms of 12 longer.
ASK_AFTER = 0.002
# Seconds of a pause in a response. koboldcpp closes a stream 0.15 s after its last text, and only
# then begins the next generation.
PAUSE = 0.08
# The number of consecutive idle checks after which a call without a response head counts as ended:
# a busy machine may not have read the request yet. With a head, or a lost connection, fewer do.
IDLE_CHECKS, IDLE_CHECKS_BEGUN = 10, 2
# Seconds for the engine's answers between two aborts, and how often they may be missing or wrong
# until the engine counts as dead.
ANSWER_SECONDS, MOST_MISSING = 5.0, 3
# Seconds of aborting after which an engine counts as hung, so that other calls get their error. One
# batch of a long prompt, which an abort does not interrupt, may take a minute.
HUNG_SECONDS = 120.0
# Seconds of aborting after which a call whose connection was lost no longer keeps its turn.
LOST_SECONDS = 10.0


def new_genkey() -> str:
    """Return a new key for aborting one generation and for reading its tokens."""
    return "LATIMER" + secrets.token_hex(8)


class CallServer(Protocol):
    """The part of a `Server` that a call needs; `calls` are the connections of generations."""

    calls: HttpClient
    silence: float

    async def abort(self, genkey: str) -> None: ...

    async def perf(self) -> Perf: ...

    async def check_still(self, model: Model) -> None: ...

    async def once_free(self, work: Callable[[], Awaitable[T]]) -> T: ...

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...


async def both(work: Coroutine[Any, Any, T], check: Coroutine[Any, Any, None]) -> T:
    """Return the result of some work, when a check at the same time has succeeded.

    Raises:
        LatimerError: the first error of the two, which cancels the other.
    """
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(check)
    try:
        return (await asyncio.gather(*tasks))[0]
    finally:
        for task in tasks:
            task.cancel()


class Call:
    """A native generation.

    Attributes:
        genkey: the key by which the engine knows it.
    """

    def __init__(self, server: CallServer) -> None:
        self.genkey = new_genkey()
        self._server = server
        # Nothing was sent yet.
        self._is_over = True
        self._sending: asyncio.Future[Response] | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._reading: asyncio.Future[bytes] | None = None
        self._ending: asyncio.Future[None] | None = None

    async def start(self, path: str, payload: bytes, model: Model | None = None) -> Response:
        """Send the call; wait while requests of other clients keep the engine busy.

        Args:
            model: the model that the call was made for. The engine is asked for it while the call
                runs, which costs a short answer less than a question before the call.

        Raises:
            Busy: they do so for too long.
            EngineError: the engine rejects the call, or it becomes idle without a response.
            EngineUnavailable: the engine has another model now.
        """

        async def work() -> Response:
            if model is None:
                return await self._start(path, payload)
            return await both(self._start(path, payload), self._check(model))

        return await self._server.once_free(work)

    async def _check(self, model: Model) -> None:
        await asyncio.sleep(ASK_AFTER)
        await self._server.check_still(model)

    async def _start(self, path: str, payload: bytes) -> Response:
        self._is_over = False
        self._sending = asyncio.ensure_future(self._server.calls.send("POST", path, payload))
        response = await self._watched(self._sending)
        if response.status == 200:
            self._chunks = aiter(response.stream)
            return response
        # A call is rejected before it begins.
        self._is_over = True
        async with response:
            raise to_error(response.status, await response.aread())

    async def chunks(
        self, is_ended: Callable[[], Awaitable[bool]] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the response as it arrives.

        Args:
            is_ended: asked in short pauses of the response; True ends it.

        Raises:
            EngineError: the engine becomes idle before the end of the response.
        """
        assert self._chunks is not None
        while True:
            # A task, since a cancelled read cannot be resumed.
            self._reading = asyncio.ensure_future(anext(self._chunks, b""))
            if is_ended is not None and await self._pauses(self._reading, is_ended):
                self._is_over = True
                return
            chunk = await self._watched(self._reading)
            if not chunk:
                self._is_over = True
                return
            yield chunk

    async def read(self, tokens: int) -> bytes:
        """Return the rest of the response.

        Args:
            tokens: the largest number of tokens that it may have.

        Raises:
            EngineError: it is larger than so many tokens with their alternatives can be.
        """
        parts, size, most = [], 0, MOST_HEAD + tokens * MOST_TOKEN
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                parts.append(chunk)
                size += len(chunk)
                if size > most:
                    raise EngineError(f"{ENGINE} sent more than {most} bytes for {tokens} tokens.")
        return b"".join(parts)

    def mark_over(self) -> None:
        """Note that the engine has sent the last event, so that nothing is left to abort."""
        self._is_over = True

    async def abort(self) -> None:
        """Abort the generation, unless it is over; `end` waits for its end."""
        if not self._is_over:
            # `end` finds out if the engine is gone.
            with suppress(LatimerError):
                await self._server.abort(self.genkey)

    async def end(self) -> None:
        """Abort the call until its response has ended, and close the connection.

        A cancelled caller does not end that.
        """
        if self._ending is None:
            self._ending = self._server.background(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        reading = asyncio.ensure_future(self._read_to_end())
        try:
            if not self._is_over:
                await self._abort_until(reading)
        finally:
            self._is_over = True
            reading.cancel()
            await self._close()

    async def _abort_until(self, reading: asyncio.Future[bool]) -> None:
        idle = missing = 0
        begin = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._server.abort(self.genkey)
                    await asyncio.wait([reading], timeout=ABORT_EVERY)
                    if reading.done() and reading.result():
                        return
                    idle = idle + 1 if (await self._server.perf())["idle"] else 0
            except EngineUnavailable:
                return  # Nothing runs there.
            except (LatimerError, TimeoutError):
                missing += 1
                await asyncio.sleep(ABORT_EVERY)
            begun = self._chunks is not None or reading.done()
            needed = IDLE_CHECKS_BEGUN if begun else IDLE_CHECKS
            limit = LOST_SECONDS if reading.done() else HUNG_SECONDS
            is_late = time.monotonic() - begin > limit
            if idle >= needed or missing >= MOST_MISSING or is_late:
                return
            if reading.done():
                await asyncio.sleep(ABORT_EVERY)

    async def _read_to_end(self) -> bool:
        """Read the rest of the response; return False if the connection is lost."""
        try:
            if self._sending is not None:
                response = await self._sending
                if self._chunks is None:
                    self._chunks = aiter(response.stream)
            if self._reading is not None and not await self._reading:
                return True
            if self._chunks is not None:
                async for _ in self._chunks:
                    pass
        except LatimerError:
            return False
        return True

    async def _close(self) -> None:
        sending, self._sending = self._sending, None
        for waiting in (self._reading, sending):
            if waiting is not None and not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])
        if sending is not None and not sending.cancelled() and sending.exception() is None:
            await sending.result().aclose()

    async def _pauses(
        self, reading: asyncio.Future[bytes], is_ended: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Return True if the response has ended in a pause, and False when more of it arrives."""
        until = time.monotonic() + self._server.silence
        while time.monotonic() < until:
            if (await asyncio.wait([reading], timeout=PAUSE))[0]:
                return False
            if await is_ended():
                return True
        return False

    async def _watched(self, reading: asyncio.Future[T]) -> T:
        """Wait for a part of the response; raise an error if the engine goes idle without it."""
        idle = 0
        while not (await asyncio.wait([reading], timeout=self._server.silence))[0]:
            idle = idle + 1 if (await self._server.perf())["idle"] else 0
            if idle >= 2:
                raise EngineError(f"{ENGINE} became idle without sending a response.")
        return await reading
