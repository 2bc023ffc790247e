"""Tests of the output items and the events that deltas add up to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.generation.choice import Delta, Kind
from latimer.adapter.generation.logprobs import Entry, to_response
from latimer.adapter.responses.items import new_response_id
from latimer.adapter.responses.output import Event, Output, ReasoningDisplay, Shape, replayed
from latimer.adapter.responses.tools import CalledTool
from latimer.backends.base import Alternative, Token
from latimer.conformance.published import event_problem
from latimer.schemas.openai.common import FinishReason

ID = new_response_id()[0]
NAMES = {
    "weather": CalledTool("weather"),
    "files__read": CalledTool("read", "files"),
    "patch": CalledTool("patch", is_custom=True),
    "box__draw": CalledTool("draw", "box", is_custom=True),
}
SAID: Sequence[tuple[Kind, str]] = [
    ("reasoning", "I need the weather, the file and a patch. é𝄞"),
    ("content", "One moment, 日本."),
    ("call", "weather"),
    ("arguments", '{"city":"Zürich"}'),
    ("call", "files__read"),
    ("arguments", '{"path":"\\u00e9"}'),
    ("call", "patch"),
    ("arguments", '{"input":"a\\n\\"b\\" \\ud834\\udd1e 𝄞"}'),
    ("call", "box__draw"),
    ("arguments", '{"input":""}'),
]


def made(
    deltas: Sequence[Delta], reason: FinishReason = "stop", shape: Shape | None = None
) -> tuple[list[dict[str, Any]], list[Event]]:
    """Return the items and the events of some deltas."""
    output = Output(ID, shape or Shape(NAMES))
    events = [event for delta in deltas for event in output.add(delta)]
    return output.items, events + output.end(reason)


def deltas_of(said: Sequence[tuple[Kind, str]], size: int = 1_000) -> list[Delta]:
    """Return deltas of at most `size` characters; each call has the id of its number."""
    found = []
    for number, (kind, text) in enumerate(said):
        if kind == "call":
            found.append(Delta(text, kind=kind, call_id=f"call_{number}"))
            continue
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found += [Delta(piece, kind=kind) for piece in pieces]
    return found


def names(events: Sequence[Event]) -> list[str]:
    """Return the types of events, each run of them once, without `response.`."""
    return [name.removeprefix("response.") for name, _ in groupby(name for name, _ in events)]


def check_events(items: Sequence[Any], events: Sequence[Event]) -> None:
    """Check that every event is valid, and that the deltas join to the items."""
    joined: dict[tuple[int, str], str] = {}
    for number, (name, fields) in enumerate(events):
        body = {"type": name, "sequence_number": number, **fields}
        assert event_problem(json.loads(json.dumps(body))) is None
        if name.endswith(".delta"):
            key = fields["output_index"], name.removesuffix(".delta")
            joined[key] = joined.get(key, "") + fields["delta"]
            assert fields["item_id"] == items[key[0]]["id"]
    wanted: dict[tuple[int, str], str] = {}
    for at, item in enumerate(items):
        for kind, text in texts_of(item):
            wanted[at, f"response.{kind}"] = text
    assert {key: text for key, text in wanted.items() if text} == joined


def texts_of(item: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the texts of an item, with the names of their events."""
    kinds = {"message": "output_text", "reasoning": "reasoning_text"}
    found = [(kinds[item["type"]], part["text"]) for part in item.get("content", ())]
    found += [("reasoning_summary_text", part["text"]) for part in item.get("summary", ())]
    fields = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}
    return found + [(name, item[key]) for key, name in fields.items() if key in item]


@pytest.mark.parametrize("thoughts", ["shown", "summarised", "hidden"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_every_split_gives_the_same_items(thoughts: ReasoningDisplay, reason: FinishReason) -> None:
    """For every split of a text, the items are the same, and the deltas join to them."""
    shape = Shape(NAMES, thoughts)
    whole, _ = made(deltas_of(SAID), reason, shape)
    for size in (1, 2, 3, 7):
        items, events = made(deltas_of(SAID, size), reason, shape)
        assert items == whole
        check_events(items, events)
    kept = [one for one in SAID if thoughts != "hidden" or one[0] != "reasoning"]
    for end in range(1, len(kept)):
        cut, events = made(deltas_of(kept[:end], 3), "length", shape)
        check_events(cut, events)
        assert {item["status"] for item in cut[:-1]} <= {"completed"}
        assert cut[-1]["status"] == "incomplete"


@given(st.data())
def test_random_splits_give_the_same_items(data: st.DataObject) -> None:
    """Any split of any text of any kinds gives the same items as one piece."""
    kinds = st.sampled_from(["content", "reasoning", "call"])
    said: list[tuple[Kind, str]] = []
    for kind in data.draw(st.lists(kinds, max_size=5)):
        if said and said[-1][0] == kind != "call":
            continue
        if kind == "call":
            said.append(("call", data.draw(st.sampled_from(sorted(NAMES)))))
            said.append(("arguments", data.draw(st.text(min_size=1, max_size=8))))
        else:
            said.append((kind, data.draw(st.text(min_size=1, max_size=8))))  # type: ignore[arg-type]
    whole, _ = made(deltas_of(said))
    items, events = made(deltas_of(said, data.draw(st.integers(1, 4))))
    assert items == whole
    check_events(items, events)


def test_items() -> None:
    """Each kind of item has the keys of the contract, and an id of its own."""
    items, _ = made(deltas_of(SAID, 5))
    ids = [item.pop("id") for item in items]
    assert len(set(ids)) == 6
    assert [name.partition("_")[0] for name in ids] == ["rs", "msg", "fc", "fc", "ctc", "ctc"]
    done = {"status": "completed"}
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": SAID[1][1]}
    thought = {"type": "reasoning_text", "text": SAID[0][1]}
    assert items == [
        {"type": "reasoning", **done, "summary": [], "content": [thought]},
        {"type": "message", **done, "content": [part], "role": "assistant"},
        {"type": "function_call", **done, "arguments": SAID[3][1], "call_id": "call_2",
         "name": "weather"},
        {"type": "function_call", **done, "arguments": SAID[5][1], "call_id": "call_4",
         "name": "read", "namespace": "files"},
        {"type": "custom_tool_call", **done, "call_id": "call_6", "input": 'a\n"b" 𝄞 𝄞',
         "name": "patch"},
        {"type": "custom_tool_call", **done, "call_id": "call_8", "input": "", "name": "draw",
         "namespace": "box"},
    ]  # fmt: skip


ADDED, DONE = "output_item.added", "output_item.done"
PART, PART_DONE = "content_part.added", "content_part.done"
TEXT = [ADDED, PART, "output_text.delta", "output_text.done", PART_DONE, DONE]
THOUGHT = [ADDED, PART, "reasoning_text.delta", "reasoning_text.done", PART_DONE, DONE]
CALL = [ADDED, "function_call_arguments.delta", "function_call_arguments.done", DONE]
CUSTOM = [ADDED, "custom_tool_call_input.delta", "custom_tool_call_input.done", DONE]


@pytest.mark.parametrize(
    ("said", "order"),
    [
        ([SAID[1]], TEXT),
        ([], [ADDED, PART, "output_text.done", PART_DONE, DONE]),
        (SAID[:2], THOUGHT + TEXT),
        ([SAID[0]], [*THOUGHT, ADDED, PART, "output_text.done", PART_DONE, DONE]),
        (SAID[2:4], CALL),
        ([("call", "weather")], [ADDED, "function_call_arguments.done", DONE]),
        (SAID[2:6], CALL + CALL),
        (SAID[1:4], TEXT + CALL),
        (SAID[6:8], CUSTOM),
        ([SAID[0], *SAID[2:4]], THOUGHT + CALL),
    ],
)
def test_order(said: Sequence[tuple[Kind, str]], order: list[str]) -> None:
    """Items follow one after another, with their events in the order of the contract."""
    items, events = made(deltas_of(said, 4))
    assert names(events) == order
    assert {item["status"] for item in items} == {"completed"}
    if not said:
        assert items[0]["content"][0]["text"] == ""


def test_order_of_a_summary() -> None:
    """A summary's events come in step with those of the reasoning."""
    _, events = made(deltas_of([("reasoning", "ab")], 1), "length", Shape(reasoning="summarised"))
    assert names(events) == [
        ADDED, PART, "reasoning_summary_part.added",
        "reasoning_text.delta", "reasoning_summary_text.delta",
        "reasoning_text.delta", "reasoning_summary_text.delta",
        "reasoning_text.done", PART_DONE,
        "reasoning_summary_text.done", "reasoning_summary_part.done", DONE,
    ]  # fmt: skip


def test_a_limit_while_the_model_reasons() -> None:
    """Reasoning that a limit cuts off is the only item, and it is incomplete."""
    items, events = made([Delta("I th", kind="reasoning"), Delta("")], "length")
    assert [(item["type"], item["status"]) for item in items] == [("reasoning", "incomplete")]
    assert names(events) == THOUGHT


def test_logprobs() -> None:
    """Each delta has the tokens that begin in it; the end and the item have all of them."""
    other = Alternative(9, b"\xff", True, -2.0)
    tokens = [
        Token(1, b"Hel", b"Hel", False, -0.5, (other,)),
        Token(2, b"lo", b"lo", False, -1.0),
        Token(3, b"", b"<end>", True, -3.0),
    ]
    entries = [Entry(token, 0) for token in tokens]
    deltas = [Delta("Hel", entries[:1]), Delta("lo", entries[1:2]), Delta("", entries[2:])]
    items, events = made(deltas, shape=Shape(show=to_response))
    shown = to_response(entries)
    assert [token["bytes"] for token in shown] == [[72, 101, 108], [108, 111], []]
    assert shown[0]["top_logprobs"][0]["bytes"] == []
    assert items[0]["content"][0]["logprobs"] == shown
    found = dict(events)
    assert found["response.output_text.done"]["logprobs"] == shown
    assert found["response.content_part.done"]["part"]["logprobs"] == shown
    assert found["response.content_part.added"]["part"]["logprobs"] == []
    deltas_shown = [fields["logprobs"] for name, fields in events if name.endswith(".delta")]
    assert deltas_shown == [shown[:1], shown[1:2], shown[2:]]


def test_tokens_of_a_cut_character_are_shown() -> None:
    """The tokens of a character that the limit cut are in the message, also in its replay."""
    token = Token(5, b"\xf0\x9f", b"\xf0\x9f", False, -0.5)
    delta = Delta("", [Entry(token, 0)])
    items, events = made([delta], "length", Shape(show=to_response))
    (part,) = items[0]["content"]
    assert (part["text"], [one["bytes"] for one in part["logprobs"]]) == ("", [[240, 159]])
    assert made([delta], "length")[0][0]["content"][0]["logprobs"] == []
    reply = {"id": ID, "status": "incomplete", "output": items}
    again = [json.loads(one.partition(b"data: ")[2]) for one in replayed(reply, -1)][2:-1]
    assert [(one["type"], one.get("logprobs"), one.get("item")) for one in again] == [
        (name, fields.get("logprobs"), fields.get("item")) for name, fields in events
    ]
