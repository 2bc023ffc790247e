"""Tests of chat with audio out: a scripted speaker, and texts that the test chooses."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import AsyncIterator
from typing import Any

import av
import pytest
from latimer.backends.errors import EngineError, EngineUnavailable, Unspoken
from latimer.backends.speech.base import Pcm, Utterance
from support.clients import adapting
from support.engines.echo import Echo
from support.engines.paced_speaker import PER_CHARACTER, PacedSpeaker
from support.spoken import PATH, SENTENCES, SPOKEN, STREAMED, TEXT, asked, events, joined

SAMPLES = sum(map(len, SENTENCES)) * PER_CHARACTER


async def test_an_answer_is_a_file_with_its_transcript() -> None:
    """A plain answer has null content, the exact text, and a WAV file of its sentences."""
    speaker = PacedSpeaker()
    async with adapting(Echo(), speaker=speaker) as client:
        reply = await client.post(PATH, json=asked(**SPOKEN))
    assert reply.status_code == 200, reply.text
    assert "x-latimer-inexact" not in reply.headers
    body = reply.json()
    message = body["choices"][0]["message"]
    audio = message.pop("audio")
    assert message == {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    assert audio["id"].startswith("audio_")
    assert audio["expires_at"] > body["created"]
    assert audio["transcript"] == TEXT
    with wave.open(io.BytesIO(base64.b64decode(audio["data"]))) as file:
        assert (file.getframerate(), file.getnframes()) == (24_000, SAMPLES)
    assert [one.text for one in speaker.spoken] == [*SENTENCES]
    assert {one.voice for one in speaker.spoken} == {"low"}
    assert body["usage"]["completion_tokens_details"]["audio_tokens"] == 0
    assert body["usage"]["completion_tokens"] == len(TEXT)


async def test_a_stream_has_partial_audio() -> None:
    """Its deltas have the id first, texts, samples of at most 0.4 s, and the expiry at the end."""
    async with adapting(Echo(), speaker=PacedSpeaker()) as client:
        options = {"include_usage": True}
        reply = await client.post(PATH, json=asked(**STREAMED, stream_options=options))
    *chunks, usage = events(reply)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert deltas[0]["audio"]["id"].startswith("audio_")
    assert deltas[0]["audio"]["transcript"] == TEXT[0]
    assert [("id" in delta.get("audio", {})) for delta in deltas].count(True) == 1
    found = joined(chunks)
    assert (found["transcript"], len(found["data"])) == (TEXT, 2 * SAMPLES)
    assert found["finish_reason"] == "stop"
    assert list(deltas[-2]["audio"]) == ["expires_at"]
    assert deltas[-1] == {}
    sizes = [
        len(base64.b64decode(d["audio"]["data"])) for d in deltas if "data" in d.get("audio", {})
    ]
    assert max(sizes) == 19_200
    # The last frame of a sentence may be shorter.
    assert sum(size < 19_200 for size in sizes) <= len(SENTENCES)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(TEXT)


async def test_each_choice_is_spoken() -> None:
    """With `n`, each choice has its own audio and id, in the order of OpenAI's stream."""
    speaker = PacedSpeaker()
    async with adapting(Echo(), speaker=speaker) as client:
        plain = (await client.post(PATH, json=asked("Hi there.", n=3, **SPOKEN))).json()
        stream = events(await client.post(PATH, json=asked("Hi there.", n=3, **STREAMED)))
    assert len({one["message"]["audio"]["id"] for one in plain["choices"]}) == 3
    seen: list[int] = []
    for chunk in stream:
        index = chunk["choices"][0]["index"]
        if index not in seen:
            assert index == len(seen)
            seen.append(index)
    for index in range(3):
        found = joined(stream, index)
        assert found["transcript"] == "Hi there."
        assert len(found["data"]) == 2 * 9 * PER_CHARACTER
        assert found["finish_reason"] == "stop"
    # A request speaks one sentence at a time.
    assert speaker.most == 1


async def test_samples_have_the_rate_of_the_format() -> None:
    """pcm16 has 24,000 samples a second for every speaker; a WAV file has the speaker's rate."""
    speaker = PacedSpeaker(rate=16_000)
    async with adapting(Echo(), speaker=speaker) as client:
        plain = (await client.post(PATH, json=asked(**SPOKEN))).json()
        found = joined(events(await client.post(PATH, json=asked(**STREAMED))))
    data = base64.b64decode(plain["choices"][0]["message"]["audio"]["data"])
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnframes()) == (16_000, SAMPLES)
    assert len(found["data"]) // 2 == pytest.approx(1.5 * SAMPLES, abs=64)
    # The app closes the speaker that it was given.
    assert speaker.closed == 1


class Silent(PacedSpeaker):
    """A speaker that returns no audio."""

    async def _pieces(self, utterance: Utterance) -> AsyncIterator[Pcm]:
        for _ in utterance.text:
            yield Pcm(b"", self.rate)


async def test_a_speaker_without_audio_is_an_error() -> None:
    """A sentence without audio is an error of the engine, never an empty file."""
    async with adapting(Echo(), speaker=Silent()) as client:
        reply = await client.post(PATH, json=asked(**SPOKEN))
    assert reply.status_code == 502
    assert reply.json()["error"]["message"] == "The speaker returned no audio for a sentence."


async def test_a_sentence_without_sound_is_omitted() -> None:
    """The answer is complete without it, also if it is the only one."""
    lengths = []
    for number in range(len(SENTENCES)):
        speaker = PacedSpeaker(error=Unspoken("tone"), fails_at=number)
        async with adapting(Echo(), speaker=speaker) as client:
            found = joined(events(await client.post(PATH, json=asked(**STREAMED))))
        assert (found["transcript"], found["finish_reason"]) == (TEXT, "stop")
        lengths.append(SAMPLES - len(found["data"]) // 2)
    assert lengths == [len(one) * PER_CHARACTER for one in SENTENCES]
    speaker = PacedSpeaker(error=Unspoken("tone"))
    async with adapting(Echo(script="Ciao!"), speaker=speaker) as client:
        reply = await client.post(PATH, json=asked(**SPOKEN))
    audio = reply.json()["choices"][0]["message"]["audio"]
    assert (audio["transcript"], set(base64.b64decode(audio["data"])[44:])) == ("Ciao!", {0})


@pytest.mark.parametrize("text", ["", " ", "...", "—"])
@pytest.mark.parametrize("form", ["wav", "mp3", "flac", "opus", "aac", "pcm16"])
async def test_an_answer_without_words_is_a_moment_of_silence(text: str, form: str) -> None:
    """An answer that has nothing to speak still is a file that decodes, with its text."""
    audio = {"voice": "low", "format": form}
    speaker = PacedSpeaker()
    async with adapting(Echo(script=text), speaker=speaker) as client:
        reply = await client.post(PATH, json=asked(**{**SPOKEN, "audio": audio}))
        chunks = events(await client.post(PATH, json=asked(**STREAMED)))
    message = reply.json()["choices"][0]["message"]
    assert message["audio"]["transcript"] == text
    data = base64.b64decode(message["audio"]["data"])
    if form != "pcm16":
        with av.open(io.BytesIO(data), "r") as file:
            assert sum(frame.samples for frame in file.decode(audio=0)) > 0
    found = joined(chunks)
    assert found["transcript"] == text
    assert found["finish_reason"] == "stop"
    assert set(found["data"]) == {0}
    assert speaker.spoken == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"modalities": ["text", "audio"]}, "audio", "Missing required parameter: 'audio'"),
        ({**SPOKEN, "modalities": ["audio"]}, "modalities", "['text', 'audio']"),
        ({**SPOKEN, "audio": {"format": "wav"}}, "audio.voice", "Missing"),
        ({**SPOKEN, "audio": {"voice": "low"}}, "audio.format", "Missing"),
        ({**SPOKEN, "audio": {"voice": "low", "format": "midi"}}, "audio.format", "'midi'"),
        ({**SPOKEN, "audio": {"voice": "bass", "format": "wav"}}, "audio.voice", "'low', 'high'"),
        ({**SPOKEN, "audio": {"voice": {"id": "bass"}, "format": "wav"}}, "audio.voice.id",
         "'low'"),
        ({**STREAMED, "audio": SPOKEN["audio"]}, "audio.format",
         "'audio.format' does not support 'wav' when stream=true. Supported values are: 'pcm16'."),
        ({**SPOKEN, "response_format": {"type": "json_object"}}, "response_format", "audio"),
        ({**SPOKEN, "response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"type": "object"}}}},
         "response_format", "audio"),
        ({**SPOKEN, "audio": {"voice": {"id": 3}, "format": "wav"}}, "audio.voice.id",
         "expected a string, but got an integer"),
        ({**SPOKEN, "audio": {"voice": {}, "format": "wav"}}, "audio.voice.id", "Missing"),
        ({**SPOKEN, "oai_compat": False}, "modalities", "oai_compat"),
    ],
)  # fmt: skip
async def test_what_cannot_be_spoken_is_refused(
    fields: dict[str, Any], param: str, words: str
) -> None:
    """A 400 names the field and what is supported, and nothing is generated."""
    backend = Echo()
    async with adapting(backend, speaker=PacedSpeaker()) as client:
        reply = await client.post(PATH, json=asked(**fields))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not backend.jobs


async def test_without_a_speaker_the_modality_is_refused() -> None:
    """The error names `modalities` and the option; `audio` alone has no effect."""
    async with adapting(Echo()) as client:
        reply = await client.post(PATH, json=asked(**SPOKEN))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "modalities")
        assert error["code"] == "unsupported_parameter"
        assert "with speaker" in error["message"]
        for modalities in (None, ["text"]):
            reply = await client.post(PATH, json=asked(**{**SPOKEN, "modalities": modalities}))
            assert reply.status_code == 200
            assert reply.json()["choices"][0]["message"]["content"] == TEXT


async def test_a_voice_of_openai_is_inexact() -> None:
    """One of OpenAI's voices is spoken by one of the speaker's, and a header says so."""
    speaker = PacedSpeaker()
    fields = {**SPOKEN, "audio": {"voice": "ash", "format": "wav"}}
    async with adapting(Echo(), speaker=speaker) as client:
        reply = await client.post(PATH, json=asked(**fields))
    assert reply.headers["x-latimer-inexact"] == "audio.voice"
    assert {one.voice for one in speaker.spoken} == {"high"}
    async with adapting(Echo(), speaker=PacedSpeaker(), strict=True) as client:
        reply = await client.post(PATH, json=asked(**fields))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "audio.voice")
    # The speaker is at fault, and not the engine of the model.
    assert "tone" in error["message"]
    assert "echo" not in error["message"]


async def test_unknown_fields_of_a_voice_are_listed() -> None:
    """They are like unknown fields elsewhere."""
    audio = {"voice": {"id": "high", "style": "sad"}, "format": "wav"}
    async with adapting(Echo(), speaker=PacedSpeaker()) as client:
        reply = await client.post(PATH, json=asked(**{**SPOKEN, "audio": audio}))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-latimer-ignored"] == "audio.voice.style"


@pytest.mark.parametrize(
    ("error", "status"), [(EngineError("hoarse"), 502), (EngineUnavailable("out"), 503)]
)
async def test_an_error_of_the_speaker_has_its_status(error: Exception, status: int) -> None:
    """A plain response is the error; a stream keeps what it has sent and ends with an event."""
    speaker = PacedSpeaker(error=error, fails_at=1)
    async with adapting(Echo(), speaker=speaker) as client:
        reply = await client.post(PATH, json=asked(**SPOKEN))
        assert reply.status_code == status, reply.text
        speaker.spoken.clear()
        reply = await client.post(PATH, json=asked(**STREAMED))
    *chunks, last = events(reply)
    assert last["error"]["message"] == str(error)
    assert len(joined(chunks)["data"]) == 2 * len(SENTENCES[0]) * PER_CHARACTER
    assert "finish_reason" not in joined(chunks)
    assert speaker.running == 0


async def test_chunks_of_audio_are_padded_if_asked() -> None:
    """`include_obfuscation` pads frames with audio as it pads those with text."""
    async with adapting(Echo(), speaker=PacedSpeaker()) as client:
        options = {"include_obfuscation": True, "include_usage": True}
        reply = await client.post(PATH, json=asked(**STREAMED, stream_options=options))
    chunks = events(reply)
    assert all("obfuscation" in chunk for chunk in chunks)
    assert joined(chunks)["transcript"] == TEXT


async def test_log_probabilities_are_those_of_the_transcript() -> None:
    """`logprobs` has the tokens of the spoken text, plain and streamed."""
    async with adapting(Echo(), speaker=PacedSpeaker()) as client:
        plain = await client.post(PATH, json=asked(**SPOKEN, logprobs=True))
        stream = await client.post(PATH, json=asked(**STREAMED, logprobs=True))
    tokens = plain.json()["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in tokens) == TEXT
    chunks = events(stream)
    streamed = [
        one for c in chunks for one in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == tokens
    assert joined(chunks)["transcript"] == TEXT


async def test_models_speak_only_with_a_speaker() -> None:
    """`output_modalities` has audio if answers can be spoken."""
    for speaker, outputs in ((None, ["text"]), (PacedSpeaker(), ["text", "audio"])):
        async with adapting(Echo(), speaker=speaker) as client:
            models = (await client.get("/v1/models")).json()["data"]
        assert models[0]["architecture"]["output_modalities"] == outputs
