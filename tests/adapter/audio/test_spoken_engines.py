"""Tests of spoken answers over each engine, with models that generate a script."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.identity import LazyBackend
from latimer.backends.koboldcpp import KoboldCpp
from support import scripted
from support.clients import adapting
from support.engines.koboldcpp import koboldcpp
from support.engines.paced_speaker import PER_CHARACTER, PacedSpeaker
from support.spoken import PATH, SPOKEN, STREAMED, events, joined

ANSWER = ("It is", " Paris", ".", " Go", " there", "!")
TEXT = "".join(ANSWER)
SAMPLES = (len("It is Paris.") + len("Go there!")) * PER_CHARACTER
CALL = ('<tool_call>{"name": "f", ', '"arguments": {"a": 5}', "}</tool_call>")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")
Ask = Callable[..., Any]


@pytest.fixture(params=ENGINES)
def asking(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a client factory for an engine with a speaker, and a model with a script."""

    @asynccontextmanager
    async def ask(
        script: Sequence[str] = ANSWER, template: str = scripted.CHATML
    ) -> AsyncIterator[Ask]:
        engine = scripted.scripted_engine(request.param, tmp_path, script, template)
        async with engine as backend, adapting(backend, speaker=PacedSpeaker()) as client:

            async def send(**body: Any) -> Any:
                messages = [{"role": "user", "content": "Hi"}]
                full = {
                    "model": "m", "messages": messages, "temperature": 0, "max_tokens": 100, **body
                }  # fmt: skip
                reply = await client.post(PATH, json=full)
                assert reply.status_code == 200, reply.text
                return events(reply) if body.get("stream") else reply.json()

            yield send

    return ask


def wav(samples: bytes) -> bytes:
    """Return a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 24_000, 0, "NONE", ""))
        writer.writeframes(samples)
    return file.getvalue()


def ids_of(choice: Any) -> list[int]:
    """Return the token ids of a choice, if it has any."""
    return [one["id"] for one in (choice["logprobs"] or {"content": ()})["content"]]


async def test_speech_changes_no_token(asking: Any, request: pytest.FixtureRequest) -> None:
    """A transcript has the tokens of the same request without audio, plain and streamed."""
    shown = {"logprobs": True, "logprobs_token_ids": True}
    if "koboldcpp" in request.node.name:
        # It has no log-probabilities of greedy sampling.
        shown = {}
    async with asking() as ask:
        text = await ask(**shown)
        plain = await ask(**shown, **SPOKEN)
        stream = await ask(**shown, **STREAMED)
        options = {"include_usage": True}
        *unseen, usage = await ask(**STREAMED, stream_options=options)
    assert text["choices"][0]["message"]["content"] == TEXT
    choice = plain["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["audio"]["transcript"] == TEXT
    assert ids_of(choice) == ids_of(text["choices"][0])
    assert plain["usage"]["completion_tokens"] == text["usage"]["completion_tokens"]
    with wave.open(io.BytesIO(base64.b64decode(choice["message"]["audio"]["data"]))) as file:
        assert file.getnframes() == SAMPLES
    for chunks in (stream, unseen):
        found = joined(chunks)
        assert (found["transcript"], len(found["data"])) == (TEXT, 2 * SAMPLES)
        assert found["finish_reason"] == "stop"
    assert [one for chunk in stream for one in ids_of(chunk["choices"][0])] == ids_of(choice)
    assert usage["usage"]["completion_tokens"] == text["usage"]["completion_tokens"]


@pytest.mark.parametrize("fields", [SPOKEN, STREAMED])
async def test_koboldcpp_speaks_with_its_own_model(fields: dict[str, Any]) -> None:
    """Without another speaker, koboldcpp speaks what it has generated, one call at a time."""
    samples = bytes(range(200)) * 24
    async with koboldcpp(scripted.CHATML, TEXT) as (fake, own):
        fake.version, fake.wav = {"tts": True}, wav(samples)

        async def find() -> KoboldCpp:
            return own

        # The backend of `latimer serve URL`.
        async with adapting(LazyBackend(find)) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
            body["audio"] = {**fields["audio"], "voice": "cheery"}
            reply = await client.post(PATH, json=body)
            models = (await client.get("/v1/models")).json()["data"]
    assert reply.status_code == 200, reply.text
    if fields is STREAMED:
        found = joined(events(reply))
        assert (found["transcript"], found["data"]) == (TEXT, 2 * samples)
    else:
        audio = reply.json()["choices"][0]["message"]["audio"]
        with wave.open(io.BytesIO(base64.b64decode(audio["data"]))) as file:
            assert file.readframes(file.getnframes()) == 2 * samples
    assert [(one["input"], one["voice"]) for one in fake.spoken] == [
        ("It is Paris.", "cheery"), ("Go there!", "cheery")
    ]  # fmt: skip
    assert models[0]["architecture"]["output_modalities"] == ["text", "audio"]


@pytest.mark.parametrize("legacy", [False, True])
async def test_a_call_is_not_spoken(asking: Any, legacy: bool) -> None:
    """A turn of calls only has calls and no audio, plain and streamed."""
    tools = {"functions": [TOOLS[0]["function"]]} if legacy else {"tools": TOOLS}
    name = "function_call" if legacy else "tool_calls"
    async with asking(CALL, scripted.HERMES) as ask:
        plain = await ask(**tools, **SPOKEN)
        stream = await ask(**tools, **STREAMED)
    message = plain["choices"][0]["message"]
    assert message["content"] is None
    assert "audio" not in message
    assert message[name]
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    assert not any("audio" in delta or "content" in delta for delta in deltas)
    assert deltas[0]["role"] == "assistant"
    assert any(name in delta for delta in deltas)
    assert stream[-1]["choices"][0]["finish_reason"] == name


async def test_the_text_before_a_call_is_spoken(asking: Any) -> None:
    """A turn with text and a call has both the audio of the text and the call."""
    async with asking(("I look", ".", *CALL), scripted.HERMES) as ask:
        plain = await ask(tools=TOOLS, **SPOKEN)
        stream = await ask(tools=TOOLS, **STREAMED)
    message = plain["choices"][0]["message"]
    assert message["audio"]["transcript"] == "I look."
    assert message["tool_calls"][0]["function"]["name"] == "f"
    found = joined(stream)
    assert found["transcript"] == "I look."
    assert len(found["data"]) == 2 * len("I look.") * PER_CHARACTER
    assert found["finish_reason"] == "tool_calls"


async def test_reasoning_is_not_spoken(asking: Any) -> None:
    """Reasoning is text in its own field; the transcript and the samples are the answer's."""
    script = ("Hm. Well.", "\n</think>\n\n", *ANSWER)
    async with asking(script, scripted.THINKING) as ask:
        plain = await ask(**SPOKEN)
        stream = await ask(**STREAMED)
    message = plain["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm. Well."
    assert message["audio"]["transcript"] == TEXT
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
        assert file.getnframes() == SAMPLES
    found = joined(stream)
    assert (found["transcript"], len(found["data"])) == (TEXT, 2 * SAMPLES)
    thought = [chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in stream]
    assert "".join(thought) == "Hm. Well."


async def test_a_stop_sequence_ends_the_speech(asking: Any) -> None:
    """Text after a stop sequence is neither in the transcript nor spoken."""
    async with asking() as ask:
        plain = await ask(stop=" Go", **SPOKEN)
        stream = await ask(stop=" Go", **STREAMED)
    assert plain["choices"][0]["message"]["audio"]["transcript"] == "It is Paris."
    found = joined(stream)
    assert found["transcript"] == "It is Paris."
    assert len(found["data"]) == 2 * len("It is Paris.") * PER_CHARACTER
