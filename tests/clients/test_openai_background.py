"""Tests of responses in the background with the official `openai` client on the real engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response
from support.servers import serving


@pytest.fixture(scope="module", params=["llama_cpp", "llama_server"])
def client(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    """Serve the demo model of an engine; yield a client that validates responses strictly."""

    def make() -> OpenAIAdapter:
        backend: Backend = LlamaCpp()
        if request.param == "llama_server":
            backend = LlamaServer(request.getfixturevalue("llama_server_url"))
        return OpenAIAdapter(backend, any_model=True)

    with (
        serving(make) as address,
        OpenAI(
            base_url=f"{address}/v1", api_key="x", _strict_response_validation=True, max_retries=0
        ) as made,
    ):
        yield made


def poll(client: OpenAI, made: Response) -> Response:
    """Retrieve a response until it has ended."""
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    return made


def test_poll(client: OpenAI) -> None:
    """A response in the background is polled to its end, and deleted."""
    made = client.responses.create(
        model="demo", input="Count to 5.", temperature=0, background=True
    )
    assert (made.status, made.background) == ("queued", True)
    assert poll(client, made).output_text == "1, 2, 3, 4, 5."
    client.responses.delete(made.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_that_breaks_is_continued(client: OpenAI) -> None:
    """A client that left a stream gets the rest of its events, and the stream helper all."""
    stream = client.responses.create(
        model="demo", input="Count to 12.", temperature=0, background=True, stream=True
    )
    seen, name = [], ""
    for event in stream:
        seen.append(event)
        if event.type == "response.created":
            name = event.response.id
        if event.type == "response.output_text.delta":
            break
    stream.close()
    rest = client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
    seen += [*rest]
    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    assert seen[-1].type == "response.completed"
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == seen[-1].response.output_text
    with client.responses.stream(response_id=name) as again:
        kinds = [event.type for event in again]
        assert again.get_final_response().output_text == text
    assert kinds[-1] == "response.completed"


def test_cancel(client: OpenAI) -> None:
    """A response in the background is cancelled; one that a client waited for cannot be."""
    made = client.responses.create(model="demo", input="Count to 12.", background=True)
    first = client.responses.cancel(made.id)
    assert first.status in ("cancelled", "completed")
    assert client.responses.cancel(made.id) == first
    waited = client.responses.create(model="demo", input="x", max_output_tokens=16)
    with pytest.raises(BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(waited.id)
