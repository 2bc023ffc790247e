"""Sessions of Codex over each engine: its requests, and what it has of the answers.

Their fields, items and tools are those that Codex sends; the texts are new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.codex import CodexError, Reply, answering, read, sent_back

pytestmark = pytest.mark.slow

R = "/v1/responses"
FILE = Path(__file__).parents[2] / "conformance" / "sessions" / "responses-codex.json"
SESSIONS: dict[str, Any] = json.loads(FILE.read_text())["sessions"]
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")


def written(turn: Mapping[str, Any]) -> str:
    """Return the answer of the model in a turn."""
    text = f"<think>{turn['thought']}</think>{turn.get('text', '')}"
    for call in turn["calls"]:
        arguments = {"input": call["input"]} if "input" in call else call["arguments"]
        shown = json.dumps({"name": call["name"], "arguments": arguments})
        text += f"\n<tool_call>\n{shown}\n</tool_call>"
    return text


def scripts_of(session: Mapping[str, Any]) -> dict[str, str]:
    """Return the answers of the model, by the number of results that it has seen."""
    found, results = {}, 0
    for turn in session["turns"]:
        results += sum(item["type"] == "function_call_output" for item in turn["input"])
        assert str(results) not in found
        found[str(results)] = written(turn)
        results += len(turn["outputs"])
    return found


def check(reply: Reply, turn: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Check that Codex has the thought, the text and the calls of a turn, and the usage."""
    thought, *items = reply.items
    assert [one["text"] for one in thought["content"]] == [turn["thought"]]
    summarised = "summary" in model["reasoning"]
    assert [one["text"] for one in thought["summary"]] == [turn["thought"]] * summarised
    assert thought["encrypted_content"].startswith("latimer")
    assert reply.deltas["response.reasoning_text.delta"] == turn["thought"]
    if "text" in turn:
        message = items.pop(0)
        assert [part["text"] for part in message["content"]] == [turn["text"]]
        assert reply.deltas["response.output_text.delta"] == turn["text"]
    for call, item in zip(turn["calls"], items, strict=True):
        namespace = item.get("namespace")
        assert call["name"] == (f"{namespace}__{item['name']}" if namespace else item["name"])
        if "input" in call:
            assert item["type"] == "custom_tool_call"
            deltas = reply.deltas["response.custom_tool_call_input.delta"]
            assert item["input"] == deltas == call["input"]
        else:
            assert item["type"] == "function_call"
            assert json.loads(item["arguments"]) == call["arguments"]
    assert reply.completed is not None
    usage = reply.completed.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def results_of(items: list[dict[str, Any]], outputs: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of calls as Codex sends them."""
    calls = [item for item in items if item["type"].endswith("_call")]
    for number, (item, output) in enumerate(zip(calls, outputs, strict=True)):
        own = {"id": f"fco_01a20757-3270-7f91-ad17-{number:012d}", "output": output}
        yield {"type": f"{item['type']}_output", "call_id": item["call_id"], **own}


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_session(engine: str, name: str, tmp_path: Path) -> None:
    """Codex has every call, sends results and reasoning back, and gets the next step."""
    session = SESSIONS[name]
    items: list[Any] = []
    ignored = set(session["ignored"])
    inexact = {"reasoning.summary"} if "summary" in session["request"]["reasoning"] else set()
    async with answering(engine, scripts_of(session), tmp_path) as client:
        for turn in session["turns"]:
            ignored |= {f"input[{len(items) + at}]" for at in turn.get("ignored_input", ())}
            items += turn["input"]
            answer = await client.post(R, json={**session["request"], "input": items})
            assert answer.status_code == 200, answer.text
            assert set(answer.headers["x-latimer-ignored"].split(", ")) == ignored
            listed = answer.headers.get("x-latimer-inexact", "").split(", ")
            assert {*listed} - {""} == inexact
            reply = read(answer.text)
            check(reply, turn, session["request"])
            items += map(sent_back, reply.items)
            items += results_of(reply.items, turn["outputs"])


async def test_a_limit_is_an_error(tmp_path: Path) -> None:
    """Codex ends the turn with the reason if the limit cuts the answer off."""
    session = SESSIONS["a model of one's own"]
    async with answering("koboldcpp", scripts_of(session), tmp_path) as client:
        body = {**session["request"], "input": session["turns"][0]["input"]}
        answer = await client.post(R, json={**body, "max_output_tokens": 16})
        with pytest.raises(CodexError, match="max_output_tokens"):
            read(answer.text)


def stream(*events: Mapping[str, Any]) -> str:
    """Return events as a stream has them."""
    return "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "call_1"}
DONE = {"type": "response.output_item.done", "item": CALL}
COUNTS = {"input_tokens_details": {}, "output_tokens_details": {}, "total_tokens": 2}
USAGE = {"input_tokens": 1, "output_tokens": 1, **COUNTS}
END = {"type": "response.completed", "response": {"id": "resp_1", "usage": USAGE}}
DELTA = {"type": "response.output_text.delta", "delta": "a"}


@pytest.mark.parametrize(
    "events",
    [
        (DONE,),
        ({**DONE, "item": {**CALL, "arguments": {}}}, END),
        ({**DONE, "item": {**CALL, "call_id": None}}, END),
        ({**DONE, "item": {"type": "reasoning"}}, END),
        (DELTA, END),
        ({"type": "response.created", "response": []}, END),
        ({**END, "response": {"usage": USAGE}},),
        ({**END, "response": {"id": "resp_1", "usage": None}},),
        ({"type": "error", "message": "x"}, END),
        ({"type": "response.failed", "response": {"error": {"code": "server_error"}}},),
    ],
)
def test_codex_refuses_what_its_source_refuses(events: Any) -> None:
    """A stream that Codex's parser does not take is an error here, too."""
    assert read(stream({"type": "new", "delta": {}}, DONE, END)).items == [CALL]
    with pytest.raises(CodexError):
        read(stream(*events))
