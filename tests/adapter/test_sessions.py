"""Recorded sessions of coding agents, replayed over all published templates and more.

koboldcpp, whose fake computes nothing, gets every session with every template. The real engines get
one template of each format once, and the last request of a session; with `LATIMER_FULL=1` all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.chat.profile import TemplateProfile, detect_profile
from latimer.adapter.chat.templates import render
from latimer.backends.base import Model
from support.clients import adapting
from support.engines.koboldcpp import koboldcpp
from support.replies import chunks_in
from support.samples import ALIKE, FULL
from support.scripted import scripted_engine
from support.strict_templates import ASKED, OMITTING, ONE_CALL

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SESSIONS: dict[str, Any] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((TESTS / "conformance" / "sessions").glob("*.json"))
    # Those of other endpoints have their names before the agent's.
    if not path.stem.startswith(("messages-", "responses-"))
}
PUBLISHED = {path.stem: path.read_text() for path in sorted((TESTS / "templates").glob("*.jinja"))}
TEMPLATES = {**PUBLISHED, "asked": ASKED, "omitting": OMITTING, "one call": ONE_CALL}
# Each published template with a session that has tools.
WITH_TOOLS = [name for name, one in SESSIONS.items() if one["call"]["name"]]
PAIRS = (
    list(product(PUBLISHED, SESSIONS))
    if FULL
    else [
        pair
        for pair in zip(PUBLISHED, cycle(reversed(WITH_TOOLS)), strict=False)
        if pair[0] not in ALIKE
    ]
)


class Family:
    """A template, and the text of a call by a model with it."""

    def __init__(self, name: str) -> None:
        self.template = TEMPLATES[name]
        self._model = Model("m", 100, self.template, "<s>", "</s>", False, "fp", 0)
        self.manner: TemplateProfile = detect_profile(self._model)

    @property
    def prompt(self) -> str:
        """A prompt of one message."""
        messages = [{"role": "user", "content": "Hi"}]
        return render(self._model, {"messages": messages, "variables": {}})

    def script(self, call: Mapping[str, Any]) -> list[str]:
        """Return the pieces of an answer with a call."""
        form = self.manner.style.form
        name, arguments = call["name"], call["arguments"]
        if not name:
            text = "Done."
        elif form.title == "harmony":
            text = f"<|channel|>commentary to=functions.{name} <|message|>{json.dumps(arguments)}"
        else:
            text = form.render([(name, arguments)])
        tags = self.manner.tags
        is_open = tags is not None and self.prompt.rstrip().endswith(tags.begin)
        half = len(text) // 2
        return [*([tags.end] if tags is not None and is_open else []), text[:half], text[half:]]


def calls_in(reply: httpx2.Response, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the calls of a response or of a stream."""
    if not body.get("stream"):
        message = reply.json()["choices"][0]["message"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"], json.loads(call["function"]["arguments"])
        return
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_in(reply) if chunk["choices"]]
    parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
    if parts:
        arguments = "".join(part["function"].get("arguments", "") for part in parts)
        yield parts[0]["function"]["name"], json.loads(arguments)


async def replay(
    client: httpx2.AsyncClient, session: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]
) -> None:
    """Send the requests of a session, and check each answer, or its call if it has tools."""
    call = session["call"]
    for number, request in enumerate(requests):
        # Room for a call in any format, in the tokens of small models.
        body = {"model": "m", **request, "max_tokens": 500}
        reply = await client.post("/v1/chat/completions", json=body)
        where = f"{session['client']} {number}: {reply.text}"
        assert reply.status_code == 200, where
        assert "error" not in reply.text[:20], where
        assert reply.headers.get("x-latimer-inexact", "messages") == "messages", where
        if request.get("tools"):
            assert list(calls_in(reply, body)) == [(call["name"], call["arguments"])], where


@pytest.mark.parametrize("name", TEMPLATES)
async def test_sessions_over_koboldcpp(name: str) -> None:
    """Every request of every session gets the right call, with the template of each family."""
    family = Family(name)
    async with koboldcpp(family.template, "") as (fake, backend), adapting(backend) as client:
        for session in SESSIONS.values():
            fake.script = "".join(family.script(session["call"]))
            await replay(client, session, session["requests"])


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
@pytest.mark.parametrize(("name", "client_name"), PAIRS, ids=[" ".join(pair) for pair in PAIRS])
async def test_sessions_over_real_engines(
    name: str, client_name: str, engine: str, tmp_path: Path
) -> None:
    """A session gets the right calls from a real engine, with the template of each family."""
    family, session = Family(name), SESSIONS[client_name]
    engine_with = scripted_engine(
        engine,
        tmp_path,
        family.script(session["call"]),
        family.template,
        # DeepSeek's template ends the prompt with a tool result, if that is the last message.
        after=family.prompt[-1] + (">" if "tool▁outputs▁end" in family.template else ""),
        slots=1,
        context=16_384,
    )
    async with engine_with as backend, adapting(backend) as client:
        await replay(client, session, session["requests"][0 if FULL else -1 :])
