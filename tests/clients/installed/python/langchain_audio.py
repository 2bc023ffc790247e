"""LangChain's `ChatOpenAI` with audio in its answers."""

from __future__ import annotations

import base64
import os
from typing import Any

import openai
import pytest
from common import ANSWER, ASK
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI

WORDS = [one.split("=", 1) for one in os.environ["LATIMER_AUDIO"].split()]


@pytest.fixture(params=[f"{url}/v1" for _, url in WORDS], ids=[name for name, _ in WORDS])
def url(request: pytest.FixtureRequest) -> str:
    """Return the base URL of a server that speaks."""
    return str(request.param)


def spoken(url: str, form: str, voice: str = "alloy") -> Any:
    """Return a model whose answers are spoken."""
    return ChatOpenAI(
        base_url=url, api_key="unused", model="demo", temperature=0, max_retries=0,
        model_kwargs={"modalities": ["text", "audio"], "audio": {"voice": voice, "format": form}},
    )  # fmt: skip


def test_spoken_chat(url: str) -> None:
    """An answer has a file and its transcript, and continues a conversation as a message."""
    model = spoken(url, "wav")
    found = model.invoke(ASK)
    audio = found.additional_kwargs["audio"]
    assert audio["transcript"] == ANSWER
    assert base64.b64decode(audio["data"])[:4] == b"RIFF"
    again = model.invoke([HumanMessage(ASK), found, HumanMessage(ASK)])
    assert again.additional_kwargs["audio"]["transcript"]
    # As its documentation does: only the id is sent back.
    short = AIMessage("", additional_kwargs={"audio": {"id": audio["id"]}})
    same = model.invoke([HumanMessage(ASK), short, HumanMessage(ASK)])
    assert same.additional_kwargs["audio"]["transcript"]


def test_spoken_chat_stream(url: str) -> None:
    """A spoken stream is read to its end."""
    chunks = list(spoken(url, "pcm16").stream(ASK))
    assert chunks[-1].response_metadata or chunks


def test_errors(url: str) -> None:
    """An unknown voice is the SDK's error."""
    with pytest.raises(openai.BadRequestError, match="nobody"):
        spoken(url, "wav", "nobody").invoke(ASK)
