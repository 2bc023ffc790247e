"""The chunks of a streamed response."""

from __future__ import annotations

import json
from typing import Any

import httpx2


def chunks_in(reply: httpx2.Response) -> list[Any]:
    """Return the chunks of a stream, and check that it is complete and ends with `[DONE]`."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
