"""Recorded sessions of clients of Anthropic's API, replayed over each engine.

The requests are those of the programs, with short texts. Ids and signatures are placeholders for
those of the answers: `<call 0.1>` is the id of the second call of the first answer, and
`<signature 0>` belongs to its reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.codex import answering

from .test_output import accumulated

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "sessions" / "messages"
SESSIONS: dict[str, Any] = {
    f"{path.stem}, {name}": session
    for path in sorted(FOLDER.glob("*.json"))
    for name, session in json.loads(path.read_text())["sessions"].items()
}
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")
_PLACEHOLDER = re.compile(r"<(?:call \d+\.\d+|signature \d+)>")


def written(answer: Mapping[str, Any]) -> str:
    """Return what the model writes for an answer."""
    text = f"<think>{answer['thought']}</think>{answer.get('text', '')}"
    for call in answer.get("calls", ()):
        text += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return text


def scripts_of(session: Mapping[str, Any]) -> dict[str, str]:
    """Return the answers of the model, by the number of results that it has seen."""
    found: dict[str, str] = {}
    for turn in session["turns"]:
        if "answer" not in turn:
            continue
        body, text = turn["body"], written(turn["answer"])
        blocks = [one for message in body["messages"] for one in message["content"]
                  if not isinstance(one, str)]  # fmt: skip
        results = sum(block["type"] == "tool_result" for block in blocks)
        step = str(results) if body.get("tools") else "N"
        assert found.setdefault(step, text) == text
    return found


def filled(value: Any, known: Mapping[str, str]) -> Any:
    """Return a request with the ids and signatures of the answers."""
    return json.loads(_PLACEHOLDER.sub(lambda match: known[match[0]], json.dumps(value)))


def check(message: Mapping[str, Any], answer: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Check that a client has the thought, the text and the calls of an answer."""
    blocks: Sequence[Any] = message["content"]
    if blocks[0]["type"] == "thinking":
        thought, *blocks = blocks
        is_omitted = body.get("thinking", {}).get("display") == "omitted"
        assert thought["thinking"] == ("" if is_omitted else answer["thought"])
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    assert texts == ([answer["text"]] if answer.get("text") else [])
    calls = [block for block in blocks if block["type"] == "tool_use"]
    found = [{"name": one["name"], "arguments": one["input"]} for one in calls]
    assert found == answer.get("calls", [])
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
    assert message["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("name", SESSIONS)
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_session(engine: str, name: str, tmp_path: Path) -> None:
    """The client gets each answer, its calls and its reasoning, and is refused nothing."""
    session = SESSIONS[name]
    known: dict[str, str] = {}
    async with answering(engine, scripts_of(session), tmp_path) as client:
        for number, turn in enumerate(session["turns"]):
            headers = {**session["headers"], **turn.get("headers", {})}
            body = filled(turn["body"], known)
            reply = await client.post(turn["path"], json=body, headers=headers)
            assert reply.status_code == turn.get("status", 200), reply.text
            listed = reply.headers.get("x-latimer-ignored", "")
            assert listed == ", ".join(turn.get("ignored", ())), number
            assert "x-latimer-inexact" not in reply.headers
            if "answer" not in turn:
                # A count, or a thread that the client replaces by the whole conversation.
                told = reply.json()
                assert "input_tokens" in told or "details" in told["error"]
                continue
            message = accumulated(events_in(reply.text)) if body.get("stream") else reply.json()
            check(message, turn["answer"], body)
            calls = [block for block in message["content"] if block["type"] == "tool_use"]
            known |= {f"<call {number}.{at}>": one["id"] for at, one in enumerate(calls)}
            thoughts = [block for block in message["content"] if block["type"] == "thinking"]
            known |= {f"<signature {number}>": block["signature"] for block in thoughts}


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]
