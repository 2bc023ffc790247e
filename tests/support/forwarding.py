"""A TCP server that passes bytes on, and notes the first line of each connection."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def forwarding(address: str) -> Iterator[tuple[str, list[str]]]:
    """Pass connections on to a server; yield the new address, and the growing list of lines."""
    host, port = address.removeprefix("http://").split(":")
    lines: list[str] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((host, int(port))) as server:
                first = self.request.recv(65_536)
                lines.append(first.partition(b"\r\n")[0].decode("latin-1"))
                server.sendall(first)
                back = threading.Thread(target=_copy, args=(server, self.request))
                back.start()
                _copy(self.request, server)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as made:
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}", lines
        finally:
            made.shutdown()
            thread.join()
