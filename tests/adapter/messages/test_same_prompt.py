"""Tests that a conversation has the same prompt in chat and in Messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..responses.test_same_prompt import MESSAGES, TEMPLATES, prompt_of
from .requests import read

words = st.text("ab \n<é", min_size=1, max_size=8).filter(lambda text: text == text.rstrip())
calls = st.lists(st.tuples(st.sampled_from(("f", "g")), words), max_size=3)
turns = st.tuples(st.none() | words, st.none() | words, calls).filter(
    lambda one: one[1] is not None or bool(one[2])
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages of a conversation, for chat and for Messages."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": draw(words)}]
    ours: list[dict[str, Any]] = [dict(chat[0])]
    for number in range(draw(st.integers(0, 4))):
        thought, text, called = draw(turns)
        names = [f"toolu_{number}{place}abcdef" for place in range(len(called))]
        said: dict[str, Any] = {"role": "assistant", "content": text or ""}
        blocks: list[dict[str, Any]] = []
        if thought is not None:
            said["reasoning_content"] = thought
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if text is not None:
            blocks.append({"type": "text", "text": text})
        if called:
            given_ = [(name, {"a": value}) for name, value in called]
            said["tool_calls"] = [
                {"id": id_, "type": "function",
                 "function": {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}}
                for id_, (name, value) in zip(names, given_, strict=True)
            ]  # fmt: skip
            blocks += [
                {"type": "tool_use", "id": id_, "name": name, "input": value}
                for id_, (name, value) in zip(names, given_, strict=True)
            ]
        chat.append(said)
        ours.append({"role": "assistant", "content": blocks})
        results = [draw(words) for _ in called]
        chat += [
            {"role": "tool", "tool_call_id": id_, "content": result}
            for id_, result in zip(names, results, strict=True)
        ]
        asked = draw(words)
        chat.append({"role": "user", "content": asked})
        answers = [
            {"type": "tool_result", "tool_use_id": id_, "content": result}
            for id_, result in zip(names, results, strict=True)
        ]
        ours.append({"role": "user", "content": [*answers, {"type": "text", "text": asked}]})
    return chat, ours


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@given(conversations())
def test_blocks_have_the_prompt_of_messages(
    name: str, both: tuple[list[dict[str, Any]], list[dict[str, Any]]]
) -> None:
    """A conversation as blocks has the same prompt as the same messages in chat."""
    chat, ours = both
    found = prompt_of(name, read(*ours).messages)
    assert found == prompt_of(name, MESSAGES.validate_python(chat))
