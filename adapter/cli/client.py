"""Requests of the commands to a server that runs."""

from __future__ import annotations

import urllib.error
import urllib.request

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


def ask(method: str, url: str, key: str | None, patience: float | None = None) -> tuple[int, bytes]:
    """Return the status and the body of a response.

    Args:
        key: sent in the header `Authorization`.
        patience: the seconds that the server may be silent; None for no limit.

    Raises:
        Unreachable: there is no response.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=patience) as reply:  # noqa: S310
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        reason = getattr(cause, "strerror", None) or cause
        raise Unreachable(
            f"{url} cannot be reached: {reason}. Start a server with latimer serve, or correct the "
            "address"
        ) from None
