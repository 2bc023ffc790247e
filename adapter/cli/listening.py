"""Bind sockets on the addresses of a host, before the server starts."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable

from ..origins import LocalRules, is_loopback


def local_rules(host: str, origins: Iterable[str], hosts: Iterable[str]) -> LocalRules:
    """Return the rules of a server without a key that listens on a host; see `LocalRules`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        found = []
    beyond = not all(is_loopback(str(address[0])) for *_, address in found)
    return LocalRules(origins, hosts, socket.gethostname(), beyond)


def bound(host: str, port: int) -> list[socket.socket]:
    """Bind a port on every address of a host; connections are refused until the sockets listen.

    Raises:
        OSError: the port is in use, or the host is not an address of this machine.
    """
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
            # With port 0, all addresses get the free port of the first.
            where = (address[0], found[0].getsockname()[1] if found else port, *address[2:])
            try:
                found.append(socket.socket(family, kind, protocol))
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT and family == socket.AF_INET6:
                    # The machine has no IPv6; its other addresses are enough.
                    continue
                raise
            if os.name == "posix":
                # On Windows this option lets two programs bind the same port.
                found[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                found[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found[-1].bind(where)
    except OSError:
        for one in found:
            one.close()
        raise
    if not found:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    return found
