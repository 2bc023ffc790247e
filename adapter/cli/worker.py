"""A worker: one of several processes that serve the connections which their parent accepts.

Parent and worker have a socket pair. Each message is one byte; a connection comes with its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from typing_extensions import override

from ..app import OpenAIAdapter
from ..metrics import Metrics
from ..responses.register import Register
from ..settings import Settings
from ..store.transcripts import Transcripts
from .protocol import Protocol
from .relay import Relay, path_of
from .server import END, Server, Shortage, end_within, most_files
from .tally import Tally

if TYPE_CHECKING:
    from .admin_socket import AdminSocket

log = logging.getLogger("latimer")

# From the parent: a connection, and what to do.
CONNECTION, RELOAD, LEAVE, DRAIN, STOP = b"c", b"h", b"l", b"d", b"e"
# From the worker: it accepts connections; one has closed; it was asked to end; it has the settings
# of the file; the requests that run when its drain begins, each with a byte, and their end; its
# event loop runs; it has the next connection, or it has too many files for one.
READY, CLOSED, LEAVES, RELOADED, RUNNING, COUNTED = b"r", b"x", b"q", b"n", b"t", b"."
ALIVE, TAKEN, FULL = b"a", b"k", b"f"
# Seconds between two of the last ones.
BEAT = 1.0
# In the shared folder: the responses in the background, and the transcripts of spoken answers.
REGISTER, TRANSCRIPTS = "responses", "transcripts.db"


class Worker:
    """The parent of this process, as its server sees it; see `Door`.

    Args:
        number: the number of the worker; its successor has the same.
        channel: this end of the socket pair.
        lifeline: the end of a pipe that is closed when the parent has ended.
        folder: the folder that the workers share.
        address: the URL for clients.
        admin: the socket of the operator, if this worker serves it.
    """

    # The parent accepts connections.
    sockets: Sequence[socket.socket] = ()

    def __init__(
        self,
        number: int,
        channel: socket.socket,
        lifeline: int,
        folder: Path,
        address: str,
        admin: AdminSocket | None = None,
    ) -> None:
        self.number, self.folder, self.address, self.admin = number, folder, address, admin
        self.channel = channel
        channel.setblocking(False)
        self._unsent = b""
        self._server: _WorkerServer | None = None
        self._asked: asyncio.Event | None = None
        threading.Thread(target=self._watch, args=(lifeline,), daemon=True).start()

    @property
    def worker(self) -> int:
        """See `Door`."""
        return self.number + 1

    def listen(self) -> None:
        """See `Door`. The server says so, when it has begun to serve."""

    def server(self, app: OpenAIAdapter, settings: Settings) -> Server:
        """See `Door`."""
        self._server = _WorkerServer(self, app, settings)
        return self._server

    def reloads(self) -> asyncio.Event:
        """See `Door`; the parent sets the event."""
        self._asked = asyncio.Event()
        return self._asked

    def has_reloaded(self) -> None:
        """See `Door`."""
        self.send(RELOADED)

    def reload(self) -> None:
        """Read the settings file again, if there is one."""
        if self._asked is not None:
            self._asked.set()

    def send(self, message: bytes) -> None:
        """Send a message to the parent, with the next one if it does not read now."""
        self._unsent += message
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.channel.send(self._unsent) :]

    def _watch(self, lifeline: int) -> None:
        """End the process when the parent has ended, also if the event loop does not run."""
        os.read(lifeline, 1)
        server = self._server
        if server is None:
            os._exit(1)
        end_within(END)
        server.leave()
        shutil.rmtree(self.folder, ignore_errors=True)


class _WorkerServer(Server):
    """A server of the connections that the parent accepts, and of the requests of siblings.

    Signals for the whole process group reach the parent too, so this process follows the parent:
    it ignores SIGINT, and asks the parent for a drain after SIGTERM.
    """

    def __init__(self, worker: Worker, app: OpenAIAdapter, settings: Settings) -> None:
        register = Register(worker.folder / REGISTER, worker.number)
        around = Relay(app, register, worker.folder, worker.number)
        http = _counted(self._note_closed)
        super().__init__(app, settings, around, http)
        self._most_files = most_files()
        self._shortage = Shortage("new connections go to other workers, or wait")
        self._worker = worker
        self._register = register
        self._around = around
        self._tally: Tally | None = None
        # What siblings pass on is for this worker. They send the address of the client.
        self._siblings = uvicorn.Config(
            app, http=Protocol, ws="none", log_config=None, log_level="warning", access_log=False,
            server_header=False, proxy_headers=True, forwarded_allow_ips="*",
        )  # fmt: skip

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and let the parent know."""
        await super().startup([])
        service = self._app.service
        # The processes with the same store are not those of this server only.
        self._register.others = service.background.elsewhere
        service.background.elsewhere = self._register
        service.transcripts = Transcripts(self._worker.folder / TRANSCRIPTS)
        if service.store is not None:
            service.store.is_shared = True
        self._around.drain_again(service)
        await self._register.inherit(service.background, service.store)
        for metrics in service.observers.all:
            if isinstance(metrics, Metrics):
                self._tally = Tally(self._worker.folder, self._worker.number, metrics, service)
                await self._tally.start()
        self._siblings.load()
        path = path_of(self._worker.folder, self._worker.number)
        path.unlink(missing_ok=True)
        make = partial(self._protocol, self._siblings)
        self.servers.append(await self._loop.create_unix_server(make, path))
        self._loop.add_reader(self._worker.channel, self._read)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._worker.send(READY)
        self._beat()

    def _beat(self) -> None:
        """Tell the parent that the event loop runs, again and again."""
        self._worker.send(ALIVE)
        self._loop.call_later(BEAT, self._beat)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask the parent for a drain, unless the terminal has sent the signal to the parent too."""
        if sig != signal.SIGINT:
            self._worker.send(LEAVES)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, and release what siblings use."""
        await super().shutdown(sockets)
        if self._tally is not None:
            await self._tally.aclose()
        await self._around.aclose()

    def leave(self) -> None:
        """End what runs, from another thread; the parent has ended."""
        self.should_exit = True
        if self._tally is not None:
            self._tally.leave()
        with contextlib.suppress(RuntimeError):
            # The event loop may have ended.
            self._loop.call_soon_threadsafe(self.end)

    def _read(self) -> None:
        """Follow the messages of the parent."""
        while True:
            try:
                message, files, _, _ = socket.recv_fds(self._worker.channel, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                message, files = b"", []
            if message == CONNECTION and files and files[0] < self._most_files:
                self._worker.send(TAKEN)
                self.open(socket.socket(fileno=files[0]))
            elif message == CONNECTION:
                for one in files:
                    os.close(one)
                self._worker.send(FULL)
                self._shortage.note()
            elif message == RELOAD:
                self._worker.reload()
            elif message == LEAVE:
                self._app.service.is_leaving = True
            elif message == DRAIN:
                self._app.drain()
                self._worker.send(RUNNING * self.running + COUNTED)
                self.should_exit = True
            elif message == STOP:
                self.should_exit = True
                self.end()
            elif not message:
                self._loop.remove_reader(self._worker.channel)
                return

    def _note_closed(self) -> None:
        self._worker.send(CLOSED)


def _counted(note: Callable[[], None]) -> type[Protocol]:
    """Return the class of connections, each of which calls `note` when it has closed."""

    class Counted(Protocol):
        @override
        def closed(self) -> None:
            note()

    return Counted
