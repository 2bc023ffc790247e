"""Recorded requests of programs that run in an editor or a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

RECORDED = Path(__file__).parent / "recorded"
REQUESTS = [
    one for name in ("continue", "sillytavern")
    for one in json.loads((RECORDED / f"{name}.json").read_text())
]  # fmt: skip
COMPLETIONS = [one for one in REQUESTS if one["path"] == "/v1/completions"]
PARIS = "The capital of France is Paris."


async def choices_of(scorer: httpx2.AsyncClient, request: dict[str, Any]) -> list[Any]:
    """Return the choices of a stream's chunks."""
    reply = await scorer.post(request["path"], json=request["body"])
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: one["name"])
async def test_a_request_is_served(scorer: httpx2.AsyncClient, request_: dict[str, Any]) -> None:
    """The stream has no stop sequence in its text, and a reason at its end."""
    choices = await choices_of(scorer, request_)
    text = "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)
    assert not [stop for stop in request_["body"]["stop"] if stop in text]
    assert choices[-1]["finish_reason"] in ("stop", "length")
    if "capital of France" in json.dumps(request_["body"]):
        assert PARIS in text


@pytest.mark.parametrize(
    "request_",
    [one for one in COMPLETIONS if "logprobs" in one["body"]],
    ids=lambda one: one["name"],
)
async def test_token_probabilities(scorer: httpx2.AsyncClient, request_: dict[str, Any]) -> None:
    """The first token of each chunk has as many candidates as the program shows."""
    wanted = request_["body"]["logprobs"]
    chunks = [one for one in await choices_of(scorer, request_) if one["text"]]
    tops = [one["logprobs"]["top_logprobs"][0] for one in chunks]
    assert tops
    assert all(wanted <= len(top) <= wanted + 1 for top in tops)
