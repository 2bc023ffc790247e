"""Tests that a conversation has the same prompt, whether it comes as messages or as items."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.chat.conversation import turns_of
from latimer.adapter.chat.folding import fold
from latimer.adapter.chat.profile import TemplateProfile, detect_profile
from latimer.adapter.chat.templates import render
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.responses.input import conversation_of
from latimer.backends.base import Model
from latimer.schemas.openai.messages import Function, Message
from pydantic import TypeAdapter
from support.samples import ALIKE, FULL

from .requests import request_of

MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])
TEMPLATES = {
    path.stem: path.read_text()
    for path in sorted((Path(__file__).parents[2] / "templates").glob("*.jinja"))
    if FULL or path.stem not in ALIKE
}
TOOLS = [Function(name=name, parameters={"type": "object"}) for name in ("f", "g")]

words = st.text("ab \n<é", min_size=1, max_size=8)
contents = words | st.lists(words, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
call_shapes = st.tuples(
    st.sampled_from(("f", "g")), st.sampled_from(("{}", '{"a": 1}', "")), contents
)
assistants = st.tuples(
    st.none() | words, st.none() | words, st.lists(call_shapes, max_size=3)
).filter(lambda one: one[1] is not None or bool(one[2]))
users = st.tuples(st.sampled_from(("user", "user", "user", "system", "developer")), contents)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return messages of chat without neighbours of the assistant's role."""
    found: list[dict[str, Any]] = []
    if draw(st.booleans()):
        found.append({"role": draw(st.sampled_from(("system", "developer"))), "content": "S"})
    found.append({"role": "user", "content": draw(contents)})
    for number in range(draw(st.integers(0, 4))):
        thought, text, calls = draw(assistants)
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if thought is not None:
            said["reasoning_content"] = thought
        if calls:
            said["tool_calls"] = [
                {"id": f"call_{number}{place}abcdef", "type": "function",
                 "function": {"name": name, "arguments": arguments}}
                for place, (name, arguments, _) in enumerate(calls)
            ]  # fmt: skip
        found.append(said)
        found += [
            {"role": "tool", "tool_call_id": f"call_{number}{place}abcdef", "content": content}
            for place, (_, _, content) in enumerate(calls)
        ]
        role, content = draw(users)
        found += [{"role": role, "content": content}, {"role": "user", "content": "And?"}]
    return found


def parts(content: Any, kind: str = "input_text") -> Any:
    """Return content as an item has it."""
    if isinstance(content, str):
        return content
    return [{"type": kind, "text": part["text"]} for part in content]


def items_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of chat as items."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            found.append({"type": "function_call_output", "call_id": message["tool_call_id"],
                          "output": parts(content)})  # fmt: skip
            continue
        if "reasoning_content" in message:
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            found.append({"type": "reasoning", "summary": [], "content": [thought]})
        if content is not None:
            kind = "output_text" if role == "assistant" else "input_text"
            found.append({"role": role, "content": parts(content, kind)})
        found += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ]
    return found


@functools.cache
def known(name: str) -> tuple[Model, TemplateProfile]:
    """Return a model with a template, and its conventions."""
    model = Model("m", 100, TEMPLATES[name], "<s>", "</s>", False, "fp", 0)
    return model, detect_profile(model)


def prompt_of(name: str, messages: list[Message]) -> str:
    """Return the prompt of a template, or its error."""
    model, manner = known(name)
    turns, tools = turns_of(model, messages, TOOLS, manner.style, manner.tags)
    shown = fold(turns, manner.order_with_tools, manner.style.null)
    try:
        return render(model, {"messages": shown, "variables": {}, "tools": tools})
    except InvalidRequest as error:
        return error.message


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@given(conversations())
def test_items_have_the_prompt_of_messages(name: str, messages: list[dict[str, Any]]) -> None:
    """A conversation as items has the same prompt as the same messages in chat."""
    ours = conversation_of(request_of(input=items_of(messages))).messages
    assert prompt_of(name, ours) == prompt_of(name, MESSAGES.validate_python(messages))


@given(conversations())
def test_a_chain_has_the_messages_of_its_items(messages: list[dict[str, Any]]) -> None:
    """A conversation is the same wherever it is cut into a chain and an input."""
    items = conversation_of(request_of(input=items_of(messages))).messages
    given_items = items_of(messages)
    for cut in range(1, len(given_items)):
        before = request_of(input=given_items[:cut]).input
        assert isinstance(before, list)
        later = request_of(input=given_items[cut:])
        assert conversation_of(later, before).messages == items
