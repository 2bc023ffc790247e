"""Tests of the sockets that `latimer serve` listens on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from latimer.adapter.cli import listener, server
from latimer.adapter.cli.listener import bound
from latimer.adapter.cli.server import Acceptor

CLIENTS = 64
BOUND = listener._bound


async def turns() -> int:
    """Return the turns of the event loop in which the clients that wait are accepted."""
    listening = bound("127.0.0.1", 0)[0]
    listening.listen(CLIENTS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening)
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(listening.getsockname()))
        accepted: list[socket.socket] = []
        acceptor = Acceptor(listening, accepted.append)
        count = 0
        while len(accepted) < CLIENTS:
            await asyncio.sleep(0)
            count += 1
        for one in accepted:
            one.close()
        acceptor.close()
    return count


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_burst_of_clients_waits_for_few_turns(
    run: Callable[[Coroutine[Any, Any, int]], int],
) -> None:
    """Clients that connect at once are accepted in the same turns, not one in each turn."""
    assert run(turns()) < 8


def only_ipv4(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    """Bind a socket on a machine without IPv6."""
    if family == socket.AF_INET6:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    return BOUND(family, kind, protocol, address)


def test_a_host_without_ipv6_needs_no_address_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name with an IPv6 address, such as `localhost`, is served where IPv6 is switched off. An
    address that this machine does not have is an error, or a line if the name has another one."""
    kind = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found: list[Any] = [(socket.AF_INET6, *kind, ("2001:db8::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(OSError, match=r"Cannot assign|Can't assign|not supported"):
        bound("localhost", 0)
    found.append((socket.AF_INET, *kind, ("127.0.0.1", 0)))
    for address, line in (
        ("2001:db8::1", "llm.example is 2001:db8::1, too, where Latimer cannot listen"),
        ("::1", ""),
    ):
        found[0] = (socket.AF_INET6, *kind, (address, 0, 0, 0))
        monkeypatch.setattr(listener, "_bound", only_ipv4)
        (one,) = bound("llm.example", 0)
        assert one.getsockname()[0] == "127.0.0.1"
        one.close()
        said = capsys.readouterr().err
        assert line in said
        assert bool(said) is bool(line)


class Short(socket.socket):
    """A socket of a process that may open no file at first."""

    fails = 1

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; fail the first time."""
        if Short.fails:
            Short.fails -= 1
            raise OSError(24, "Too many open files")
        return super().accept()


async def test_a_client_waits_while_the_process_has_no_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a file for a connection, the client waits, and the event loop does not spin. The log
    says so."""
    monkeypatch.setattr(server, "_SHORTAGE", 0.05)
    accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
    with Short() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        acceptor = Acceptor(listening, accepted.put_nowait)
        with socket.create_connection(listening.getsockname()):
            async with asyncio.timeout(5):
                (await accepted.get()).close()
        acceptor.close()
        assert not Short.fails
    assert "too many open files" in caplog.text


async def test_connections_leave_files_to_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With few files left, connections are accepted one by one with a pause, and those that wait at
    the end at once."""
    monkeypatch.setattr(server, "_SHORTAGE", 0.2)
    monkeypatch.setattr(server, "most_files", lambda: 0)
    accepted: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(bound("127.0.0.1", 0)[0])
        listening.listen()
        for _ in range(5):
            stack.enter_context(socket.create_connection(listening.getsockname()))
        acceptor = Acceptor(listening, accepted.append)
        async with asyncio.timeout(5):
            while len(accepted) < 2:
                await asyncio.sleep(0.01)
        assert len(accepted) == 2
        acceptor.close()
        assert len(accepted) == 5
        for one in accepted:
            one.close()
    assert caplog.text.count("too many open files") == 1


def test_few_files_are_left_to_engines() -> None:
    """Connections leave an eighth of all files, and 64 at most."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, most in ((160, 140), (1024, 960)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, usual[1]))
            assert server.most_files() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
