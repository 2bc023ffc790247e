"""Tests of responses in the background with the official `openai` client on the real engines."""

from __future__ import annotations

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response


def poll(responses_sdk: OpenAI, made: Response) -> Response:
    """Retrieve a response until it has ended."""
    while made.status in ("queued", "in_progress"):
        made = responses_sdk.responses.retrieve(made.id)
    return made


def test_poll(responses_sdk: OpenAI) -> None:
    """A response in the background is polled to its end, and deleted."""
    made = responses_sdk.responses.create(
        model="demo", input="Count to 5.", temperature=0, background=True
    )
    assert (made.status, made.background) == ("queued", True)
    assert poll(responses_sdk, made).output_text == "1, 2, 3, 4, 5."
    responses_sdk.responses.delete(made.id)
    with pytest.raises(NotFoundError):
        responses_sdk.responses.retrieve(made.id)


def test_a_stream_that_breaks_is_continued(responses_sdk: OpenAI) -> None:
    """A client that left a stream gets the rest of its events, and the stream helper all."""
    stream = responses_sdk.responses.create(
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
    rest = responses_sdk.responses.retrieve(
        name, stream=True, starting_after=seen[-1].sequence_number
    )
    seen += [*rest]
    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    assert seen[-1].type == "response.completed"
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == seen[-1].response.output_text
    with responses_sdk.responses.stream(response_id=name) as again:
        kinds = [event.type for event in again]
        assert again.get_final_response().output_text == text
    assert kinds[-1] == "response.completed"


def test_cancel(responses_sdk: OpenAI) -> None:
    """A response in the background is cancelled; one that a client waited for cannot be."""
    made = responses_sdk.responses.create(model="demo", input="Count to 12.", background=True)
    first = responses_sdk.responses.cancel(made.id)
    assert first.status in ("cancelled", "completed")
    assert responses_sdk.responses.cancel(made.id) == first
    waited = responses_sdk.responses.create(model="demo", input="x", max_output_tokens=16)
    with pytest.raises(BadRequestError, match="Cannot cancel a synchronous response"):
        responses_sdk.responses.cancel(waited.id)
