"""Codex's side of the Responses API, after its published source: what it reads, and sends back.

It takes items from `response.output_item.done` alone. Known events and items of known types must
parse; unknown events are skipped. A stream without `response.completed` is an error.

The template ends a prompt with the character of the step, and each step has a script. A client that
does not send reasoning back with the calls that follow it gets an answer that says so.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from support.clients import adapting
from support.engines.koboldcpp import koboldcpp
from support.projector import projector
from support.scripted import WIDTH, scripted
from support.servers import llama_server


class CodexError(Exception):
    """An error that ends the turn, or makes Codex send the request again."""


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Text(_Read):
    type: Literal["input_text", "output_text"]
    text: str


class _Image(_Read):
    type: Literal["input_image"]
    image_url: str


class _Summary(_Read):
    type: Literal["summary_text"]
    text: str


class _Thought(_Read):
    type: Literal["reasoning_text", "text"]
    text: str


class _Item(_Read):
    id: str | None = None


class _Message(_Item):
    type: Literal["message"]
    role: str
    content: list[Annotated[_Text | _Image, Field(discriminator="type")]]
    phase: Literal["commentary", "final_answer"] | None = None


class _Reasoning(_Item):
    type: Literal["reasoning"]
    summary: list[_Summary]
    content: list[_Thought] | None = None
    encrypted_content: str | None = None


class _FunctionCall(_Item):
    type: Literal["function_call"]
    name: str
    namespace: str | None = None
    arguments: str
    call_id: str


class _CustomCall(_Item):
    type: Literal["custom_tool_call"]
    status: str | None = None
    call_id: str
    name: str
    namespace: str | None = None
    input: str


_ITEM: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _Message | _Reasoning | _FunctionCall | _CustomCall, Field(discriminator="type")
    ]
)  # fmt: skip


class _Event(_Read):
    type: str
    response: dict[str, Any] | None = None
    item: Any = None
    item_id: str | None = None
    delta: str | None = None
    text: str | None = None
    summary_index: int | None = None
    content_index: int | None = None


class _Details(_Read):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(_Read):
    input_tokens: int
    input_tokens_details: _Details
    output_tokens: int
    output_tokens_details: _Details
    total_tokens: int


class _Completed(_Read):
    id: str
    usage: _Usage
    end_turn: bool | None = None


_DELTAS = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.custom_tool_call_input.delta": "custom_tool_call",
}
_KNOWN = frozenset({
    "error", "response.created", "response.in_progress", "response.failed", "response.incomplete",
    "response.completed", "response.output_item.done", "response.output_item.added",
    "response.reasoning_summary_text.done", "response.reasoning_summary_part.added", *_DELTAS,
})  # fmt: skip


@dataclass
class Reply:
    """The parts of a response that Codex keeps.

    Args:
        items: the output items, as it sends them back.
        deltas: the joined deltas by the type of event.
    """

    items: list[dict[str, Any]] = field(default_factory=list)
    deltas: dict[str, str] = field(default_factory=dict)
    completed: _Completed | None = None


def read(text: str) -> Reply:
    """Return the parts of a stream that Codex keeps.

    Raises:
        CodexError: an event or an item does not parse, the response failed or is incomplete, or the
            stream ends too early.
    """
    reply = Reply()
    is_open: Any = None
    for payload in _payloads(text):
        event = _event(payload)
        if event is None:
            continue
        if event.type == "response.output_item.added":
            is_open = _item(event.item)
        elif event.type == "response.output_item.done":
            _item(event.item)
            reply.items.append(event.item)
            is_open = None
        elif event.type in _DELTAS:
            if is_open is None or is_open.type != _DELTAS[event.type] or event.delta is None:
                raise CodexError(f"{event.type} without its item")
            reply.deltas[event.type] = reply.deltas.get(event.type, "") + event.delta
        elif event.type in ("error", "response.failed", "response.incomplete"):
            raise CodexError(payload)
        elif event.type == "response.completed":
            reply.completed = _parsed(TypeAdapter(_Completed), event.response)
            return reply
    raise CodexError("stream closed before response.completed")


def _payloads(text: str) -> Iterator[str]:
    for block in text.split("\n\n"):
        data = [line[6:] for line in block.split("\n") if line.startswith("data: ")]
        if data:
            yield "\n".join(data)


def _event(payload: str) -> _Event | None:
    """Return an event, or None for one that Codex does not know and cannot parse."""
    try:
        return _Event.model_validate_json(payload)
    except ValidationError as error:
        if json.loads(payload).get("type") in _KNOWN:
            raise CodexError(str(error)) from None
        return None


def _item(value: Any) -> Any:
    return _parsed(_ITEM, value)


def _parsed(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise CodexError(str(error)) from None


def sent_back(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an output item as the published source sends it back: reasoning only encrypted."""
    if item["type"] != "reasoning":
        return dict(item)
    return {name: value for name, value in item.items() if name not in ("content", "status")}


TEMPLATE = """\
{% set seen = namespace(results=0, forgot=false, other=false) %}\
{% if tools %}<|im_start|>system
<tools>{{ tools | tojson }}</tools>
For each call, write <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>
{% for tool in tools %}{% if 'transfer_to' in tool.function.name %}\
{% set seen.other = true %}{% endif %}{% endfor %}{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}\
{% if message.content is string %}{{ message.content }}\
{% else %}{% for part in message.content or [] %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<__media__>{% endif %}{% endfor %}{% endif %}\
{% for call in message.tool_calls or [] %}\
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}\
}</tool_call>{% endfor %}<|im_end|>
{% if message.role == 'tool' %}{% set seen.results = seen.results + 1 %}{% endif %}\
{% if message.tool_calls and not message.reasoning_content %}{% set seen.forgot = true %}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% if seen.forgot %}F{% elif not tools %}N{% elif seen.other %}O{% else %}{{ seen.results }}\
{% endif %}{% endif %}"""


def call(thought: str, name: str, **arguments: Any) -> tuple[str, str]:
    """Return the end of a thought and a call, in two tokens that differ from those of others."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"{thought}</think>\n<tool_call>{text[:20]}", f"{text[20:]}</tool_call>"


# By the character that ends a prompt: `N` without tools, `O` if the conversation can be handed
# over, else the number of results.
_FORGOTTEN = ("The reasoning ", "was not sent back.")
_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "N": ("<think>I know ", "the answer.</think>", "Paris is ", "the capital."),
    "O": ("<think>The other agent ", *call("knows.", "transfer_to_second")),
    "0": ("<think>I need ", *call("both cities.", "get_weather", city="Paris")),
    "1": ("<think>Now the ", *call("second city.", "get_weather", city="Rome")),
    "2": ("<think>I have ", "both now.</think>", "It is 21 degrees in Paris ", "and 18 in Rome."),
}


def stepped(path: Path, scripts: Mapping[str, tuple[str, ...]], context: int = 4096) -> Path:
    """Write a model with the given scripts."""
    return scripted(path, _FORGOTTEN, TEMPLATE, after="F", context=context, others=scripts)


def _pieces(text: str) -> tuple[str, ...]:
    """Return a text in tokens that differ from those of other texts."""
    third = len(text) // 3
    return text[:third], text[third : 2 * third], text[2 * third :]


@asynccontextmanager
async def answering(
    engine: str, scripts: Mapping[str, str], folder: Path, context: int = 16_384
) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an adapter over an engine that gives the answers of a session.

    Args:
        scripts: the answers, by the character of the step.
    """
    async with AsyncExitStack() as stack:
        backend: Backend
        if engine == "koboldcpp":
            fake, backend = await stack.enter_async_context(koboldcpp(TEMPLATE, "Lost."))
            fake.others = scripts
        else:
            shown = {key: _pieces(text) for key, text in scripts.items()}
            path = stepped(folder / "model.gguf", shown, context)
            if engine == "llama_cpp":
                backend = LlamaCpp(path, context=context)
            else:
                server = llama_server(path, slots=1, context=context)
                backend = LlamaServer(stack.enter_context(server))
        yield await stack.enter_async_context(adapting(backend))


def in_steps(folder: Path) -> tuple[Path, Path]:
    """Write the model, and a projector with which it takes images."""
    model = stepped(folder / "steps.gguf", _SCRIPTS)
    return model, projector(folder / "steps-mmproj.gguf", WIDTH)
