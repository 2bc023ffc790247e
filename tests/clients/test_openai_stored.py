"""Tests of stored chat completions with the official `openai` client, on each kind of database."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.store.config import store_config_of
from latimer.adapter.store.records import Record, new_id
from latimer.adapter.store.store import Store
from openai import NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from support.engines.echo import Echo
from support.servers import serving

HELLO: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
]
MANY = 1_000


def test_a_completion_is_stored(stored_sdk: OpenAI) -> None:
    """A stored completion is retrieved, updated, listed with its messages, and deleted."""
    completions = stored_sdk.chat.completions
    made = completions.create(
        model="demo", messages=HELLO, max_tokens=4, store=True, metadata={"a": "b"}, n=2
    )
    found = completions.retrieve(made.id)
    assert (found.id, found.created, found.model) == (made.id, made.created, made.model)
    assert found.usage == made.usage
    assert [one.message.content for one in found.choices] == [
        one.message.content for one in made.choices
    ]
    # The published type allows only the role of the assistant.
    with OpenAI(base_url=stored_sdk.base_url, api_key="x") as lenient:
        listed = list(lenient.chat.completions.messages.list(made.id))
    assert [{"role": one.role, "content": one.content} for one in listed] == HELLO
    assert completions.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert [one.id for one in completions.list(metadata={"c": "d"})] == [made.id]
    assert [one.id for one in completions.list(metadata={"a": "b"})] == []
    deleted = completions.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(NotFoundError, match="not found"):
        completions.retrieve(made.id)


def test_a_stream_is_stored(stored_sdk: OpenAI) -> None:
    """A streamed completion is stored as the helper of the client accumulates it."""
    completions = stored_sdk.chat.completions
    with completions.stream(
        model="demo", messages=HELLO, store=True, logprobs=True, top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        made = stream.get_final_completion()
    found = completions.retrieve(made.id)
    assert found.choices[0].message.content == made.choices[0].message.content
    assert found.choices[0].finish_reason == made.choices[0].finish_reason
    assert found.usage == made.usage
    logprobs = [one.choices[0].logprobs for one in (found, made)]
    assert logprobs[0] is not None
    assert logprobs[1] is not None
    assert logprobs[0].content == logprobs[1].content


def a_record(number: int) -> Record:
    """Return the record of a small completion."""
    name, created_at = new_id("chatcmpl-")
    metadata = {"number": str(number), "third": str(number % 3)}
    model = f"model-{number % 2}"
    message: dict[str, Any] = {
        "role": "assistant",
        "content": f"{number}.",
        "refusal": None,
        "annotations": [],
    }
    reply: dict[str, Any] = {
        "id": name, "object": "chat.completion", "created": created_at // 1_000_000, "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        "system_fingerprint": "fp_0", "metadata": metadata,
    }  # fmt: skip
    request = {"model": model, "messages": HELLO, "store": True, "metadata": metadata}
    return Record(
        name, "chat.completion", "", created_at, model, "req_0", request, reply, metadata, 1_000
    )


@pytest.mark.parametrize("target", ["sqlite", "postgresql"], indirect=True)
def test_pages_over_many(target: str) -> None:
    """The client pages over 1,000 completions in both orders, with filters and without."""
    records = [a_record(number) for number in range(MANY)]

    async def keep() -> None:
        place = store_config_of(target)
        assert place is not None
        store = Store(place)
        assert all(store.keep(one) for one in records)
        await store.aclose()

    asyncio.run(keep())
    ids = [one.id for one in records]
    with (
        serving(lambda: OpenAIAdapter(Echo(context=64), store=target)) as address,
        OpenAI(base_url=f"{address}/v1", api_key="x", _strict_response_validation=True) as client,
    ):
        listed = client.chat.completions.list
        assert [one.id for one in listed()] == ids
        assert [one.id for one in listed(order="desc", limit=100)] == ids[::-1]
        assert [one.id for one in listed(model="model-1", limit=100)] == ids[1::2]
        thirds = listed(metadata={"third": "2"}, limit=7)
        assert [one.id for one in thirds] == ids[2::3]
        one = listed(metadata={"number": "500", "third": "2"}, model="model-0")
        assert [found.id for found in one] == [ids[500]]
        after = listed(after=ids[899], limit=100)
        assert [found.id for found in after] == ids[900:]
