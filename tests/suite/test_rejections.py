"""Tests of the rejections by which a server says that it lacks a feature."""

from __future__ import annotations

import json

import httpx2
import pytest
from latimer.conformance.check import Fail, Unsupported
from latimer.conformance.target import Reply

ALLOWED = 'response_format type must be one of "text" or "json_object", but got: regex'


def reply(message: str, status: int = 400, param: str | None = None) -> Reply:
    """Return an error reply to a chat completion request with a response format."""
    error = {"code": status, "message": message, "type": "invalid_request_error", "param": param}
    body = json.dumps({"error": error}).encode()
    return Reply(status, httpx2.Headers(), body, "/chat/completions", {"response_format": {}})


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (ALLOWED, None),
        ("response_format is not supported", None),
        ("wrong", "response_format.type"),
    ],
)
def test_a_rejection_names_the_field(message: str, param: str | None) -> None:
    """A 400 that names a field of the request as param, or says what is allowed, is clean."""
    with pytest.raises(Unsupported):
        reply(message, param=param).ok()


@pytest.mark.parametrize(
    ("message", "status"),
    [("regex must be one of", 400), ("bad response_format", 400), (ALLOWED, 500)],
)
def test_other_errors_are_failures(message: str, status: int) -> None:
    """An error that names no field, or says nothing about support, or is a 500, is a failure."""
    with pytest.raises(Fail):
        reply(message, status).ok()
