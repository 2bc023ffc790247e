"""A conversation of twenty turns with tools and reasoning, and the ways to continue it.

The model's answer depends on the last character of the last message. The templates repeat that
character at the end of a prompt, where the scripted model finds it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
from openai.types.responses import Response

R = "/v1/responses"
_HEAD = "<|im_start|>assistant\n{{ (%s.content or ' ')[-1:] }}"
_THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
_CALLS = (
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)


def _template(keeps: str) -> str:
    """Return a template that shows the reasoning of messages for which a condition holds."""
    return (
        "{% if tools %}<|im_start|>system\n{% for t in tools %}{% set f = t.function %}"
        "{{ f.name }} {{ f.description }} {{ f.parameters | tojson }}\n{% endfor %}"
        "<|im_end|>\n{% endif %}{% set ns = namespace(last=0) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.first %}"
        + _HEAD % "loop.previtem"
        + "{% if m.reasoning_content and " + keeps + " %}" + _THOUGHT + "{% endif %}"
        "{{ m.content }}" + _CALLS + "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + _HEAD % "messages[-1]" + "{% endif %}"
    )  # fmt: skip


# `dropping` keeps the reasoning since the last message of the user, as Qwen 3 does.
TEMPLATES = {"keeping": _template("true"), "dropping": _template("loop.index > ns.last")}


def _called(name: str, **arguments: str) -> str:
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


# The answers of the model, in pieces, by the last character of the last message.
SCRIPTS: Mapping[str, Sequence[str]] = {
    # One call, and two at once.
    "?": ("<think>\nLook", " it up.\n</think>\n\n", _called("weather", city="Rome")),
    "!": (
        "<think>\nTwo", " at once.\n</think>\n\n", _called("weather", city="Oslo"),
        _called("clock", city="Oslo"),
    ),
    # Text and a call of a custom tool.
    ";": ("<think>\nPatch", " it.\n</think>\n\n", "Here:", _called("patch", input='+ "é"\n- b')),
    # A further call, after an output.
    "+": ("<think>\nOnce", " more.\n</think>\n\n", _called("clock", city="Rome")),
    # The answer, with and without reasoning.
    ".": ("<think>\nNow", " I know.\n</think>\n\n", "It is", " fine, all of it."),
    ":": ("Yes", ", gladly."),
}  # fmt: skip
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"type": "function", "parameters": _CITY, "strict": False}
TOOLS: list[dict[str, Any]] = [
    {**_FUNCTION, "name": "weather"},
    {**_FUNCTION, "name": "clock"},
    {"type": "custom", "name": "patch"},
]
# The messages of the user; the last character of each is the kind of the answer.
TURNS = [f"{number}{'?!;:'[number % 4]}" for number in range(20)]


class Way(ABC):
    """A client that continues a conversation in its own way.

    Args:
        client: a client of the server.

    Attributes:
        usages: the usage of each response.
        kinds: the types of the output items of each response.
    """

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self.usages: list[dict[str, Any]] = []
        self.kinds: list[list[str]] = []

    @abstractmethod
    async def body(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of the next request, which adds items to the conversation."""

    @abstractmethod
    def heard(self, response: dict[str, Any]) -> None:
        """Receive the response."""

    async def run(self) -> None:
        """Run the conversation; every second response is a stream."""
        for turn in TURNS:
            items: list[dict[str, Any]] = [{"role": "user", "content": turn}]
            while items:
                items = outputs_of(await self._ask(items))

    async def _ask(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        fields = await self.body(items)
        streamed = len(self.usages) % 2 == 1
        common = {"model": "m", "instructions": "Be brief.", "tools": TOOLS, "temperature": 0}
        reply = await self._client.post(R, json={**common, "stream": streamed, **fields})
        assert reply.status_code == 200, reply.text
        assert "x-latimer-ignored" not in reply.headers, reply.headers
        text = reply.text.rpartition("data: ")[2] if streamed else reply.text
        found = json.loads(text)
        response: dict[str, Any] = found["response"] if streamed else found
        assert response["status"] == "completed", response
        self.usages.append(response["usage"])
        self.kinds.append([item["type"] for item in response["output"]])
        self.heard(response)
        return response


def outputs_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of a response's calls, the last call first; one of them asks for more."""
    calls = [item for item in response["output"] if item["type"].endswith("call")]
    asks = '{"city": "Rome"}'
    return [
        {
            "type": f"{call['type']}_output",
            "call_id": call["call_id"],
            "output": "Warm+"
            if (call["name"], call.get("arguments")) == ("weather", asks)
            else f"{call['name']}: done.",
        }
        for call in calls[::-1]
    ]


class ByResponse(Way):
    """`previous_response_id`, with the new items only."""

    last: str | None = None

    async def body(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Way.body`."""
        return {"input": items, "previous_response_id": self.last}

    def heard(self, response: dict[str, Any]) -> None:
        """See `Way.heard`."""
        self.last = response["id"]


class ByConversation(Way):
    """`conversation`, with the new items only."""

    name: str | None = None

    async def body(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Way.body`."""
        if self.name is None:
            self.name = (await self._client.post("/v1/conversations", json={})).json()["id"]
        return {"input": items, "conversation": self.name}

    def heard(self, response: dict[str, Any]) -> None:
        """See `Way.heard`."""
        assert response["conversation"] == {"id": self.name}


class ByItems(Way):
    """All items, as the `openai` package returns them; nothing is stored."""

    fields: Mapping[str, Any] = {"store": False}

    def __init__(self, client: httpx2.AsyncClient) -> None:
        super().__init__(client)
        self.items: list[dict[str, Any]] = []

    async def body(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """See `Way.body`."""
        self.items += items
        return {"input": self.items, **self.fields}

    def heard(self, response: dict[str, Any]) -> None:
        """See `Way.heard`."""
        read = Response.model_validate(response)
        self.items += [self.replayed(item.model_dump(mode="json")) for item in read.output]

    def replayed(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return an output item as this client sends it back."""
        return item


class BySealed(ByItems):
    """All items, with reasoning as `encrypted_content` only and without ids; nothing is stored."""

    fields: Mapping[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}

    def replayed(self, item: dict[str, Any]) -> dict[str, Any]:
        """See `ByItems.replayed`."""
        if item["type"] == "reasoning":
            sealed = item["encrypted_content"]
            return {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        return {name: value for name, value in item.items() if name not in ("id", "status")}


class ByReferences(ByItems):
    """All items, with text and reasoning as references to stored items, as the AI SDK does."""

    fields: Mapping[str, Any] = {}

    def replayed(self, item: dict[str, Any]) -> dict[str, Any]:
        """See `ByItems.replayed`."""
        if item["type"] in ("message", "reasoning"):
            return {"type": "item_reference", "id": item["id"]}
        return item


class ByIds(ByItems):
    """All items, with reasoning without its text, but with the id by which it is stored."""

    fields: Mapping[str, Any] = {}

    def replayed(self, item: dict[str, Any]) -> dict[str, Any]:
        """See `ByItems.replayed`."""
        if item["type"] == "reasoning":
            return {"type": "reasoning", "id": item["id"], "summary": []}
        return item


WAYS = (ByResponse, ByConversation, ByItems, BySealed, ByReferences, ByIds)
