"""Requests of the commands to a server that runs."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from typing_extensions import override

from .terminal import WrongUse

DEFAULT = "http://127.0.0.1:8000"


class Unreachable(Exception):
    """A server that does not answer as it should; the message says why, and what to do."""


def base_of(url: str) -> str:
    """Return the address of a server without the prefix of its API.

    Raises:
        WrongUse: it is not an address.
    """
    if not url.startswith(("http://", "https://")):
        raise WrongUse(f"{url} is not an address such as {DEFAULT}.")
    return url.rstrip("/").removesuffix("/v1")


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a Unix socket."""

    def __init__(self, path: str, patience: float | None) -> None:
        super().__init__("localhost", timeout=patience)
        self._path = path

    @override
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(
    method: str,
    url: str,
    key: str | None,
    patience: float | None = None,
    unix: str | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of a response.

    Args:
        key: sent in the header `Authorization`.
        patience: the seconds that the server may be silent; None for no limit.
        unix: the path of a Unix socket, instead of the host of the URL.

    Raises:
        Unreachable: there is no response.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if unix is not None:
        return _ask_socket(method, url, headers, _UnixConnection(unix, patience), unix)
    request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310
    try:
        with _opener(url).open(request, timeout=patience) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _unreachable(url, getattr(error, "reason", error), "latimer serve") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener; a proxy of the environment reaches no server of this machine."""
    host = urlsplit(url).hostname or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _ask_socket(
    method: str, url: str, headers: Mapping[str, str], connection: _UnixConnection, path: str
) -> tuple[int, bytes]:
    try:
        connection.request(method, urlsplit(url).path, headers=dict(headers))
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _unreachable(path, error, "latimer serve --admin-socket PATH") from None
    finally:
        connection.close()


def _unreachable(place: str, cause: object, program: str) -> Unreachable:
    reason = getattr(cause, "strerror", None) or cause
    return Unreachable(
        f"{place} cannot be reached: {reason}. Start a server with {program}, or correct the "
        "address"
    )
