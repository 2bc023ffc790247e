"""Clients that send one request after the other, as raw bytes, while a server ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

# The clients of a server, and the seconds in which they send requests before it ends.
_CLIENTS, _BEFORE = 8, 0.2


class _Client:
    """A client that sends requests until the server takes no more."""

    def __init__(self, address: str, keeps: bool) -> None:
        host, port = address.removeprefix("http://").split(":")
        self._where, self._keeps = (host, int(port)), keeps
        self.answers = 0
        self.lost = ""

    def run(self) -> None:
        """Send requests; note the first one that was sent and has no answer."""
        while True:
            try:
                connection = socket.create_connection(self._where, 30)
            except OSError:
                return
            with connection:
                if not self._use(connection):
                    return

    def _use(self, connection: socket.socket) -> bool:
        """Send requests over a connection; return True if another one may follow."""
        close = b"" if self._keeps else b"Connection: close\r\n"
        while not _has_ended(connection):
            head = b""
            try:
                connection.sendall(b"GET /v1/models/none HTTP/1.1\r\nHost: a\r\n%b\r\n" % close)
                while not head.endswith(b"}}"):
                    part = connection.recv(65_536)
                    if not part:
                        raise ConnectionError("no answer")
                    head += part
            except OSError as error:
                self.lost = repr(error)
                return False
            self.answers += 1
            if b"\r\nconnection: close" in head:
                return not self._keeps
        return False


def _has_ended(connection: socket.socket) -> bool:
    """Return True if the server has closed a connection."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return not connection.recv(1, socket.MSG_PEEK)
    connection.setblocking(True)
    return False


def lost(address: str, keeps: bool, end: Callable[[], None]) -> Iterator[str]:
    """Have clients send requests while a server ends; yield the reason of each lost request.

    Args:
        keeps: True if each client keeps its connection.
        end: begins the end of the server.
    """
    clients = [_Client(address, keeps) for _ in range(_CLIENTS)]
    threads = [threading.Thread(target=one.run) for one in clients]
    for thread in threads:
        thread.start()
    time.sleep(_BEFORE)
    end()
    for thread in threads:
        thread.join(30)
    assert all(one.answers for one in clients)
    yield from (one.lost for one in clients if one.lost)
