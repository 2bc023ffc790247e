"""Tests that logs show an end user's hash, and never the name."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.errors import in_log
from latimer.adapter.validation import end_user_of
from support.clients import client_of
from support.engines.echo import Echo

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}
COMPLETION = {"model": "m", "prompt": "Hello."}
NAME = "alice@example.org"


async def logged(caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]) -> str:
    """Send a request that fails, and return what is logged."""
    caplog.clear()
    app = OpenAIAdapter(Echo(error=RuntimeError("a fault")), any_model=True)
    async with client_of(app) as client:
        assert (await client.post(path, json=body)).status_code == 500
    return caplog.text


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/chat/completions", CHAT, {"user": NAME}),
        ("/v1/chat/completions", CHAT, {"safety_identifier": NAME}),
        ("/v1/chat/completions", CHAT, {"safety_identifier": NAME, "user": "another"}),
        ("/v1/chat/completions", CHAT, {"safety_identifier": None, "user": NAME}),
        ("/v1/chat/completions", CHAT, {"user": NAME, "stream": True, "n_predict": 5}),
        ("/v1/completions", COMPLETION, {"user": NAME}),
    ],
)
async def test_a_failure_is_logged_with_the_users_hash(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    """The log of an unexpected error has the hash of the user, and no name."""
    text = await logged(caplog, path, {**body, **fields})
    assert re.search(rf"request req_\w+ of user {in_log(NAME)} failed\n", text)
    assert NAME not in text
    assert "another" not in text


@pytest.mark.parametrize("fields", [{}, {"user": None}, {"user": ""}])
async def test_a_failure_without_a_user(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    """The log of an unexpected error has no user if the request names none."""
    text = await logged(caplog, "/v1/chat/completions", {**CHAT, **fields})
    assert re.search(r"request req_\w+ failed\n", text)


def test_a_hash_is_of_one_user_and_one_process() -> None:
    """A user has the same hash in one process, and another in every other process."""
    assert re.fullmatch("[0-9a-f]{12}", in_log(NAME))
    assert in_log(NAME) == in_log(NAME)
    assert len({in_log(name) for name in (NAME, "bob", "", "\ud800", "é")}) == 5
    code = f"from latimer.adapter.errors import in_log; print(in_log({NAME!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert re.fullmatch("[0-9a-f]{12}", other.stdout.decode().strip())
    assert other.stdout.decode().strip() != in_log(NAME)


@pytest.mark.parametrize("body", [{}, {"user": 5}, {"user": ["a"]}, {"safety_identifier": ""}])
def test_other_bodies_name_nobody(body: dict[str, Any]) -> None:
    """A body without such a text names no user."""
    assert end_user_of(body) == ""
