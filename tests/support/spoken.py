"""Requests for spoken answers, and what their streams add up to."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx2

PATH = "/v1/chat/completions"
TEXT = "One is first. Two is next! Three ends it"
SENTENCES = ("One is first.", "Two is next!", "Three ends it")
SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "low", "format": "wav"},
}
STREAMED: dict[str, Any] = {
    **SPOKEN,
    "audio": {"voice": "low", "format": "pcm16"},
    "stream": True,
}


def asked(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    """Return a request for a text, which Echo repeats."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def events(reply: httpx2.Response) -> list[Any]:
    """Return the chunks of a stream; the last event must be `[DONE]`."""
    *chunks, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), reply.text
    return [json.loads(one.removeprefix("data: ")) for one in chunks if not one.startswith(":")]


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return what the deltas of a choice add up to; each part of `data` must decode by itself."""
    found: dict[str, Any] = {"transcript": "", "data": b""}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            if choice["index"] == index:
                _add(found, choice)
    return found


def _add(found: dict[str, Any], choice: Any) -> None:
    assert "content" not in choice["delta"]
    audio = choice["delta"].get("audio", {})
    found["transcript"] += audio.get("transcript", "")
    part = base64.b64decode(audio.get("data", ""), validate=True)
    assert len(part) % 2 == 0
    found["data"] += part
    found |= {name: audio[name] for name in ("id", "expires_at") if name in audio}
    if choice["finish_reason"]:
        found["finish_reason"] = choice["finish_reason"]
