"""The cases of the compliance tests of Open Responses, in our words, and the schema of its replies.

The optional cases need a search of files or of the web, which no server of this kind has; a request
that insists on one is refused (`test_tools.py`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import adapting
from support.dialogue import TEMPLATES
from support.open_responses import event_problems, response_problems
from support.pdf_files import pdf, pdf_url
from support.projector import png, projector
from support.response_events import events_in
from support.scripted import WIDTH, scripted

R = "/v1/responses"
# The last character of a message decides the answer: text, a call, or reasoning and text.
TEXT = ("Good", " day.")
CALL = ('<tool_call>\n{"name": "get_weather",', ' "arguments": {"location": "Rome"}}\n</tool_call>')
THOUGHT = ("<think>\nPolite", " words.\n</think>\n\n", "Welcome!")
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "A town."}},
        "required": ["location"],
    },
}
PICTURE = base64.b64encode(png(200, 0, 0)).decode()


def message(content: Any, role: str = "user") -> dict[str, Any]:
    """Return a message."""
    return {"type": "message", "role": role, "content": content}


def parts(text: str, **part: str) -> list[dict[str, Any]]:
    """Return a text and another part."""
    return [{"type": "input_text", "text": text}, part]


class Case(NamedTuple):
    """A request, and the type of an item that its response must have."""

    body: Mapping[str, Any]
    stream: bool = False
    item: str = "message"


ASK = [message("What is the weather in Rome?")]
CASES = {
    "basic": Case({"input": [message("Greet me with three words.")]}),
    "streaming": Case({"input": [message("Count up to five.")]}, True),
    "system prompt": Case(
        {"input": [message("Talk like a sailor.", "system"), message("Greet me.")]}
    ),
    "tool": Case({"input": ASK, "tools": [WEATHER]}, False, "function_call"),
    "tool, streaming": Case({"input": ASK, "tools": [WEATHER]}, True, "function_call"),
    "text file": Case(
        {"input": [message(parts("Name the title.", type="input_file", filename="a.txt",
                                 file_data="data:text/plain;base64,VGl0bGU6IE9uZS4="))]}
    ),
    "file": Case(
        {"input": [message(parts("Name the title.", type="input_file", filename="a.pdf",
                                 file_data=pdf_url(pdf("Title: One."))))]}
    ),
    "several turns": Case(
        {"input": [message("I am Ada."), message("Hello, Ada.", "assistant"),
                   message("Say my name.")]}
    ),
}  # fmt: skip
IMAGE = Case(
    {"input": [message(parts("Say what this is.", type="input_image",
                             image_url=f"data:image/png;base64,{PICTURE}"))]}
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that answers by the last character of a message."""
    path = tmp_path_factory.mktemp("models") / "answering.gguf"
    others = {"?": CALL, "!": THOUGHT}
    return scripted(path, TEXT, TEMPLATES["keeping"], after=".", context=2048, others=others)


@pytest.fixture(scope="module")
async def client(model: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the scripted model."""
    async with adapting(LlamaCpp(model)) as made:
        yield made


async def created(client: httpx2.AsyncClient, case: Case) -> dict[str, Any]:
    """Return the response to a case, and check it and its events."""
    reply = await client.post(R, json={"model": "m", "stream": case.stream, **case.body})
    assert reply.status_code == 200, reply.text
    response: dict[str, Any]
    if case.stream:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = events_in(reply.text)
        assert [(one["type"], event_problems(one)) for one in events if event_problems(one)] == []
        response = events[-1]["response"]
    else:
        response = reply.json()
    assert response_problems(response) == []
    assert response["status"] == "completed"
    assert case.item in [item["type"] for item in response["output"]]
    return response


@pytest.mark.parametrize("name", CASES)
async def test_a_case(client: httpx2.AsyncClient, name: str) -> None:
    """The response to each case is complete and has the schema, and so has every event."""
    await created(client, CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.item == "message"])
async def test_a_case_with_the_demo_model(demo: httpx2.AsyncClient, name: str) -> None:
    """The demo model passes the cases that need no call."""
    case = CASES[name]
    await created(demo, case._replace(body={**case.body, "temperature": 0}))


async def test_an_image(tmp_path: Path) -> None:
    """A model that sees answers a question about an image."""
    seeing = scripted(tmp_path / "seeing.gguf", TEXT)
    async with adapting(LlamaCpp(seeing, mmproj=projector(tmp_path / "eye.gguf", WIDTH))) as client:
        await created(client, IMAGE)


async def test_the_events_of_a_call(client: httpx2.AsyncClient) -> None:
    """A streamed call has its item at the beginning and at the end, and its arguments between."""
    reply = await client.post(R, json={"model": "m", "stream": True, **CASES["tool"].body})
    events = events_in(reply.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    for kind in ("output_item.added", "output_item.done"):
        assert events[kinds.index(kind)]["item"]["type"] == "function_call"
    assert "function_call_arguments.delta" in kinds
    assert "function_call_arguments.done" in kinds


async def test_a_response_before(client: httpx2.AsyncClient) -> None:
    """A response continues another one by its id."""
    first = await created(client, Case({"input": "The word is plum. Only nod."}))
    body = {"previous_response_id": first["id"], "input": "Say the word."}
    second = await created(client, Case(body))
    assert second["previous_response_id"] == first["id"]


@pytest.mark.parametrize("by", ["scripted", "demo"])
async def test_a_call_and_its_output(
    client: httpx2.AsyncClient, demo: httpx2.AsyncClient, by: str
) -> None:
    """A call that `tool_choice` names is made, and its output alone continues the response."""
    asked = {"input": "What is the weather in Rome?", "tools": [WEATHER], "temperature": 0}
    choice = {"tool_choice": {"type": "function", "name": "get_weather"}}
    who = client if by == "scripted" else demo
    first = await created(who, Case({**asked, **choice}, item="function_call"))
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    assert isinstance(json.loads(call["arguments"])["location"], str)
    given = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees."}
    body = {"previous_response_id": first["id"], "input": [given], "temperature": 0}
    await created(who, Case(body))


OF_OPENAI = ("response.reasoning_text.delta", "response.reasoning_text.done")


async def test_the_events_of_reasoning_are_those_of_openai(client: httpx2.AsyncClient) -> None:
    """Only the names of the events of reasoning differ, as OpenAI's clients know no others."""
    body = {"model": "m", "stream": True, "input": "Greet me!"}
    events = events_in((await client.post(R, json=body)).text)
    assert {one["type"] for one in events if event_problems(one)} == {*OF_OPENAI}
    for event in events:
        known = event["type"].replace("reasoning_text", "reasoning")
        assert event_problems({**event, "type": known}) == []
    assert response_problems(events[-1]["response"]) == []


async def test_hidden_reasoning_has_no_event(model: Path) -> None:
    """Without reasoning in the output, a stream has the schema of Open Responses altogether."""
    async with adapting(LlamaCpp(model), reasoning_field=None) as client:
        body = {"input": "Greet me!"}
        response = await created(client, Case(body, True))
        assert [item["type"] for item in response["output"]] == ["message"]


async def test_the_schema_finds_what_is_missing(client: httpx2.AsyncClient) -> None:
    """A response or an event without one of its keys does not have the schema."""
    reply = await client.post(R, json={"model": "m", "stream": True, **CASES["tool"].body})
    optional = {"user", "prompt_cache_retention", "content", "logprobs", "obfuscation", "name"}
    for event in events_in(reply.text):
        for key in event.keys() - optional:
            assert event_problems({name: event[name] for name in event if name != key}) != []
        response = event.get("response", {})
        for key in response.keys() - optional:
            assert response_problems({name: response[name] for name in response if name != key})
