"""A model's conventions for tools, reasoning and roles, detected once from its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, takewhile
from typing import Literal, TypeAlias

from ...backends.base import Model
from ...backends.errors import LatimerError
from ...backends.offload import Memo
from ...schemas.openai.messages import (
    AssistantMessage,
    CustomToolCall,
    Function,
    FunctionCall,
    FunctionToolCall,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from .conversation import FUNCTION, Style, style_of, turns_of
from .folding import ANY, MODEL, Order
from .reasoning import Tags, tags_of
from .templates import render

# The samples for each field of `Order`, one letter per message. The roles are (S)ystem, (U)ser,
# (A)ssistant, and a tool (R)esult. An assistant message can also be a (C)all, two (P)arallel calls,
# a call with content (B), a call with content and (T)hought, or one with (M)alformed arguments. (G)
# is an assistant message with the role `model`.
_SAMPLES = {
    "system": ("SU",),
    "kept": ("SUA", "SUCR"),
    "systems": ("SSU", "SSSU"),
    "later": ("USU", "SUSU", "SUASU", "SUAUS", "SUAUSAU"),
    "users": ("UU", "UAUU"),
    "assistants": ("UAAU",),
    "calls_after_text": ("UACR",),
    "begins": ("AU", "CRU"),
    "alone": ("S", "SA", "A"),
    "uncounted": ("UCRU", "UACRA", "UCRUA"),
    "parallel": ("UPRR", "UPRRA"),
    "said": ("UBR", "UBRU"),
    "said_earlier": ("UBRA", "UBRAU"),
    "reasoned": ("UTR", "UTRA"),
    "malformed": ("UMR",),
}
# The roles of a sample's system messages, repeated as needed.
Roles: TypeAlias = tuple[Literal["system", "developer"], ...]
_SYSTEM: tuple[Roles, ...] = (("system",),)
_BOTH: tuple[Roles, ...] = (
    *_SYSTEM, ("developer",), ("system", "developer"), ("developer", "system")
)  # fmt: skip
# Pairs of samples: in the second, text of the assistant is before the last message but one. A
# template that then omits the beginning of the assistant's turn puts that message outside any turn.
_BEFORE = {"assistants": ("UAU", "UAAU"), "calls_after_text": ("UCR", "UACR")}
# Calls with content.
_SAID = "BT"
# Samples that contain calls and results as messages of their own.
_WITH_CALLS = frozenset(
    {"calls_after_text", "parallel", "said", "said_earlier", "reasoned", "malformed"}
)


def order_of(model: Model, style: Style, functions: Sequence[Function] = ()) -> Order:
    """Return the orders that a model's template accepts, with or without tools."""
    if model.template is None:
        return ANY
    found: dict[str, bool] = {}
    for field, samples in _SAMPLES.items():
        # Calls described in text are content, and results described in text are user messages.
        if (style.calls or field not in _WITH_CALLS) and (
            style.results == "tool" or field != "uncounted"
        ):
            # Without a system role, only the other messages of a sample are tried.
            tried = samples if found.get("system", True) else [one.lstrip("S") for one in samples]
            if field == "reasoned" and not found["said_earlier"]:
                # Content before an answer is omitted without reasoning, too.
                tried = [one for one in samples if "A" not in one]
            found[field] = all(
                _accepts(model, style, functions, sample, roles)
                for sample in tried
                for roles in (_BOTH if style.developer and "S" in sample else _SYSTEM)
            )
    for field, pair in _BEFORE.items():
        if found.get(field):
            found[field] = not _is_outside(model, style, functions, pair)
    if found.get("calls_after_text") is False:
        found["model"] = _has_model(model, style, functions)
    if not found["system"]:
        found.pop("kept")
    return Order(**found)


def _accepts(
    model: Model, style: Style, functions: Sequence[Function], sample: str, roles: Roles
) -> bool:
    """Return True if a prompt shows every message of a sample, in their order after the head."""
    if not sample:
        return False
    try:
        prompt = _rendered(model, style, functions, sample, roles)
    except LatimerError:
        return False
    head = len(sample) - len(sample.lstrip("S"))
    # Some templates write the first system message before the last user message.
    if not all(_probe(index) in prompt for index in range(head)):
        return False
    position = 0
    for index, letter in enumerate(sample[head:], head):
        places = [prompt.find(text, position) for text in _texts(letter, index)]
        if min(places) < 0:
            return False
        position = max(places)
    return True


def _has_model(model: Model, style: Style, functions: Sequence[Function]) -> bool:
    """Return True if `model` is the assistant's role, too, and a call after it is in a turn."""
    try:
        own, usual = (
            _rendered(model, style, functions, sample, _SYSTEM[0]) for sample in ("UGU", "UAU")
        )
    except LatimerError:
        return False
    shown = all(_accepts(model, style, functions, one, _SYSTEM[0]) for one in ("UGCR", "UCRGCR"))
    return shown and own == usual and not _is_outside(model, style, functions, ("UCR", "UGCR"))


def _is_outside(
    model: Model, style: Style, functions: Sequence[Function], pair: tuple[str, str]
) -> bool:
    """Return True if a turn ends, and none begins, before the second sample's last but one."""
    gaps = []
    for sample in pair:
        try:
            prompt = _rendered(model, style, functions, sample, _SYSTEM[0])
        except LatimerError:
            return False
        before = prompt.partition(_probe(len(sample) - 2))[0]
        gaps.append(before.rpartition(_probe(len(sample) - 3))[2])
    # What is before the message after the user's, and after the assistant's.
    after_user, after_text = gaps
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*gaps, strict=False))
    end = "".join(one for one, _ in same)
    own = after_text.removeprefix(end)
    return bool(end.strip()) and len(after_user) > len(after_text) and after_user.endswith(own)


def _rendered(
    model: Model, style: Style, functions: Sequence[Function], sample: str, roles: Roles
) -> str:
    turns, tools = turns_of(model, list(_messages(sample, roles)), functions, style, None)
    texts = {_probe(index) for index, letter in enumerate(sample) if letter == "G"}
    turns = [{**turn, "role": MODEL} if turn["content"] in texts else turn for turn in turns]
    return render(model, {"messages": turns, "variables": {}, "tools": tools})


def _messages(sample: str, roles: Roles) -> Iterator[Message]:
    ids: list[str] = []
    role = cycle(roles)
    for index, letter in enumerate(sample):
        text = _probe(index)
        if letter == "S":
            yield SystemMessage(role=next(role), content=text)
        elif letter == "U":
            yield UserMessage(role="user", content=text)
        elif letter in "AG":
            yield AssistantMessage(role="assistant", content=text)
        elif letter == "R":
            yield ToolMessage(role="tool", content=text, tool_call_id=ids.pop(0))
        else:
            values = [f"{text}a", f"{text}b"] if letter == "P" else [text]
            ids = [f"call_probe{number:04}" for number in range(len(values))]
            written = values if letter == "M" else [json.dumps({"key": one}) for one in values]
            calls = [_call(*one) for one in zip(ids, written, strict=True)]
            yield AssistantMessage(
                role="assistant",
                content=_said(index) if letter in _SAID else None,
                reasoning_content="probe_thought" if letter == "T" else None,
                tool_calls=calls,
            )


def _call(call_id: str, arguments: str) -> FunctionToolCall | CustomToolCall:
    function = FunctionCall(name=FUNCTION.name, arguments=arguments)
    return FunctionToolCall(id=call_id, type="function", function=function)


def _texts(letter: str, index: int) -> Sequence[str]:
    """Return the texts of a message that a prompt must show."""
    text = _probe(index)
    if letter == "P":
        return (f"{text}a", f"{text}b")
    return (_said(index), text) if letter in _SAID else (text,)


def _probe(index: int) -> str:
    return f"probe_text_{index}"


def _said(index: int) -> str:
    return f"probe_said_{index}"


@dataclass(slots=True)
class Manner:
    """A model's conventions.

    Args:
        style: the way in which its template shows tools and the model writes tool calls.
        tags: the tags around its reasoning; None for a model without reasoning.
        order: the orders of messages that its template accepts.
        order_with_tools: the same in a conversation with tools.
    """

    style: Style
    tags: Tags | None
    order: Order
    order_with_tools: Order


def manner_of(model: Model) -> Manner:
    """Return the conventions of a model."""
    style = style_of(model)
    order = order_of(model, style)
    with_tools = order_of(model, style, [FUNCTION]) if style.native else order
    tags = tags_of(model.template) if model.template is not None else None
    return Manner(style, tags, order, with_tools)


# The template takes most of the memory of an entry.
_manners: Memo[Model, Manner] = Memo(1 << 20, lambda model, _: len(model.template or "") + 1_000)


async def known_manner_of(model: Model) -> Manner:
    """Return the cached conventions of a model; compiling and trying a template takes 0.1 s."""
    return await _manners.get(model, lambda: manner_of(model))
