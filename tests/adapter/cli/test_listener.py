"""Tests of the sockets that `latimer serve` listens on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from latimer.adapter.cli.listener import HANDLES, bound, handles
from typing_extensions import override

CLIENTS = 64


class Accepted(asyncio.Protocol):
    """A server's side of a connection, which is counted."""

    count = 0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Accepted.count += 1
        transport.close()


async def turns() -> int:
    """Return the turns of the event loop in which a server accepts the clients that wait."""
    Accepted.count = 0
    loop, found = asyncio.get_running_loop(), bound("127.0.0.1", 0)
    found[0].listen(CLIENTS)
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(found[0].getsockname()))
        servers = [await loop.create_server(Accepted, sock=one) for one in handles(found)]
        count = 0
        while Accepted.count < CLIENTS:
            await asyncio.sleep(0)
            count += 1
        for server in servers:
            server.close()
            await server.wait_closed()
    return count


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_burst_of_clients_waits_for_few_turns(
    run: Callable[[Coroutine[Any, Any, int]], int],
) -> None:
    """Of 64 clients that connect at once, several are accepted in each turn of the event loop."""
    assert run(turns()) < 2 * CLIENTS / HANDLES
