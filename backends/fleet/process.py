"""An engine that Latimer starts as a process on a free port of the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..base import Backend
from ..errors import LatimerError
from . import launch
from .config import PORT
from .groups import MARK, Group, new_mark, state_folder
from .loading import POLL, EngineLoader, LoadFailed

# Seconds that an engine gets to end after SIGTERM, and after SIGKILL.
TERM, KILL = 10.0, 5.0
# Seconds without a byte from an engine that is asked all the time, after which it is killed, and
# the questions in that time. A llama-server that computes 40 long prompts on one core answers
# within a second.
SILENCE, LOOKS = 60.0, 12
# The bytes of an engine's output that are kept, and the lines of them that describe a failure.
KEPT, LINES = 2**16, 20
_HOST = "127.0.0.1"


class Tail:
    """The last bytes that a process wrote."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._parts: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Add bytes, and drop the oldest ones beyond the limit."""
        self._parts.append(data)
        self._size += len(data)
        while self._size - len(self._parts[0]) >= self._most:
            self._size -= len(self._parts.popleft())

    def lines(self, count: int = LINES) -> str:
        """Return the last lines."""
        text = b"".join(self._parts)[-self._most :].decode(errors="replace")
        return "\n".join(line.rstrip() for line in text.splitlines()[-count:] if line.strip())


class EngineProcess(EngineLoader):
    """An engine that runs as a child process, in a process group of its own.

    Args:
        command: the program and its arguments; `{port}` in them is replaced by the port.
        make: makes the backend of an address.
        environment: variables for the process, besides Latimer's own.
        folder: the state folder; by default the platform's.
        term: seconds between SIGTERM and SIGKILL.
        silence: seconds after which an engine is killed that answers nothing.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        make: Callable[[str], Backend],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        term: float = TERM,
        silence: float = SILENCE,
        start_timeout: float = 300.0,
        idle: float | None = None,
        is_pinned: bool = False,
        memory: Mapping[str, int] | None = None,
        is_only: bool = False,
    ) -> None:
        super().__init__(
            name, start_timeout=start_timeout, idle=idle, is_pinned=is_pinned, memory=memory,
            is_only=is_only,
        )  # fmt: skip
        self._command = command
        self._make = make
        self._environment = environment or {}
        self._folder = folder or state_folder()
        self._term = term
        self._silence = silence
        self._port = _free_port()
        self._backend = make(self.address)
        self._tail = Tail()
        self._process: asyncio.subprocess.Process | None = None
        self._group: Group | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    @override
    def backend(self) -> Backend:
        return self._backend

    @property
    def address(self) -> str:
        """The address that the engine listens at while it runs."""
        return f"http://{_HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return None if self._group is None else self._group.pid

    @override
    async def obstacle(self) -> str:
        program = self._command[0]
        return "" if shutil.which(program) is not None else f"there is no program '{program}'"

    @override
    def measure(self) -> int | None:
        # Another thread may set it.
        group = self._group
        return None if group is None else group.memory() or None

    @override
    async def _start(self) -> None:
        # An engine that ended by itself.
        await self._stop()
        await self._choose_port()
        self._tail = Tail()
        mark = new_mark()
        process = self._process = await self._spawn(mark)
        self._group = Group.started(process.pid, mark, self.name, self._folder)
        self._watching = asyncio.create_task(self._watch(process))
        await self._wait_until_ready(process)

    async def _choose_port(self) -> None:
        """Keep the port of the last start if it is free, so that the backend stays the same."""
        if not _is_free(self._port):
            self._port = _free_port()
            before, self._backend = self._backend, self._make(self.address)
            await before.aclose()

    async def _spawn(self, mark: str) -> asyncio.subprocess.Process:
        command = [part.replace(PORT, str(self._port)) for part in self._command]
        obstacle = await self.obstacle()
        if obstacle:
            raise LoadFailed(obstacle)
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command]
        options: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment, MARK: mark},
                **options,
            )
        except OSError as error:
            raise LoadFailed(f"'{self._command[0]}' cannot be started: {error.strerror}") from error

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Read what the process writes, end it if it hangs, and note its end."""
        reading = asyncio.create_task(self._read(process))
        asking = asyncio.create_task(self._end_when_silent())
        try:
            status = await process.wait()
            # What it wrote last may still be in the pipe, which other programs may keep open.
            await asyncio.wait([reading], timeout=1.0)
        finally:
            reading.cancel()
            asking.cancel()
        group = self._group if self.state == "ready" else None
        if group is not None:
            group.kill()
            # An engine that counts as unloaded has no record; see `lost`.
            group.forget()
        if asking.done() and asking.exception() is None:
            reason = f"it answered nothing for {self._silence:g} s, so Latimer killed it"
            self.lost(reason, self._last_lines(), self._silence)
        else:
            self.lost(_ended(status), self._last_lines())
        if group is not None and await _has_ended(group, KILL) and self._group is group:
            # Its number can soon be that of a group of other programs.
            self._process = self._group = None

    async def _end_when_silent(self) -> None:
        """Ask the engine from time to time, and kill it if nothing comes from it for too long.

        Bytes of a running response count, too. Only time in which it was asked counts, so that an
        engine outlives the sleep of its machine.
        """
        loop = asyncio.get_running_loop()
        look = self._silence / LOOKS
        silent = last_byte = 0.0
        while silent < self._silence:
            begun = loop.time()
            await asyncio.sleep(look)
            is_well = self.state != "ready" or await self._answers_within(2 * look)
            before, last_byte = last_byte, self._backend.last_byte()
            if is_well or last_byte > before:
                silent = 0.0
            else:
                silent += min(loop.time() - begun, 3 * look)
        if self._group is not None:
            self._group.kill()

    async def _answers_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._backend.health()
        except (LatimerError, TimeoutError):
            return False
        return True

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while data := await process.stdout.read(2**14):
                self._tail.add(data)

    async def _wait_until_ready(self, process: asyncio.subprocess.Process) -> None:
        """Ask the engine until it has a model, or until the process ends."""
        assert self._watching is not None
        ending = asyncio.create_task(process.wait())
        try:
            while True:
                asking = asyncio.create_task(self._answers())
                await asyncio.wait([ending, asking], return_when=asyncio.FIRST_COMPLETED)
                if ending.done():
                    asking.cancel()
                    await asyncio.wait([self._watching])
                    raise LoadFailed(_ended(ending.result()), self._last_lines())
                if asking.result():
                    return
                await asyncio.wait([ending], timeout=POLL)
        finally:
            ending.cancel()

    @override
    async def _stop(self) -> None:
        process, group = self._process, self._group
        if process is None:
            return
        if group is None:
            process.kill()
        else:
            await _end(group, self._term)
            group.forget()
        await process.wait()
        self._process = self._group = None
        if self._watching is not None:
            await asyncio.wait([self._watching])
            self._watching = None

    @override
    def _last_lines(self) -> str:
        return self._tail.lines()


async def _end(group: Group, term: float) -> None:
    """End a process group, and return when its memory is free."""
    group.signal(signal.SIGTERM)
    if not await _has_ended(group, term):
        group.kill()
        await _has_ended(group, KILL)


async def _has_ended(group: Group, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    # A look at all processes takes 50 ms if there are a thousand.
    while await asyncio.to_thread(group.members):
        if loop.time() > end:
            return False
        await asyncio.sleep(POLL / 4)
    return True


def _ended(status: int) -> str:
    if status >= 0:
        return f"it ended with exit code {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        if os.name == "posix":
            # A port of connections that were closed a moment ago can be used again.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True
