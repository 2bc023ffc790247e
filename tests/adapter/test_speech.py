"""Tests of `POST /v1/audio/speech` and `GET /v1/audio/voices` over a scripted speaker."""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import KeyConfig, digest_of
from latimer.adapter.request_log import RequestLog
from latimer.backends.errors import Busy, EngineError, Unspoken
from latimer.backends.speech.base import Speaker, Utterance
from support.audio import decoded
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.paced_speaker import PER_CHARACTER, PacedSpeaker
from support.engines.speaker import CHARACTER, Tone
from support.servers import serving
from support.turns import measured

S = "/v1/audio/speech"
TEXT = "The first sentence is short. The second one is a little longer. And this is the last."
LENGTHS = [len(one) + 1 for one in TEXT[:-1].split(". ")]
# Seconds that frames of a fixed length may add.
PADDING = 0.13
# Seconds of CPU time. The design limit is 5 ms; the rest is tolerance for a busy machine.
LONGEST = 0.02


def app_of(speaker: Speaker | None = None, **options: Any) -> OpenAIAdapter:
    """Return an adapter without a model, with a speaker."""
    return OpenAIAdapter(Echo(), speaker=speaker or Tone(), any_model=True, **options)


async def ask(app: OpenAIAdapter, **body: Any) -> httpx2.Response:
    """Send a request for speech."""
    async with client_of(app) as client:
        given = {"model": "echo", "input": TEXT, "voice": "anna", **body}
        sent = {name: value for name, value in given.items() if value is not None}
        reply: httpx2.Response = await client.post(S, json=sent)
        return reply


def events_of(text: str) -> list[Any]:
    """Return the data of the events of a stream."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("form", "media"),
    [
        (None, "audio/mpeg"), ("mp3", "audio/mpeg"), ("opus", "audio/opus"), ("aac", "audio/aac"),
        ("flac", "audio/flac"), ("wav", "audio/wav"), ("pcm", "audio/pcm"),
    ],
)  # fmt: skip
async def test_every_format(form: str | None, media: str) -> None:
    """Each format decodes to the length of what was spoken; mp3 is the default."""
    reply = await ask(app_of(), response_format=form)
    assert (reply.status_code, reply.headers["content-type"]) == (200, media), reply.text
    samples, rate = decoded(reply.content, form or "mp3")
    assert -0.001 < len(samples) / rate - sum(LENGTHS) * CHARACTER < PADDING
    assert rate == {"opus": 48_000, "pcm": 24_000}.get(form or "", 22_050)


async def test_each_sentence_is_spoken_by_itself() -> None:
    """The speaker gets one sentence at a time, with the same ticket and voice."""
    speaker = Tone()
    await ask(app_of(speaker), input="One.  Two!\n\n---\nThree", voice="bela")
    assert [one.text for one in speaker.spoken] == ["One.", "Two!", "Three"]
    assert {(one.voice, one.ticket) for one in speaker.spoken} == {
        ("bela", speaker.spoken[0].ticket)
    }


@pytest.mark.parametrize("form", ["mp3", "wav"])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_sentence_without_sound_is_omitted(number: int, form: str) -> None:
    """The others are spoken, as if the voice had got no more than them."""
    speaker = PacedSpeaker(error=Unspoken("tone"), fails_at=number)
    reply = await ask(app_of(speaker), voice="low", response_format=form)
    samples, rate = decoded(reply.content, form)
    heard = (sum(LENGTHS) - LENGTHS[number]) * PER_CHARACTER / 24_000
    assert -0.001 < len(samples) / rate - heard < PADDING


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_a_text_without_sound(stream_format: str) -> None:
    """A voice that has no sound for any sentence is an error of the text."""
    speaker = PacedSpeaker(error=Unspoken("tone"))
    body = {"input": "Ciao!", "voice": "low", "stream_format": stream_format}
    reply = await ask(app_of(speaker), **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input")
    assert "no sound" in error["message"]


async def test_a_short_wav_file_has_its_sizes() -> None:
    """One sentence is sent as a whole; of several, the sizes are not known yet."""
    short = await ask(app_of(), input="Hello.", response_format="wav")
    with wave.open(io.BytesIO(short.content)) as file:
        assert file.getnframes() == int(22_050 * CHARACTER * 6)
    assert int(short.headers["content-length"]) == len(short.content)
    long = await ask(app_of(), response_format="wav")
    assert "content-length" not in long.headers
    assert long.content[40:44] == b"\xff\xff\xff\xff"


@pytest.mark.parametrize(("speed", "form"), [
    (0.25, "pcm"), (0.5, "mp3"), (0.9, "wav"), (1.5, "flac"), (2, "pcm"), (4, "wav"),
])  # fmt: skip
async def test_speed_divides_the_length(speed: float, form: str) -> None:
    """The audio takes its time divided by the speed, and keeps its pitch; no field is listed."""
    reply = await ask(app_of(), input=TEXT * 4, response_format=form, speed=speed)
    samples, rate = decoded(reply.content, form)
    seconds = len(samples) / rate
    assert abs(seconds - 4 * sum(LENGTHS) * CHARACTER / speed) < PADDING
    assert not {"x-latimer-ignored", "x-latimer-inexact"} & reply.headers.keys()
    middle = samples[len(samples) // 4 : len(samples) // 2]
    crossings = sum(one < 0 <= other for one, other in itertools.pairwise(middle))
    # Anna's tone.
    assert abs(crossings / (len(middle) / rate) - 300) < 20


@pytest.mark.parametrize("is_strict", [False, True])
async def test_what_the_speaker_ignores(is_strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields without effect are listed, unknown ones too; a strict server refuses them."""
    # Without the library of the encoders, there is one speed.
    monkeypatch.setattr("latimer.adapter.endpoints.audio.has_encoders", lambda: False)
    speaker = Tone()
    app = app_of(speaker, strict=is_strict)
    body: dict[str, Any] = {"speed": 0.5, "instructions": "Whisper.", "response_format": "wav"}
    reply = await ask(app, **body)
    if is_strict:
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "speed")
        assert "tone" in error["message"]
        return
    assert reply.headers["x-latimer-ignored"] == "instructions, speed"
    assert speaker.spoken[0].instructions == ""
    assert len(decoded(reply.content, "wav")[0]) == int(sum(LENGTHS) * CHARACTER * 22_050)
    unknown = await ask(app, pitch=3, voice={"id": "anna", "style": "sad"})
    assert unknown.headers["x-latimer-ignored"] == "pitch, voice.style"
    takes = Tone(takes_instructions=True)
    assert "x-latimer-ignored" not in (await ask(app_of(takes), instructions="Whisper.")).headers
    assert takes.spoken[0].instructions == "Whisper."


async def test_voices_of_openai_stand_for_those_of_the_speaker() -> None:
    """They are inexact, also as an object; the speaker's own are exact."""
    speaker = Tone()
    for voice, name, header in (
        ("carl", "carl", None), ({"id": "bela"}, "bela", None), ("alloy", "anna", "voice"),
        ({"id": "ash"}, "bela", "voice"), ("cedar", "anna", "voice"),
    ):  # fmt: skip
        reply = await ask(app_of(speaker), voice=voice, input="Hi.")
        assert reply.status_code == 200
        assert reply.headers.get("x-latimer-inexact") == header
        assert speaker.spoken[-1].voice == name
    strict = await ask(app_of(strict=True), voice="alloy")
    error = strict.json()["error"]
    assert (strict.status_code, error["param"]) == (400, "voice")
    assert "tone" in error["message"]
    assert "Use one of: 'anna', 'bela', 'carl'." in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "empty_string"),
        ({"input": "a" * 4097}, "input", "string_above_max_length"),
        ({"input": 3}, "input", "invalid_type"),
        ({"voice": None}, "voice", "missing_required_parameter"),
        ({"voice": "dora"}, "voice", "invalid_value"),
        ({"voice": 3}, "voice", "invalid_type"),
        ({"voice": {}}, "voice.id", "missing_required_parameter"),
        ({"voice": {"id": "dora"}}, "voice.id", "invalid_value"),
        ({"voice": {"id": 3}}, "voice.id", "invalid_type"),
        ({"voice": {"id": None}}, "voice.id", "invalid_type"),
        ({"speed": 0.2}, "speed", "decimal_below_min_value"),
        ({"speed": 4.1}, "speed", "decimal_above_max_value"),
        ({"speed": "fast"}, "speed", "invalid_type"),
        ({"response_format": "midi"}, "response_format", "invalid_value"),
        ({"stream_format": "events"}, "stream_format", "invalid_value"),
        ({"instructions": "a" * 4097}, "instructions", "string_above_max_length"),
    ],
)
async def test_wrong_fields(body: dict[str, Any], param: str, code: str) -> None:
    """Each is a 400 that names the field; an unknown voice lists those that are known."""
    reply = await ask(app_of(), **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code), error
    if "dora" in str(body):
        assert "'anna', 'bela', 'carl'" in error["message"]


async def test_the_model_is_that_of_the_server_or_of_the_speaker() -> None:
    """Both names are accepted, and none; OpenAI's are inexact, and another one is a 404.

    Without anything that speaks, OpenAI's names are a path that is not served, as any model is.
    """
    app = OpenAIAdapter(Echo(), speaker=Tone(), model_names=["chat"])
    for name, header in (("chat", None), ("tone", None), (None, None), ("tts-1", "model")):
        reply = await ask(app, model=name)
        assert (reply.status_code, reply.headers.get("x-latimer-inexact")) == (200, header)
    reply = await ask(app, model="tts-2")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    silent = OpenAIAdapter(Echo(), model_names=["chat"])
    for name in ("tts-1", "chat"):
        error = (await ask(silent, model=name)).json()["error"]
        assert error["code"] == "unsupported_endpoint"


async def test_nothing_speaks() -> None:
    """Without a speaker, both paths are a 404 that names the option of the adapter."""
    app = OpenAIAdapter(Echo(), any_model=True)
    async with client_of(app) as client:
        for reply in (await ask(app), await client.get("/v1/audio/voices")):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (404, "unsupported_endpoint")
            assert "Start it with speaker" in error["message"]


async def test_nothing_speaks_any_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a speaker and without encoders, the error of any format is that nothing speaks."""
    for module in ("endpoints.audio", "audio.formats"):
        monkeypatch.setattr(f"latimer.adapter.{module}.has_encoders", lambda: False)
    for form in (None, "wav", "mp3"):
        error = (await ask(OpenAIAdapter(Echo(), any_model=True), response_format=form)).json()
        assert error["error"]["code"] == "unsupported_endpoint"
    error = (await ask(app_of())).json()["error"]
    assert error["param"] == "response_format"
    assert "run pip install '.[speech]' in a clone of Latimer" in error["message"]


async def test_voices_are_listed() -> None:
    """Each has an id, a name and its language, as clients read them."""
    async with client_of(app_of()) as client:
        reply = (await client.get("/v1/audio/voices")).json()
    assert reply["voices"][0] == {"id": "anna", "name": "anna", "language": "en"}
    assert [one["id"] for one in reply["voices"]] == ["anna", "bela", "carl"]


async def test_a_text_with_nothing_to_speak() -> None:
    """It is a tenth of a second of silence, which decodes."""
    speaker = Tone()
    reply = await ask(app_of(speaker), input="--- !!", response_format="wav")
    samples, rate = decoded(reply.content, "wav")
    assert (len(samples), set(samples), speaker.spoken) == (rate // 10, {0}, [])


@pytest.mark.parametrize("form", ["wav", "pcm", "mp3", "opus"])
async def test_events_have_the_same_audio(form: str) -> None:
    """The audio of all events, each decoded by itself, is that of the plain reply."""
    plain = await ask(app_of(), response_format=form)
    reply = await ask(app_of(), response_format=form, stream_format="sse")
    assert reply.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(reply.text)
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0},
    }
    assert {one["type"] for one in deltas} == {"speech.audio.delta"}
    audio = b"".join(base64.b64decode(one["audio"], validate=True) for one in deltas)
    # The serial number of an Ogg stream is random.
    assert decoded(audio, form) == decoded(plain.content, form)


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_audio_is_sent_before_the_last_sentence_is_spoken(stream_format: str) -> None:
    """The first bytes arrive while the second sentence waits."""
    speaker = Tone(gate=(gate := threading.Event()))
    body = {"model": "m", "input": TEXT, "voice": "anna", "stream_format": stream_format}
    with (
        serving(lambda: app_of(speaker)) as url,
        httpx2.Client(base_url=url) as client,
        client.stream("POST", S, json=body) as reply,
    ):
        parts = reply.iter_bytes()
        first = next(parts)
        # The second sentence waits for the gate.
        assert len(speaker.spoken) <= 2
        gate.set()
        assert len(b"".join(parts)) > len(first)
    assert len(speaker.spoken) == 3


def test_a_disconnect_ends_the_speaking() -> None:
    """The speaker is left when its client leaves, and the rest is not spoken."""
    speaker = Tone(gate=threading.Event())
    body = {"model": "m", "input": TEXT, "voice": "anna"}
    with serving(lambda: app_of(speaker)) as url:
        with (
            httpx2.Client(base_url=url) as client,
            client.stream("POST", S, json=body) as reply,
        ):
            # The connection closes when the iterator is freed.
            parts = reply.iter_bytes()
            next(parts)
            while len(speaker.spoken) < 2:
                time.sleep(0.01)
            assert speaker.running == 1
        end = time.monotonic() + 20
        while speaker.running and time.monotonic() < end:
            time.sleep(0.01)
        assert speaker.running == 0
        assert len(speaker.spoken) == 2


async def test_silence_is_commented() -> None:
    """While the first sentence is spoken, events have comments; an error after them is an event."""
    speaker = PacedSpeaker(pause=0.15)
    app = app_of(speaker, keepalive=0.05)
    body = {"voice": "low", "input": "Hello.", "response_format": "wav"}
    reply = await ask(app, **body, stream_format="sse")
    comments, rest = reply.text.split(": waiting\n\ndata: ", 1)
    assert set(comments.split("\n\n")) <= {": waiting", ""}
    *deltas, done = events_of(f"data: {rest}")
    assert {one["type"] for one in deltas} == {"speech.audio.delta"}
    assert done["type"] == "speech.audio.done"
    plain = await ask(app, **body)
    assert base64.b64decode("".join(one["audio"] for one in deltas)) == plain.content
    failing = PacedSpeaker(pause=0.15, error=EngineError("No memory."))
    reply = await ask(app_of(failing, keepalive=0.05), **body, stream_format="sse")
    assert (reply.status_code, reply.text[:9]) == (200, ": waiting")
    assert "No memory." in reply.text


async def test_errors_before_the_first_byte_are_replies() -> None:
    """A speaker that fails is a 502, one that is busy a 429, and one that says nothing a 502."""
    failed = await ask(app_of(Tone(error=EngineError("No memory."))), input="I fail.")
    assert (failed.status_code, failed.json()["error"]["message"]) == (502, "No memory.")
    busy = await ask(app_of(Tone(error=Busy("Full.", 3.0))), input="I fail.")
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")
    silent = Tone()
    silent.tone_of = lambda utterance: b""  # type: ignore[method-assign]
    reply = await ask(app_of(silent))
    assert (reply.status_code, reply.headers["content-type"]) == (502, "application/json")


def test_errors_after_the_first_byte_end_the_reply() -> None:
    """Events end with an error; audio ends without the end that HTTP requires."""
    speaker = Tone(error=EngineError("No memory."))
    body = {"model": "m", "input": "This works. I fail.", "voice": "anna"}
    with serving(lambda: app_of(speaker)) as url, httpx2.Client(base_url=url) as client:
        reply = client.post(S, json={**body, "stream_format": "sse"})
        *_, last = events_of(reply.text)
        assert last["error"]["message"] == "No memory."
        with pytest.raises(httpx2.RemoteProtocolError):
            client.post(S, json=body)
        assert client.post(S, json={**body, "input": "It still works."}).status_code == 200


async def test_keys_limits_metrics_and_log() -> None:
    """A request needs a key, counts in its limits, and is in the metrics and in the log."""
    lines: list[bytes] = []
    log = RequestLog(lines.append, "json")
    keys = {"team": KeyConfig(digest=digest_of("sk-team"), requests_per_minute=1)}
    app = app_of(keys=keys, metrics_open=True, observers=[log])
    assert (await ask(app)).status_code == 401
    body = {"model": "m", "input": TEXT, "voice": "anna"}
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer sk-team"
        reply = await client.post(S, json=body)
        assert (reply.status_code, reply.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        assert "x-request-id" in reply.headers
        assert (await client.post(S, json=body)).status_code == 429
        text = (await client.get("/metrics")).text
    served = [line for line in text.splitlines() if "/audio/speech" in line and "200" in line]
    assert ['model_name="tone"' in line for line in served] == [True], text
    await app.aclose()
    events = [json.loads(line) for part in lines for line in part.splitlines()]
    found = next(one for one in events if one.get("status") == 200)
    assert (found["path"], found["key"]) == (S, "team")
    # The model that the request names has not spoken.
    assert (found["model"], found["engine"]) == ("tone", "tone")


@pytest.mark.slow
def test_ten_at_once_leave_the_event_loop_to_others() -> None:
    """Encoding runs in threads: no iteration of the event loop takes long."""
    speaker = Tone()
    tone = speaker.tone_of(Utterance("a" * 4_000, "anna"))
    speaker.tone_of = lambda utterance: tone  # type: ignore[method-assign]
    body = {"model": "m", "input": TEXT, "voice": "anna"}

    def send(form: str) -> int:
        with httpx2.Client(base_url=url, timeout=60) as client:
            return len(client.post(S, json={**body, "response_format": form}).content)

    with measured(lambda: app_of(speaker)) as (url, loop), ThreadPoolExecutor(10) as threads:
        send("mp3")
        loop.longest = 0.0
        sizes = [*threads.map(send, ("mp3", "opus", "aac", "flac", "pcm") * 2)]
    assert min(sizes) > 100_000
    assert loop.longest < LONGEST
