"""Tests of threads that the end of the process does not wait for."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from latimer.adapter.daemon_threads import DaemonThreads

TESTS = Path(__file__).parents[1]


def test_calls_have_their_results() -> None:
    """A future has the result of its call, or the error that it raised."""
    threads = DaemonThreads(2, "some")
    assert threads.submit(int, "7", base=8).result(10) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        threads.submit(int, "x").result(10)
    threads.shutdown()


def test_calls_share_few_threads() -> None:
    """No more calls run at once than there are threads, and one that is cancelled never runs."""
    threads, gate = DaemonThreads(2, "some"), threading.Event()
    begun: list[str] = []

    def wait(name: str) -> str:
        begun.append(name)
        gate.wait(10)
        return threading.current_thread().name

    calls = [threads.submit(wait, name) for name in "abcd"]
    time.sleep(0.1)
    assert sorted(begun) == ["a", "b"]
    assert calls[2].cancel()
    gate.set()
    found = {calls[place].result(10) for place in (0, 1, 3)}
    assert found == {"some_1", "some_2"}
    assert begun[2:] == ["d"]
    threads.shutdown()


def test_threads_end() -> None:
    """After the end, calls that wait still run, another is refused, and no thread is left."""
    threads, gate = DaemonThreads(1, "some"), threading.Event()
    first, second = threads.submit(gate.wait, 10), threads.submit(threading.current_thread)
    threads.shutdown()
    with pytest.raises(RuntimeError, match="have ended"):
        threads.submit(int)
    gate.set()
    assert first.result(10)
    thread = second.result(10)
    thread.join(10)
    assert not thread.is_alive()


# Ends while two threads wait for the first word of a database, for a minute.
ENDS = """
import asyncio, sys
from latimer.adapter.limits import postgresql
from latimer.adapter.store import database
from support.stored import store_at

postgresql._CONNECT_SECONDS = database.CONNECT_SECONDS = 60


async def main(url):
    both = store_at(url), postgresql.PostgresLimits(url)
    opening = [asyncio.create_task(one.open()) for one in both]
    await asyncio.sleep(0.5)
    for one, task in zip(both, opening):
        task.cancel()
        await one.aclose()


asyncio.run(main(*sys.argv[1:]))
"""


def test_the_end_waits_for_no_database() -> None:
    """A process ends soon although its store and that of its limits wait for a connection."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/kept"
        command = [sys.executable, "-c", ENDS, url]
        assert subprocess.run(command, cwd=TESTS, timeout=20, check=False).returncode == 0
