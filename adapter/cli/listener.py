"""The sockets that `latimer serve` listens on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..app import OpenAIAdapter
from ..settings import Settings
from .server import Server
from .terminal import START, fail, say

if TYPE_CHECKING:
    from .admin_socket import AdminSocket

# The listen backlog; uvicorn's default.
_BACKLOG = 2048
# The errors of IPv6 on a machine without it, or where it is switched off.
_WITHOUT_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


class Door(Protocol):
    """The way by which connections and commands come: a `Listener`, or a `Worker`'s parent."""

    @property
    def worker(self) -> int | None:
        """The number of this worker for people, from 1; None for any other process."""
        ...

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The sockets that the server accepts connections from."""
        ...

    @property
    def address(self) -> str:
        """The URL for clients."""
        ...

    @property
    def admin(self) -> AdminSocket | None:
        """The socket of the operator that this process serves."""
        ...

    def listen(self) -> None:
        """Let clients connect; they wait for responses until the server runs."""
        ...

    def server(self, app: OpenAIAdapter, settings: Settings) -> Server:
        """Return the server of an app."""
        ...

    def reloads(self) -> asyncio.Event:
        """Return an event that is set when the settings file has to be read again."""
        ...

    def has_reloaded(self) -> None:
        """Note that the server has the settings of the file."""
        ...


class Listener:
    """The bound sockets of a server's address; clients can connect after `listen`.

    Attributes:
        sockets: one for each address of the host.
        admin: the socket of the operator, if there is one.

    Raises:
        SystemExit: the address cannot be used.
    """

    worker: int | None = None

    def __init__(self, settings: Settings) -> None:
        self._host, self._port = settings.host, settings.port
        try:
            self.sockets: Sequence[socket.socket] = bound(settings.host, settings.port)
        except OSError as error:
            fail(self._unusable(error.strerror or str(error)))
        except ValueError:
            # The host has empty or overlong labels, so it cannot be resolved.
            fail(self._unusable("it is not a valid host name"))
        self.admin: AdminSocket | None = None
        if settings.admin_socket is not None and settings.engines:
            from .admin_socket import AdminSocket

            self.admin = AdminSocket(settings.admin_socket)

    @property
    def address(self) -> str:
        """The URL for clients."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.sockets[0].getsockname()[1]}/v1"

    def listen(self) -> None:
        """Let clients connect; they wait for responses until the server runs.

        Raises:
            SystemExit: another process listens on the port.
        """
        try:
            for one in self.sockets:
                one.listen(_BACKLOG)
        except OSError as error:
            # Two processes can bind the same port as long as neither listens.
            fail(self._unusable(error.strerror or str(error)))

    def server(self, app: OpenAIAdapter, settings: Settings) -> Server:
        """See `Door`."""
        return Server(app, settings)

    def reloads(self) -> asyncio.Event:
        """See `Door`; SIGHUP sets the event."""
        asked = asyncio.Event()
        with contextlib.suppress(NotImplementedError, AttributeError):
            # Windows has no such signal.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
        return asked

    def has_reloaded(self) -> None:
        """Do nothing: no other process needs to know."""

    def close(self) -> None:
        """Close the sockets of this process."""
        for one in self.sockets:
            one.close()

    def _unusable(self, reason: str) -> str:
        return (
            f"cannot listen on {self._host}:{self._port}: {reason}. Choose another address with "
            "--host and --port, or LATIMER_PORT."
        )


def bound(host: str, port: int) -> list[socket.socket]:
    """Bind a port on every address of a host; connections are refused until the sockets listen.

    Raises:
        OSError: the port is in use, or the host has no address of this machine.
    """
    found: list[socket.socket] = []
    missing: list[str] = []
    lack = OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    try:
        for family, kind, protocol, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
            # With port 0, all addresses get the free port of the first.
            where = (address[0], found[0].getsockname()[1] if found else port, *address[2:])
            try:
                found.append(_bound(family, kind, protocol, where))
            except OSError as error:
                if family != socket.AF_INET6 or error.errno not in _WITHOUT_IPV6:
                    raise
                # The machine has no IPv6, or not this address; its other addresses are enough.
                lack = error
                missing.append(str(address[0]))
    except OSError:
        for one in found:
            one.close()
        raise
    if not found:
        raise lack
    for other in missing:
        # Where IPv6 is switched off, no client of `localhost` can use it.
        if other != "::1":
            say(
                f"{host} is {other}, too, where Latimer cannot listen: {lack.strerror}. Clients "
                "of that address are not served.", START, "warning",
            )  # fmt: skip
    return found


def _bound(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        OSError: it cannot be.
    """
    made = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # On Windows this option lets two programs bind the same port.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
