"""The Unix socket of `--admin-socket`: only its owner can connect, and needs no key."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from ..admin import PREFIX
from ..settings import Settings
from .terminal import fail

# The name of a client of the socket, in the log.
_CLIENT = "admin socket"


def with_key(settings: Settings) -> Settings:
    """Return the settings with a key for the paths of the operator, if a socket leads to them."""
    if settings.admin_socket is None or settings.admin_key is not None or not settings.engines:
        return settings
    return settings.with_flags(admin_key=secrets.token_urlsafe(32))


class AdminSocket:
    """A bound Unix socket; programs can connect when a server listens on it.

    Attributes:
        socket: the bound socket.

    Raises:
        SystemExit: the path cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.socket = socket.socket(socket.AF_UNIX)
            _remove_stale(path)
            self.socket.bind(str(path))
            # Nobody can connect before the server listens.
            path.chmod(0o600)
        except (OSError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fail(f"cannot listen on {path}: {reason}. Choose another path with --admin-socket.")

    def close(self) -> None:
        """Close the socket in this process, and delete it."""
        self.socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _remove_stale(path: Path) -> None:
    """Delete the socket that a killed server has left.

    Raises:
        OSError: a server uses it, or it is another file.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "it is a file or a directory, and not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


class Operator:
    """An ASGI app that sends the operator's key for the clients of the socket."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = (b"authorization", b"Bearer " + key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; paths that are not the operator's need their keys as elsewhere."""
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            headers = [one for one in scope["headers"] if one[0] != b"authorization"]
            # The log of what the operator does names a client.
            scope = {**scope, "client": (_CLIENT, 0), "headers": [*headers, self._key]}
        await self._app(scope, receive, send)
