"""Tests of responses in the background of servers with one durable store, and of their ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.servers import command
from support.workers import double, workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")

R = "/v1/responses"
BODY: dict[str, Any] = {
    "model": "fake", "input": "paced", "background": True, "max_output_tokens": 1_000,
    "metadata": {"a": "b"},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Return the address of an engine that takes long."""
    with double() as address:
        yield address


def made(address: str) -> str:
    """Create a response in the background, and return its path."""
    reply = httpx2.post(f"{address}{R}", json=BODY)
    assert reply.status_code == 200, reply.text
    return f"{R}/{reply.json()['id']}"


def found(address: str, path: str) -> dict[str, Any]:
    """Return a response."""
    reply = httpx2.get(f"{address}{path}")
    assert reply.status_code == 200, reply.text
    one: dict[str, Any] = reply.json()
    return one


def test_a_response_of_a_killed_server_fails(engine: str, tmp_path: Path) -> None:
    """Another server, and the next one, say at once that it failed, and why."""
    options = engine, "--store", str(tmp_path / "store.db")
    with command(*options) as (_, other):
        with command(*options) as (process, address):
            path = made(address)
            assert found(other, path)["status"] in ("queued", "in_progress")
            process.kill()
            process.wait()
        failed = found(other, path)
        with command(*options) as (_, address):
            assert found(address, path) == failed
    assert (failed["status"], failed["metadata"]) == ("failed", {"a": "b"})
    assert failed["error"] == {
        "code": "server_error",
        "message": "The process that generated the response was killed. Send the request again.",
    }
    assert [one.name for one in tmp_path.glob("*-run-*")] == []


def test_another_server_cancels_a_response(engine: str, tmp_path: Path) -> None:
    """Also a response of a worker is cancelled, or deleted, through another server."""
    options = engine, "--store", str(tmp_path / "store.db")
    with workers(*options) as server, command(*options) as (_, other):
        path, second = made(server.address), made(server.address)
        began = time.monotonic()
        reply = httpx2.post(f"{other}{path}/cancel", timeout=20)
        assert (reply.status_code, reply.json()["status"]) == (200, "cancelled"), reply.text
        assert httpx2.delete(f"{other}{second}", timeout=20).json()["deleted"] is True
        assert time.monotonic() - began < 10
        for address in (server.address, other):
            assert found(address, path)["status"] == "cancelled"
            assert httpx2.get(f"{address}{second}").status_code == 404
