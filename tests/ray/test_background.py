"""Tests of stored responses, and of responses in the background, over two replicas."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx2
import pytest
from latimer.adapter.responses.items import mark_of
from support.ray_server import (
    LONG,
    QUESTION,
    created,
    is_idle,
    leave,
    note,
    replica_of,
    replicas,
    session_of_each,
    until,
)

pytestmark = pytest.mark.timeout(200)

SHORT = {"model": "demo", "input": "What is the capital of France?", "max_output_tokens": 16}
# Many seconds of work, if nobody ends it.
ENDLESS = {
    "model": "demo",
    "input": "One",
    "max_output_tokens": 1500,
    "ignore_eos": True,
    "background": True,
}


def one_of_each(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Create responses until each of two replicas has made one; return them by their marks."""
    found: dict[str, Any] = {}
    for number in range(40):
        made = created(url, body, **{"x-session-id": f"session-{number}"})
        found.setdefault(mark_of(made["id"]), made)
        if len(found) == 2:
            return found
    pytest.fail("one replica has made all responses")


def test_a_response_is_continued_by_the_other_replica(url: str, shared: str) -> None:
    """Each replica reads what the other has stored, and what is deleted is gone for both."""
    before = one_of_each(url, SHORT)
    for mark, made in before.items():
        assert httpx2.get(f"{url}/responses/{made['id']}").json() == made
        body = {**SHORT, "previous_response_id": made["id"]}
        continued = one_of_each(url, body)
        assert {*continued} == {*before}
        other = next(one for key, one in continued.items() if key != mark)
        assert other["previous_response_id"] == made["id"]
        assert other["usage"]["input_tokens"] > made["usage"]["input_tokens"]
        assert httpx2.delete(f"{url}/responses/{made['id']}").json()["deleted"]
        for number in range(20):
            headers = {"x-session-id": f"session-{number}"}
            reply = httpx2.post(f"{url}/responses", json=body, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (
                400,
                "previous_response_not_found",
            )


def test_a_completion_is_found_by_both_replicas(url: str, shared: str) -> None:
    """A stored completion is found and deleted at once, whichever replica gets the request."""
    for number in range(10):
        body = {**QUESTION, "store": True, "metadata": {"number": str(number)}}
        made = httpx2.post(f"{url}/chat/completions", json=body, timeout=30).json()
        path = f"{url}/chat/completions/{made['id']}"
        for _ in range(4):
            reply = httpx2.get(path)
            assert reply.status_code == 200, reply.text
        assert httpx2.delete(path).status_code == 200
        for _ in range(4):
            assert httpx2.get(path).status_code == 404


def test_a_background_response_is_found(url: str) -> None:
    """Requests for a response without a session reach its replica: its stream, its cancel."""
    sessions = [*session_of_each(url).values()]
    for made in one_of_each(url, ENDLESS).values():
        path = f"{url}/responses/{made['id']}"
        for _ in range(10):
            assert httpx2.get(path).json()["status"] in ("queued", "in_progress")
        with httpx2.stream("GET", f"{path}?stream=true", timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            begun = time.monotonic()
            cancelled = httpx2.post(f"{path}/cancel").json()
            took = time.monotonic() - begun
            assert cancelled["status"] == "cancelled"
            # The stream ends, too.
            for _ in lines:
                pass
        note(f"cancel of a background response: {took * 1000:.0f} ms")
        for _ in range(4):
            assert httpx2.get(path).json()["status"] == "cancelled"
        assert httpx2.delete(path).status_code == 200
        assert httpx2.get(path).status_code == 404
    # What `one_of_each` has made besides is idle, too, after its work.
    until(lambda: is_idle(url, sessions), 120)


def test_a_background_response_fails_with_its_replica(url: str, shared: str) -> None:
    """After `kill -9` of its replica, a response is `failed`, with the reason, within 15 s."""
    sessions = [*session_of_each(url).values()]
    until(lambda: is_idle(url, sessions), 60)
    made = created(url, ENDLESS)
    path = f"{url}/responses/{made['id']}"
    victim = replica_of(made["id"])
    until(lambda: httpx2.get(path, timeout=30).json()["status"] == "in_progress", 60)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    seen = []
    while True:
        reply = httpx2.get(path, timeout=30)
        seen.append(reply.json()["status"] if reply.status_code == 200 else reply.status_code)
        if seen[-1] == "failed":
            break
        assert time.monotonic() - killed < 15, seen
        time.sleep(0.1)
    took = time.monotonic() - killed
    assert "was killed" in reply.json()["error"]["message"]
    assert httpx2.post(f"{path}/cancel").json()["status"] == "failed"
    assert httpx2.get(path).json()["status"] == "failed"
    back = until(lambda: len(replicas() - {victim}) == 2, 60)
    note(
        f"background response of a killed replica: failed after {took:.1f} s, before it {seen[:-1]}"
    )
    note(f"the next process of the replica after {took + back:.0f} s")
    until(lambda: httpx2.get(f"{url}/models", timeout=10).status_code == 200, 30)
    leave(f"{url}/completions", LONG, 0.2)
