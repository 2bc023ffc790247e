"""A model's conventions for tools, reasoning and roles, detected once from its chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, takewhile
from typing import Literal, TypeAlias

from pydantic import TypeAdapter

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
from .conversation import Style, turns_of
from .folding import ANY, MODEL, MessageRules
from .formats import HERMES, format_of
from .reasoning import Tags, tags_of
from .templates import render

IN_WORDS = (
    Style(HERMES, results="tool"),
    Style(HERMES),
    Style(HERMES, block="user"),
)


def detect_style(model: Model) -> Style:
    """Return the first style in which a model's template shows tools, calls and results."""
    if model.template is None:
        return IN_WORDS[1]
    form = format_of(model.template)
    styles = list(IN_WORDS)
    if form is not None:
        # Gemma 4's first template takes results in the message of their calls.
        is_nested = "tool_responses" in model.template and "tool_call_id" not in model.template
        results: Literal["tool", "nested"] = "nested" if is_nested else "tool"
        native = [
            Style(form, True, True, null, results, texts=texts)
            for texts in (False, True)
            for null in (False, True)
        ]
        # Some templates omit calls. A marker is then enough to know their format.
        written = [Style(form, True, results="tool")] if form.begin else []
        styles = [*native, *written, *styles]
    style = next((style for style in styles if _shows(model, style)), IN_WORDS[-1])
    if style.native and "probe_question" not in _rendered(model, _PROBE[:1], style, ()):
        style = style._replace(empty=True)
    tags = tags_of(model.template)
    return style._replace(
        developer="developer" in model.template
        and "probe_text" in _rendered(model, _DEVELOPER, style._replace(developer=True)),
        framed=tags is not None and _is_framed(model, style, tags),
    )


_MESSAGES = TypeAdapter(list[Message])
_PROBE = _MESSAGES.validate_python(
    [
        {"role": "user", "content": "probe_question"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_probe0001", "type": "function",
             "function": {"name": "probe_name", "arguments": '{"key": "probe_value"}'}}]},
        {"role": "tool", "tool_call_id": "call_probe0001", "content": "probe_result"},
    ]
)  # fmt: skip
_DEVELOPER = _MESSAGES.validate_python(
    [{"role": "developer", "content": "probe_text"}, {"role": "user", "content": "probe_question"}]
)
FUNCTION = Function(
    name="probe_name",
    description="probe_description",
    parameters={"type": "object", "properties": {"key": {"type": "string"}}},
)
_NEEDLES = ("probe_question", "probe_name", "probe_value", "probe_result", "probe_description")


def _shows(model: Model, style: Style) -> bool:
    """Return True if a prompt shows all of a sample conversation, and its call in the format."""
    asked = _rendered(model, _PROBE[:1], style)
    prompt = _rendered(model, _PROBE, style)
    if not asked or not all(needle in prompt for needle in _NEEDLES):
        return False
    if not style.calls:
        return True
    form = style.form
    shown = prompt.removeprefix(asked) if form.bare else prompt[prompt.index("probe_question") :]
    if form.bare:
        return shown != prompt and shown.lstrip().startswith(("{", "[{", *form.markers))
    return form.begin in shown and any(name in shown for name in form.name_spellings("probe_name"))


def _is_framed(model: Model, style: Style, tags: Tags) -> bool:
    """Return True if a prompt shows reasoning in the content of the latest answer only."""
    answer = AssistantMessage(
        role="assistant", content=f"{tags.begin}probe_thought{tags.end}probe_answer"
    )
    latest = _rendered(model, [*_PROBE[:1], answer, *_PROBE[:1]], style)
    earlier = _rendered(model, [*_PROBE[:1], answer, *_PROBE], style)
    return (
        "probe_thought" in latest and "probe_thought" not in earlier and "probe_answer" in earlier
    )


def _rendered(
    model: Model,
    messages: Sequence[Message],
    style: Style,
    functions: Sequence[Function] = (FUNCTION,),
    own: Collection[str] = (),
) -> str:
    """Return a prompt; an empty one if the template rejects the messages.

    Args:
        own: the contents of messages that get the role `model`.
    """
    turns, tools = turns_of(model, messages, functions, style, None)
    turns = [{**turn, "role": MODEL} if turn["content"] in own else turn for turn in turns]
    try:
        return render(model, {"messages": turns, "variables": {}, "tools": tools})
    except LatimerError:
        return ""


# The samples for each field of `MessageRules`, one letter per message. The roles are (S)ystem,
# (U)ser, (A)ssistant, and a tool (R)esult. An assistant message can also be a (C)all, two
# (P)arallel calls, a call with content (B), a call with content and (T)hought, or one with
# (M)alformed arguments. (G) is an assistant message with the role `model`.
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
    "text_and_call": ("UBR", "UBRU"),
    "text_and_earlier_call": ("UBRA", "UBRAU"),
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
_WITH_CONTENT = "BT"
# Samples that contain calls and results as messages of their own.
_WITH_CALLS = frozenset(
    {
        "calls_after_text",
        "parallel",
        "text_and_call",
        "text_and_earlier_call",
        "reasoned",
        "malformed",
    }
)


def detect_message_rules(
    model: Model, style: Style, functions: Sequence[Function] = ()
) -> MessageRules:
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
            if field == "reasoned" and not found["text_and_earlier_call"]:
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
    return MessageRules(**found)


def _accepts(
    model: Model, style: Style, functions: Sequence[Function], sample: str, roles: Roles
) -> bool:
    """Return True if a prompt shows every message of a sample, in their order after the head."""
    if not sample:
        return False
    prompt = _sampled(model, style, functions, sample, roles)
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
    own, usual = (_sampled(model, style, functions, one, _SYSTEM[0]) for one in ("UGU", "UAU"))
    shown = all(_accepts(model, style, functions, one, _SYSTEM[0]) for one in ("UGCR", "UCRGCR"))
    if not own or own != usual:
        return False
    return shown and not _is_outside(model, style, functions, ("UCR", "UGCR"))


def _is_outside(
    model: Model, style: Style, functions: Sequence[Function], pair: tuple[str, str]
) -> bool:
    """Return True if a turn ends, and none begins, before the second sample's last but one."""
    gaps = []
    for sample in pair:
        prompt = _sampled(model, style, functions, sample, _SYSTEM[0])
        before = prompt.partition(_probe(len(sample) - 2))[0]
        gaps.append(before.rpartition(_probe(len(sample) - 3))[2])
    # What is before the message after the user's, and after the assistant's.
    after_user, after_text = gaps
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*gaps, strict=False))
    end = "".join(one for one, _ in same)
    own = after_text.removeprefix(end)
    return bool(end.strip()) and len(after_user) > len(after_text) and after_user.endswith(own)


def _sampled(
    model: Model, style: Style, functions: Sequence[Function], sample: str, roles: Roles
) -> str:
    """Return the prompt of a sample; an empty one if the template rejects it."""
    own = {_probe(index) for index, letter in enumerate(sample) if letter == "G"}
    return _rendered(model, list(_messages(sample, roles)), style, functions, own)


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
                content=_content(index) if letter in _WITH_CONTENT else None,
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
    return (_content(index), text) if letter in _WITH_CONTENT else (text,)


def _probe(index: int) -> str:
    return f"probe_text_{index}"


def _content(index: int) -> str:
    return f"probe_said_{index}"


@dataclass(slots=True)
class TemplateProfile:
    """A model's conventions.

    Args:
        style: the way in which its template shows tools and the model writes tool calls.
        tags: the tags around its reasoning; None for a model without reasoning.
        order: the orders of messages that its template accepts.
        order_with_tools: the same in a conversation with tools.
        splits: True if an answer without tools can have other parts than content.
    """

    style: Style
    tags: Tags | None
    order: MessageRules
    order_with_tools: MessageRules
    splits: bool


def detect_profile(model: Model) -> TemplateProfile:
    """Return the conventions of a model."""
    style = detect_style(model)
    order = detect_message_rules(model, style)
    with_tools = detect_message_rules(model, style, [FUNCTION]) if style.native else order
    tags = tags_of(model.template) if model.template is not None else None
    return TemplateProfile(
        style, tags, order, with_tools, tags is not None or style.is_one_of_several
    )


# The template takes most of the memory of an entry.
known_profiles: Memo[Model, TemplateProfile] = Memo(
    1 << 20, lambda model, _: len(model.template or "") + 1_000
)


async def known_profile(model: Model) -> TemplateProfile:
    """Return the cached conventions of a model; compiling and trying a template takes 0.1 s."""
    return await known_profiles.get(model, lambda: detect_profile(model))
