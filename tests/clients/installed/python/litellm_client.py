"""litellm with its prefixes `openai/` and `text-completion-openai/`."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from common import ANSWER, ASK, JAPAN, PARIS, TOM, Person

litellm.drop_params = False
TALK = [{"role": "user", "content": ASK}]


def options(url: str, **more: Any) -> dict[str, Any]:
    """Return the arguments for a compatible server."""
    return {
        "model": "openai/demo", "api_base": url, "api_key": "unused", "temperature": 0,
        "max_tokens": 100, "num_retries": 0, **more,
    }  # fmt: skip


def test_chat(url: str) -> None:
    """A completion has the answer and usage."""
    reply = litellm.completion(messages=TALK, **options(url))
    assert reply.choices[0].message.content == ANSWER
    assert reply.usage.completion_tokens > 0


async def test_stream(url: str) -> None:
    """A stream joins to the answer."""
    stream = await litellm.acompletion(messages=TALK, stream=True, **options(url))
    assert "".join([one.choices[0].delta.content or "" async for one in stream]) == ANSWER


def test_tools(url: str) -> None:
    """A tool call and its result make a round trip."""
    function = {
        "name": "get_weather", "description": "Get the weather in a city",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        },
    }  # fmt: skip
    tools = [{"type": "function", "function": function}]
    talk: list[Any] = [{"role": "user", "content": PARIS}]
    message = litellm.completion(messages=talk, tools=tools, **options(url)).choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    talk += [message, {"role": "tool", "tool_call_id": call.id, "content": '{"temp_c": 21}'}]
    reply = litellm.completion(messages=talk, tools=tools, **options(url))
    assert "21" in reply.choices[0].message.content


def test_structured(url: str) -> None:
    """A Pydantic class as the format is enforced."""
    reply = litellm.completion(
        messages=[{"role": "user", "content": TOM}], response_format=Person, **options(url)
    )
    Person.model_validate_json(reply.choices[0].message.content)


def test_logprobs(url: str) -> None:
    """Log-probabilities are kept."""
    reply = litellm.completion(messages=TALK, logprobs=True, top_logprobs=2, **options(url))
    content = reply.choices[0].logprobs.content
    assert "".join(one.token for one in content) == ANSWER


def test_completions(url: str) -> None:
    """The legacy route answers."""
    reply = litellm.text_completion(
        prompt=JAPAN,
        **options(url, model="text-completion-openai/demo", max_tokens=9),
    )
    assert "Tokyo" in reply.choices[0].text


def test_errors(url: str) -> None:
    """Errors are litellm's own exceptions, also the one for a prompt that is too long."""
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 5000}], **options(url))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=TALK, **options(url, model="openai/another"))


def test_embeddings(embedding_url: str, embedded: Any) -> None:
    """`embedding` has the right vectors, and an error is LiteLLM's own."""
    known = {"model": "openai/demo", "api_base": embedding_url, "api_key": "unused"}
    reply = litellm.embedding(input=embedded.texts, **known)
    embedded.check([item["embedding"] for item in reply.data])
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.embedding(input=["word " * 5000], **known)
