"""Tests of the official `anthropic` client: messages, streams, tools, formats, counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

# The plain and the beta client have types of their own for the same messages.
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
ANSWER = "The capital of France is Paris."
# The SDK has no argument for it.
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def sdk(address: str) -> Iterator[Anthropic]:
    """Yield a client, which validates responses strictly and repeats no request."""
    with Anthropic(
        base_url=address, api_key="x", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_a_message(sdk: Anthropic) -> None:
    """A message has the expected answer, a request id, and as many tokens as are counted."""
    made = sdk.messages.create(model="m", max_tokens=40, messages=ASK, extra_body=GREEDY)
    (block,) = made.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert made.stop_reason == "end_turn"
    assert made._request_id is not None
    assert made._request_id.startswith("req_")
    usage = made.usage
    counted = sdk.messages.count_tokens(model="m", messages=ASK)
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stream(sdk: Anthropic) -> None:
    """The stream helper has the texts, and the same message at the end."""
    with sdk.messages.stream(model="m", max_tokens=40, messages=ASK, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert [block.model_dump()["text"] for block in final.content] == [ANSWER]
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 7)


def test_a_beta_stream_of_raw_events(sdk: Anthropic) -> None:
    """The beta client sends a query, and reads each event by its type."""
    events: Any = sdk.beta.messages.create(
        model="m", max_tokens=40, messages=ASK, stream=True, extra_body=GREEDY, betas=["new-beta"]
    )
    types = [event.type for event in events]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@beta_tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    asked.append(city)
    return '{"temp_c": 21}'


asked: list[str] = []


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(sdk: Anthropic, stream: bool) -> None:
    """The SDK's runner calls a tool, sends its result, and gets the answer."""
    asked.clear()
    runner: Any = sdk.beta.messages.tool_runner(
        model="m",
        max_tokens=100,
        messages=WEATHER,
        tools=[get_weather],
        stream=stream,
        extra_body=GREEDY,
    )
    final = runner.until_done()
    assert asked == ["Paris"]
    assert final.content[0].text == "It is 21 degrees in Paris."


class City(BaseModel):
    """A city, as the model answers it."""

    city: str
    is_capital: bool


def test_a_parsed_answer(sdk: Anthropic) -> None:
    """An answer with a format is parsed into the client's type."""
    made = sdk.messages.parse(
        model="m", max_tokens=100, messages=ASK, output_format=City, extra_body=GREEDY
    )
    assert isinstance(made.parsed_output, City)


def test_models(sdk: Anthropic) -> None:
    """Models are listed page by page, and retrieved."""
    (model,) = [*sdk.models.list(limit=1)]
    assert sdk.models.retrieve(model.id).max_input_tokens == 2048


def test_errors(sdk: Anthropic) -> None:
    """Errors have the SDK's own classes, and the message for a prompt that is too long."""
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* maximum") as error:
        sdk.messages.create(
            model="m", max_tokens=1, messages=[{"role": "user", "content": "word " * 5000}]
        )
    assert error.value.request_id is not None
    with pytest.raises(anthropic.NotFoundError):
        sdk.get("/v1/files", cast_to=object)
