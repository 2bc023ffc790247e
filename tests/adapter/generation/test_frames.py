"""Tests that prebuilt frames equal the serialized chunks."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.chat.message import ChatEncoder
from latimer.adapter.errors import DONE
from latimer.adapter.generation.choice import Delta
from latimer.adapter.generation.frames import CompletionEncoder
from latimer.adapter.generation.logprobs import Entry, to_chat, to_legacy
from latimer.backends.base import Token
from latimer.backends.errors import EngineError
from latimer.schemas.openai.chat import ChatChunk, ChatChunkChoice
from latimer.schemas.openai.completions import CompletionChunk, CompletionChunkChoice

HEAD: dict[str, Any] = {
    "id": "x",
    "object": "o",
    "created": 1,
    "model": "é\n",
    "system_fingerprint": "f",
}
USAGE: Any = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def frame(choices: list[Any], include_usage: bool, usage: Any = None) -> bytes:
    """Return a frame made by serializing the chunk."""
    chunk = {**HEAD, "choices": choices, **({"usage": usage} if include_usage else {})}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


@given(st.text(), st.integers(0, 300), st.booleans())
def test_completion_frames(text: str, index: int, include_usage: bool) -> None:
    """A completion's text and end frames are byte for byte the serialized chunks."""
    frames = CompletionEncoder(HEAD, include_usage)
    choice: CompletionChunkChoice = {
        "text": text, "index": index, "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert frames.texts(index, [text, text]) == 2 * frame([choice], include_usage)
    choice = {"text": "", "index": index, "logprobs": None, "finish_reason": "stop"}
    assert frames.end(index, "stop") == frame([choice], include_usage)
    assert frames.start(index) == b""
    assert set(choice) == set(CompletionChunkChoice.__annotations__)
    assert {*HEAD, "choices", "usage", "obfuscation"} == set(CompletionChunk.__annotations__)


@given(st.text(), st.integers(0, 300), st.booleans())
def test_chat_frames(text: str, index: int, include_usage: bool) -> None:
    """A chat's role, content and end frames are byte for byte the serialized chunks."""
    frames = ChatEncoder(HEAD, include_usage)
    choice: ChatChunkChoice = {
        "index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert frames.texts(index, [text, text]) == 2 * frame([choice], include_usage)
    choice["delta"] = {"role": "assistant", "content": "", "refusal": None}
    assert frames.start(index) == frame([choice], include_usage)
    choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert frames.end(index, "length") == frame([choice], include_usage)
    assert set(choice) == set(ChatChunkChoice.__annotations__)
    optional = {"usage", "service_tier", "obfuscation"}
    assert {*HEAD, "choices"} | optional == set(ChatChunk.__annotations__)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_the_end_of_a_stream(kind: str) -> None:
    """A stream ends with a usage chunk, if requested, and `[DONE]`."""
    for include_usage in (True, False):
        frames = (
            CompletionEncoder(HEAD, include_usage)
            if kind == "completions"
            else ChatEncoder(HEAD, include_usage)
        )
        expected = frame([], True, USAGE) if include_usage else b""
        assert frames.close(USAGE) == expected + DONE


def test_frames_with_tokens() -> None:
    """Frames with log-probabilities equal the serialized chunks, and chat's last frame has none."""
    completion = CompletionEncoder(HEAD, False, lambda entries: to_legacy(entries, 0))
    shown: Any = {
        "tokens": ["a"],
        "token_logprobs": [-1.5],
        "top_logprobs": None,
        "text_offset": [0],
    }
    entry = Entry(Token(7, b"a", b"a", False, -1.5), 0)
    choice: Any = {"text": "a", "index": 2, "logprobs": shown, "finish_reason": None}
    assert completion.delta(2, Delta("a", [entry])) == frame([choice], False)
    shown = {"tokens": [], "token_logprobs": [], "top_logprobs": None, "text_offset": []}
    choice = {"text": "", "index": 2, "logprobs": shown, "finish_reason": "length"}
    assert completion.end(2, "length") == frame([choice], False)
    chat = ChatEncoder(HEAD, False, to_chat)
    assert b'"logprobs":{"content":[],"refusal":null}' in chat.start(0)
    assert b'"logprobs":null' in chat.end(0, "stop")


def test_an_error_in_mid_stream() -> None:
    """An error in a stream is an event with an error object, followed by `[DONE]`."""
    data = ChatEncoder(HEAD, True).error(EngineError("boom"))
    event, done, rest = data.split(b"\n\n")
    assert orjson.loads(event.removeprefix(b"data: ")) == {
        "error": {"message": "boom", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert (done, rest) == (b"data: [DONE]", b"")
