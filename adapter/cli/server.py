"""uvicorn's server, which accepts many connections at once, with a drain that ends in an error."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from ...backends.fleet.groups import kill_all
from ..app import OpenAIAdapter
from ..proxies import ForwardedFor
from ..settings import Settings
from .protocol import Protocol
from .terminal import say
from .timeouts import unread

log = logging.getLogger("latimer")

# Seconds for cancelled requests to send their errors, and for the process to end.
_LAST_WORDS, END = 2, 5.0
# Seconds for a client to read some of what waits for it at the end, and to read all of it.
_SOME, _ALL = 0.5, 1.75
# The largest number of connections to accept in a turn of the event loop; they take 5 ms.
BURST = 64
# Seconds without new connections when the process has no file or memory for one.
_SHORTAGE = 1.0
# Seconds without a lack of files after which the next one is logged again.
_QUIET = 10.0
# The connections that a drain accepts at most, as the kernel lets no more wait.
WAITING = 2048
# What a server prints when a signal ends its drain.
ENDS = "Latimer ends now; requests that still run get an error."
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# The files that connections of clients leave to those of engines and to the store, and the share of
# all files that these are at most.
_RESERVE, _SHARE = 64, 1 / 8


def most_files() -> float:
    """Return the first file descriptor that no connection of a client may have.

    The kernel gives the lowest one that is free.
    """
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return math.inf
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if most == resource.RLIM_INFINITY else most - min(_RESERVE, int(most * _SHARE))


class Shortage:
    """A lack of open files, of which the log has one line until it has ended for some time.

    Args:
        effect: what it means for new connections, as the end of a sentence.
    """

    def __init__(self, effect: str) -> None:
        self._effect = effect
        self._until = 0.0

    def note(self) -> None:
        """Log the lack, unless it is the same as before."""
        now = monotonic()
        if now >= self._until:
            log.warning("Latimer has too many open files, and %s. Raise ulimit -n.", self._effect)
        self._until = now + _QUIET


class Acceptor:
    """Accepts the connections of a socket that listens, those that wait together in one turn.

    The servers of libuv accept one in a turn of the event loop, and a turn of a busy server takes
    20 ms and more. Of 512 clients that connected at once, the last one waited for seconds.

    Args:
        listening: the socket.
        use: called with each connection.
    """

    def __init__(self, listening: socket.socket, use: Callable[[socket.socket], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._use = use
        self._timer: asyncio.TimerHandle | None = None
        self._most_files = most_files()
        self._shortage = Shortage("new connections wait")
        listening.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Accept the connections that wait, which the kernel would cut, and no more."""
        self._loop.remove_reader(self._socket)
        self._most_files = math.inf
        self.accept(WAITING)
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    def _begin(self) -> None:
        self._loop.add_reader(self._socket, self.accept)

    def accept(self, most: int = BURST) -> None:
        """Accept the connections that wait."""
        for _ in range(most):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORT_OF:
                    raise
                self._pause()
                return
            file = connection.fileno()
            self._use(connection)
            if file >= self._most_files:
                self._pause()
                return

    def _pause(self) -> None:
        """Let clients wait in the kernel for a time."""
        self._loop.remove_reader(self._socket)
        self._timer = self._loop.call_later(_SHORTAGE, self._begin)
        self._shortage.note()


class Server(uvicorn.Server):
    """A uvicorn server that sends an error to requests that still run after the drain.

    uvicorn would cancel them without a response.

    Args:
        settings: `drain` is the seconds that running requests get after the first signal, and
            `shutdown_delay` those before it. A second signal ends both.
        around: the app with what surrounds it; by default nothing does.
        http: the class of connections.
    """

    def __init__(
        self,
        app: OpenAIAdapter,
        settings: Settings,
        around: ASGIApp | None = None,
        http: type[Protocol] = Protocol,
    ) -> None:
        # The router itself would only pass on what it gets.
        self._served = around or app.stack
        if settings.trusted_proxies:
            # It names the client for the log.
            self._served = ForwardedFor(self._served, settings.trusted_proxies)
        super().__init__(
            uvicorn.Config(
                self._served,
                interface="asgi3",
                http=http,
                # `Protocol` imports the protocol of WebSockets when it needs it.
                ws="none",
                ws_max_size=app.service.max_body,
                ws_per_message_deflate=False,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=settings.timeout_keep_alive,
                timeout_graceful_shutdown=settings.drain + _LAST_WORDS,
            )
        )
        self._app = app
        self._drain, self._delay = settings.drain, settings.shutdown_delay
        self._loop = asyncio.get_running_loop()
        self._admin: tuple[socket.socket, uvicorn.Config] | None = None
        self._acceptors: list[Acceptor] = []
        self._opening: set[asyncio.Task[object]] = set()

    def serve_operator(self, admin: socket.socket, key: str) -> None:
        """Serve the operator's socket, too, from the startup on; `key` opens the paths."""
        # It needs the modules of a fleet.
        from .admin_socket import Operator

        config = uvicorn.Config(
            Operator(self._served, key), interface="asgi3", http=Protocol, ws="none",
            log_config=None, log_level="warning", access_log=False, server_header=False,
            proxy_headers=False,
        )  # fmt: skip
        self._admin = admin, config

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        if sockets is None or os.name != "posix":
            await super().startup(sockets)
        else:
            await super().startup([])
            self._acceptors = [Acceptor(one, self.open) for one in sockets]
        if self._admin is not None and self.started:
            admin, config = self._admin
            config.load()
            options: dict[str, Any] = {}
            if sys.version_info >= (3, 13) and isinstance(self._loop, asyncio.BaseEventLoop):
                # The next worker listens at the same path.
                options["cleanup_socket"] = False
            make = partial(self._protocol, config)
            self.servers.append(await self._loop.create_unix_server(make, sock=admin, **options))

    def open(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted."""
        connection.setblocking(False)
        make = partial(self._protocol, self.config)
        opening = self._loop.create_task(self._loop.connect_accepted_socket(make, connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def _protocol(self, config: uvicorn.Config) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        return make(config=config, server_state=self.server_state, app_state=self.lifespan.state)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain, or end it; unlike uvicorn's, this does not raise the signal again."""
        service, later = self._app.service, self._loop.call_soon_threadsafe
        is_first, service.is_leaving = not service.is_leaving, True
        if is_first and self._delay:
            later(say, leaves(self._delay), "drain")
            later(self._loop.call_later, self._delay, self._begin_drain)
        elif is_first:
            self._begin_drain()
        else:
            self._app.drain()
            self.should_exit = True
            later(say, ENDS, "drain")
            later(self.end)

    def _begin_drain(self) -> None:
        if not self.should_exit:
            self._app.drain()
            line = waits_for(self.running, self._drain)
            self._loop.call_soon_threadsafe(say, line, "drain")
            self.should_exit = True

    @property
    def running(self) -> int:
        """The number of requests that run; idle WebSockets do not count."""
        # A task that has just ended is there for one more turn of the event loop.
        tasks = sum(not task.done() for task in self.server_state.tasks)
        return tasks - sum(one.is_idle for one in self._app.service.sockets)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests until the drain is over."""
        for acceptor in self._acceptors:
            acceptor.close()
        if self._opening:
            # uvicorn ends its connections once, and then waits for those that came later.
            await asyncio.wait(self._opening)
        timer = self._loop.call_later(self._drain, self.end)
        await super().shutdown(sockets)
        timer.cancel()
        end_within(END)

    def end(self) -> None:
        """Cancel running requests, which then send the shutdown error."""
        self._app.end()
        # A task that is cancelled before its first step would end without a response.
        self._loop.call_soon(_cancel, [*self.server_state.tasks])
        before = {one: unread(one.transport) for one in self.server_state.connections}
        self._loop.call_later(_SOME, self._cut, before)
        self._loop.call_later(_ALL, self._cut, {})
        end_within(END)

    def _cut(self, before: Mapping[Any, int]) -> None:
        """Abort connections whose clients do not read; their requests would wait for them.

        Args:
            before: the unread bytes of connections that stay open if they have fewer now.
        """
        cut = 0
        for one in list(self.server_state.connections):
            if one.transport.get_write_buffer_size() and unread(one.transport) >= before.get(
                one, 0
            ):
                one.transport.abort()
                cut += 1
        if cut:
            whose = "a connection whose client" if cut == 1 else f"{cut} connections whose clients"
            log.info("Latimer closed %s did not read the response.", whose)


def _cancel(tasks: Iterable[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()


def leaves(delay: int) -> str:
    """Return the line that a server prints when it will drain after a delay."""
    return f"Latimer begins to drain in {delay} s, and serves until then; /ready is a 503."


def waits_for(running: int, drain: int) -> str:
    """Return the line that a server prints when its drain begins."""
    if not running:
        return "Latimer ends; no request runs."
    requests = "1 request" if running == 1 else f"{running} requests"
    return f"Latimer waits for {requests}, at most {drain} s; a second signal stops it."


def end_within(seconds: float) -> None:
    """End the process after this time, in case an engine or a thread does not stop."""
    timer = threading.Timer(seconds, _exit)
    timer.daemon = True
    timer.start()


def _exit() -> None:
    kill_all()
    os._exit(0)
