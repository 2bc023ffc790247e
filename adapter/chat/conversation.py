"""Convert messages, tools, tool calls and tool results to the input of a chat template.

Templates differ: some expect empty content in a message with tool calls, others expect null, and
many do not support tools. `profile.detect_style` detects the differences. If the template does not
support tools, the prompt describes them in text.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from ...backends.base import MEDIA, Model
from ...schemas.openai.messages import (
    AssistantMessage,
    CustomToolCall,
    Function,
    FunctionCall,
    FunctionMessage,
    Message,
    RefusalPart,
    TextPart,
    ToolMessage,
)
from .formats import CallPosition, ToolCallFormat
from .parsers import INPUT
from .reasoning import Framed, Tags

# The description of tools for a model whose template does not support them.
BLOCK = (
    'You may call a tool by answering with <tool_call>{"name": ..., "arguments": {...}}'
    "</tool_call>.\nTools:\n"
)
_NO_PARAMETERS = {"type": "object", "properties": {}}


class Style(NamedTuple):
    """The way in which a template shows tools, tool calls and tool results.

    Args:
        form: the format in which the model writes tool calls.
        native: True if the template accepts tools; otherwise the prompt describes them in text.
        calls: True if the template accepts tool calls; otherwise they are written into the content
            in the model's format.
        null: True if a message with tool calls and without text has null content.
        results: the role of a message with a tool result; `nested` if it is a part of the message
            with its call.
        block: the role of the message that gets the description of the tools.
        developer: True if the template has a developer role; otherwise it is a system message.
        texts: True if the arguments of calls are JSON as text, not objects.
        empty: True if the template requires an empty list of tools if there are none.
        framed: True if the template takes the reasoning of earlier messages in the content, and
            itself removes it from all but the latest.
    """

    form: ToolCallFormat
    native: bool = False
    calls: bool = False
    null: bool = False
    results: Literal["tool", "user", "nested"] = "user"
    block: Literal["system", "user"] = "system"
    developer: bool = False
    texts: bool = False
    empty: bool = False
    framed: bool = False

    @property
    def is_one_of_several(self) -> bool:
        """True if a turn of the model has several messages, one of which is the answer."""
        return self.native and bool(self.form.answer)

    @property
    def reasons(self) -> bool:
        """True if one of these messages can be reasoning."""
        return self.is_one_of_several and self.form.reasons


def turns_of(
    model: Model,
    messages: Sequence[Message],
    functions: Sequence[Function],
    style: Style,
    tags: Tags | None,
    sees: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the messages for a template, and the tools if it accepts tools.

    The content of each is a string, and its role is one that the template knows.

    Args:
        tags: the tags around reasoning, which is split off the content of assistant messages.
        sees: True if the conversation contains media; the placeholder is then replaced in text.
    """
    turns: list[dict[str, Any]] = []
    places: dict[str, CallPosition] = {}
    # The number of earlier calls, and the place of the results that follow one another here.
    count = start = 0
    for message in messages:
        role: str = message.role
        if role == "developer" and not style.developer:
            role = "system"
        content = message.content or ""
        if isinstance(content, list):
            content = "".join([_text(part, sees) for part in content])
        elif sees:
            content = _plain(content, sees)
        turn: dict[str, Any] = {"role": role, "content": content}
        name = getattr(message, "name", None)
        if name is not None:
            turn["name"] = name
        if isinstance(message, AssistantMessage):
            if message.refusal and not turn["content"]:
                turn["content"] = _plain(message.refusal, sees)
            _split(turn, message, tags, style.framed)
            count += _add_calls(turn, message, style, places, count)
            if style.framed and tags is not None and turn["content"]:
                turn["content"] = Framed.of(turn["content"], tags)
        elif isinstance(message, ToolMessage | FunctionMessage):
            place = _make_result(turn, message, style, places)
            if _is_joined(turns, turn, place, style):
                continue
            turn["result"] = place
            if style.form.in_order:
                # A result follows those of earlier calls of the same message.
                index = bisect(turns, place.in_conversation, start, key=_place_of)
                turns.insert(index, turn)
                continue
        turns.append(turn)
        start = len(turns)
    for turn in turns:
        turn.pop("result", None)
    if not functions:
        return turns, [] if style.empty else None
    if style.native:
        return turns, [_tool(function) for function in functions]
    return _with_block(turns, functions, style), None


def plain_turns(
    messages: Sequence[Message], style: Style, tags: Tags | None
) -> list[dict[str, Any]] | None:
    """Return the result of `turns_of` for plain messages; None if they may contain reasoning."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role: str = message.role
        if role == "assistant" and tags is not None:
            return None
        if role == "developer" and not style.developer:
            role = "system"
        turns.append({"role": role, "content": message.content})
    return turns


def _text(part: object, sees: bool) -> str:
    if isinstance(part, TextPart):
        return _plain(part.text, sees)
    if isinstance(part, RefusalPart):
        return _plain(part.refusal, sees)
    return MEDIA


def _plain(text: str, sees: bool) -> str:
    return text.replace(MEDIA, "\ufffd") if sees else text


def _split(
    turn: dict[str, Any], message: AssistantMessage, tags: Tags | None, framed: bool
) -> None:
    """Move reasoning from the content to its own fields, as templates for reasoning expect.

    Args:
        framed: True if the template expects it in the content, see `Style`.
    """
    reasoning: str | None = None
    if tags is not None:
        reasoning, turn["content"] = tags.split(turn["content"])
    if message.earlier_reasoning is not None:
        reasoning = message.earlier_reasoning
    if reasoning and framed and tags is not None:
        turn["content"] = f"{tags.begin}{reasoning}{tags.end}{turn['content']}"
    elif reasoning:
        turn["reasoning_content"] = turn["thinking"] = reasoning


def _add_calls(
    turn: dict[str, Any],
    message: AssistantMessage,
    style: Style,
    places: dict[str, CallPosition],
    count: int,
) -> int:
    """Add the calls of a message to its turn, and return their number.

    Args:
        count: the number of calls in earlier messages.
    """
    calls = [(call.id, _called(call)) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(("call_function", message.function_call))
    for index, (call_id, function) in enumerate(calls):
        places[call_id] = CallPosition(function.name, count + index, index)
    if not calls:
        return 0
    if not style.calls:
        written = [(function.name, _arguments(function)) for _, function in calls]
        turn["content"] += style.form.render(written)
        return len(calls)
    if style.null and not turn["content"]:
        turn["content"] = None
    turn["tool_calls"] = [
        {
            "id": style.form.call_id(call_id, places[call_id]),
            "type": "function",
            "function": {
                "name": function.name,
                "arguments": function.arguments or "{}" if style.texts else _arguments(function),
            },
        }
        for call_id, function in calls
    ]
    return len(calls)


def _called(call: Any) -> FunctionCall:
    if isinstance(call, CustomToolCall):
        arguments = json.dumps({INPUT: call.custom.input})
        return FunctionCall(name=call.custom.name, arguments=arguments)
    function: FunctionCall = call.function
    return function


def _arguments(function: FunctionCall) -> Any:
    """Return arguments as an object, or as the string that was sent if they are not an object."""
    return _as_object(function.arguments) if function.arguments else {}


def _as_object(text: str) -> Any:
    """Return text as a JSON object, or unchanged if it is something else.

    `json` accepts an escaped lone surrogate, which a prompt cannot contain; `orjson` rejects it.
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            orjson.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


_UNKNOWN = CallPosition("", -1, -1)


def _make_result(
    turn: dict[str, Any],
    message: ToolMessage | FunctionMessage,
    style: Style,
    places: Mapping[str, CallPosition],
) -> CallPosition:
    """Make a turn a result of a call, and return the place of the call."""
    place = _UNKNOWN
    if isinstance(message, ToolMessage):
        place = places.get(message.tool_call_id, _UNKNOWN)
    if style.results == "user":
        turn["role"] = "user"
        turn["content"] = f"<tool_response>\n{turn['content']}\n</tool_response>"
        turn.pop("name", None)
        return place
    turn["role"] = "tool"
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = style.form.call_id(message.tool_call_id, place)
        if place is not _UNKNOWN:
            turn["name"] = place.name
    return place


def _is_joined(
    turns: Sequence[dict[str, Any]], turn: Mapping[str, Any], place: CallPosition, style: Style
) -> bool:
    """Add a result to an earlier turn and return True, if the template takes it there."""
    if style.results == "user" and turns and turns[-1].get("result"):
        turns[-1]["content"] += "\n" + turn["content"]
        return True
    if style.results != "nested":
        return False
    caller = next((one for one in reversed(turns) if "tool_calls" in one), None)
    if caller is None:
        return False
    response = {"name": place.name, "response": _as_object(turn["content"])}
    before = caller.setdefault("result", [])
    index = bisect(before, place.in_conversation)
    before.insert(index, place.in_conversation)
    caller.setdefault("tool_responses", []).insert(index, response)
    return True


def _place_of(result: Mapping[str, Any]) -> int:
    place: CallPosition = result["result"]
    return place.in_conversation


def _tool(function: Function) -> dict[str, Any]:
    own = {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or _NO_PARAMETERS,
    }
    return {"type": "function", "function": own}


def _with_block(
    turns: list[dict[str, Any]], functions: Sequence[Function], style: Style
) -> list[dict[str, Any]]:
    """Add the description of the tools after the system message, or before the user message."""
    lines = [json.dumps(_tool(one)["function"], ensure_ascii=False) for one in functions]
    block = BLOCK + "\n".join(lines)
    if style.block == "system":
        first = turns[0] if turns[0]["role"] == "system" else None
    else:
        first = next((turn for turn in turns if turn["role"] == "user"), None)
    if first is None:
        return [{"role": style.block, "content": block}, *turns]
    parts = [first["content"], block] if style.block == "system" else [block, first["content"]]
    first["content"] = "\n\n".join(part for part in parts if part)
    return turns
