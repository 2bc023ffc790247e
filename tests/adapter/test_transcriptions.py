"""Tests of `POST /v1/audio/transcriptions` and `/translations` over a scripted transcriber."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from tempfile import SpooledTemporaryFile
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import KeyConfig, digest_of
from latimer.adapter.request_log import RequestLog
from latimer.backends.errors import EngineError
from latimer.backends.speech.base import Segment, TranscriberFacts
from starlette import formparsers
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.listener import FACTS, SEGMENTS, Listener
from support.servers import serving
from support.sounds import HELLO, tone, wav

T, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
TEXT = "Hello there. How are you?"
PLAIN = TranscriberFacts("plain")


def app_of(listener: Listener | None = None, **options: Any) -> OpenAIAdapter:
    """Return an adapter without a model, with a transcriber."""
    options.setdefault("any_model", True)
    return OpenAIAdapter(Echo(), transcriber=listener or Listener(), **options)


async def ask(
    app: OpenAIAdapter, path: str = T, file: bytes | None = HELLO, **fields: Any
) -> httpx2.Response:
    """Send a form; names end with `[]` if their values are lists."""
    files = [] if file is None else [("file", ("speech.ogg", file))]
    data = {"model": "whisper-1"}
    for name, value in fields.items():
        if value is None:
            data.pop(name)
        else:
            data[name + "[]" * isinstance(value, list)] = value
    async with client_of(app) as client:
        # A form without a file is then no form.
        reply: httpx2.Response = await client.post(path, data=data, files=files or {"x": b"x"})
        return reply


async def test_json_has_the_text_and_the_length() -> None:
    """By default, the reply has the text without space around it, and the length, rounded up."""
    listener = Listener()
    reply = await ask(app_of(listener))
    assert reply.status_code == 200, reply.text
    usage = {"type": "duration", "seconds": 2}
    assert reply.json() == {"text": TEXT, "usage": usage}
    assert listener.recordings[0].samples == HELLO[44:]
    assert "x-latimer-ignored" not in reply.headers


BODIES = {
    "text": ("text/plain; charset=utf-8", f"{TEXT}\n"),
    "srt": (
        "text/plain; charset=utf-8",
        "1\n00:00:00,000 --> 00:00:01,250\nHello there.\n\n"
        "2\n00:00:01,250 --> 00:00:03,320\nHow are you?\n\n",
    ),
    "vtt": (
        "text/vtt; charset=utf-8",
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello there.\n\n"
        "00:00:01.250 --> 00:00:03.320\nHow are you?\n\n",
    ),
}


@pytest.mark.parametrize("form", BODIES)
async def test_formats_of_text(form: str) -> None:
    """Each format has its exact syntax and its media type."""
    reply = await ask(app_of(), response_format=form)
    assert (reply.headers["content-type"], reply.text) == BODIES[form]


async def test_verbose_json() -> None:
    """Segments have all of OpenAI's keys, times rise, and the language has its English name."""
    reply = (await ask(app_of(), response_format="verbose_json", temperature="0.5")).json()
    assert list(reply) == ["task", "language", "duration", "text", "segments", "usage"]
    assert (reply["task"], reply["language"], reply["duration"]) == ("transcribe", "english", 1.5)
    assert reply["text"] == TEXT
    first, second = reply["segments"]
    assert first == {
        "id": 0, "seek": 0, "start": 0.0, "end": 1.25, "text": " Hello there.", "tokens": [1, 2],
        "temperature": 0.5, "avg_logprob": -0.25, "compression_ratio": first["compression_ratio"],
        "no_speech_prob": 0.01,
    }  # fmt: skip
    assert (second["id"], second["start"], second["end"]) == (1, 1.25, 3.32)


@pytest.mark.parametrize(
    ("kinds", "keys"),
    [
        (["word"], {"words"}),
        (["segment"], {"segments"}),
        (["word", "segment"], {"words", "segments"}),
    ],
)
async def test_granularities(kinds: list[str], keys: set[str]) -> None:
    """`word` adds words; without `segment`, there are no segments."""
    listener = Listener()
    reply = await ask(
        app_of(listener), response_format="verbose_json", timestamp_granularities=kinds
    )
    assert reply.json().keys() & {"words", "segments"} == keys
    assert listener.recordings[0].words is ("word" in kinds)
    if "word" in kinds:
        assert reply.json()["words"][0] == {"word": "Hello", "start": 0.0, "end": 0.5}


async def test_a_stream() -> None:
    """Deltas, joined, are the text of the last event; then comes [DONE]."""
    segments = (Segment(" Hello "), Segment(""), Segment("there \n"), Segment(" "))
    reply = await ask(app_of(Listener(segments)), stream="true")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *lines, done = [line.removeprefix("data: ") for line in reply.text.strip().split("\n\n")]
    events = [json.loads(line) for line in lines]
    deltas = [one["delta"] for one in events if one["type"] == "transcript.text.delta"]
    assert deltas == ["Hello", " there"]
    # The usage of this event has tokens, which most transcribers do not count.
    assert events[-1] == {"type": "transcript.text.done", "text": "Hello there"}
    assert done == "[DONE]"


@pytest.mark.parametrize("form", ["srt", "vtt", "verbose_json"])
async def test_formats_with_times_are_not_streamed(form: str) -> None:
    """As OpenAI's Whisper, the server ignores `stream` for these formats, and says so."""
    one, other = [
        await ask(app_of(), response_format=form, stream=stream) for stream in ("", "true")
    ]
    assert one.text == other.text
    assert other.headers["x-latimer-ignored"] == "stream"


async def test_an_error_in_a_stream_ends_it() -> None:
    """An error before the first text has its status; a later one is the last event."""
    early = await ask(app_of(Listener(error=EngineError("It broke."))), stream="true")
    late = await ask(app_of(Listener(error=EngineError("It broke."), fails_at=1)), stream="true")
    assert (early.status_code, early.json()["error"]["message"]) == (502, "It broke.")
    assert late.status_code == 200
    first, error, done = late.text.strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["delta"] == "Hello there."
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "It broke."
    assert done == "data: [DONE]"


async def test_silence_is_commented() -> None:
    """While nothing is heard, a stream has comments, so that clients keep waiting."""
    app = app_of(Listener(SEGMENTS[:1], pause=0.2), keepalive=0.05)
    reply = await ask(app, stream="true")
    assert reply.text.startswith(": waiting\n\n")
    assert '"text":"Hello there."' in reply.text


async def test_fields_reach_the_transcriber() -> None:
    """Language, prompt and temperature reach it; a name and a region are a language, too."""
    for language in ("de", "DE", "german", "de-AT"):
        listener = Listener()
        await ask(app_of(listener), language=language, prompt="Latimer", temperature="0.2")
        (found,) = listener.recordings
        assert (found.language, found.prompt, found.temperature) == ("de", "Latimer", 0.2)
        assert not found.translate


async def test_fields_without_effect_are_listed() -> None:
    """Fields that are unknown, or that the transcriber ignores, are listed, also as `x[]`."""
    reply = await ask(
        app_of(Listener(facts=PLAIN)), language="de", prompt="x", temperature="1", foo="bar",
        bar=["1", "2"], include=["logprobs"], chunking_strategy="auto",
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    listed = "bar, foo, include, language, prompt, temperature"
    assert reply.headers["x-latimer-ignored"] == listed


async def test_an_object_in_a_form_is_a_field_for_each_key() -> None:
    """The strategy of OpenAI's clients is accepted; its settings have no effect, and are named."""
    fields: dict[str, Any] = {"chunking_strategy[type]": "server_vad"}
    reply = await ask(app_of(strict=True), model="listener", **fields)
    assert reply.status_code == 200, reply.text
    fields["chunking_strategy[threshold]"] = "0.5"
    reply = await ask(app_of(), model="listener", **fields)
    assert reply.headers["x-latimer-ignored"] == "chunking_strategy[threshold]"


async def test_a_strict_server_refuses_them() -> None:
    """Under `strict`, such a field is an error that names it."""
    app = app_of(strict=True)
    unknown = (await ask(app, foo="bar")).json()["error"]
    unused = (await ask(app, include=["logprobs"])).json()["error"]
    assert (unknown["param"], unknown["code"]) == ("foo", "unknown_parameter")
    assert (unused["param"], unused["code"]) == ("include", "unsupported_parameter")


async def test_x_and_x_in_brackets_are_the_same() -> None:
    """Lists can be sent with and without brackets."""
    for name in ("timestamp_granularities", "timestamp_granularities[]"):
        fields: dict[str, Any] = {"response_format": "verbose_json", name: "word"}
        reply = await ask(app_of(), **fields)
        assert "words" in reply.json()


WRONG: tuple[tuple[dict[str, Any], str, str | None], ...] = (
    ({"file": None}, "file", "missing_required_parameter"),
    ({"file": b""}, "file", "invalid_value"),
    ({"file": b"garbage" * 999}, "file", "invalid_value"),
    ({"model": None}, "model", "missing_required_parameter"),
    ({"response_format": "xml"}, "response_format", "invalid_value"),
    ({"response_format": "diarized_json"}, "response_format", "unsupported_parameter"),
    ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "invalid_value"),
    (
        {"timestamp_granularities": ["line"], "response_format": "verbose_json"},
        "timestamp_granularities[0]",
        "invalid_value",
    ),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": "nan"}, "temperature", "invalid_type"),
    ({"temperature": "0_1"}, "temperature", "invalid_type"),
    ({"temperature": "1e999"}, "temperature", "invalid_type"),
    ({"temperature": "1" * 100_000 + "x"}, "temperature", "invalid_type"),
    ({"temperature": "2"}, "temperature", "decimal_above_max_value"),
    ({"stream": "maybe"}, "stream", "invalid_type"),
    ({"language": "klingon"}, "language", "invalid_value"),
)


@pytest.mark.parametrize(("fields", "param", "code"), WRONG)
async def test_wrong_fields(fields: dict[str, Any], param: str, code: str) -> None:
    """A wrong field is a 400 that names it."""
    reply = await ask(app_of(), **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


async def test_times_that_the_transcriber_lacks() -> None:
    """Times are refused by name where the transcriber has none, and never made up."""
    for form in ("srt", "vtt", "verbose_json"):
        reply = await ask(app_of(Listener(facts=PLAIN)), response_format=form)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "response_format"
    facts = replace(PLAIN, has_segments=True)
    reply = await ask(
        app_of(Listener(facts=facts)),
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert reply.json()["error"]["param"] == "timestamp_granularities"


async def test_a_transcriber_of_one_language() -> None:
    """Another language is an error; its own is the language of the transcript."""
    app = app_of(Listener([Segment("x", 0.0, 1.0)], PLAIN_ENGLISH))
    assert (await ask(app, language="de")).json()["error"]["param"] == "language"
    reply = await ask(app, language="en", response_format="verbose_json")
    assert reply.json()["language"] == "english"
    assert "x-latimer-ignored" not in reply.headers


PLAIN_ENGLISH = replace(PLAIN, has_segments=True, languages=("en",))


@pytest.mark.parametrize(("language", "code"), [
    ("fil", "unsupported_parameter"), ("german", "unsupported_parameter"), ("xx", None),
])  # fmt: skip
async def test_languages_that_the_transcriber_does_not_know(
    language: str, code: str | None
) -> None:
    """The error names the field and lists what the transcriber knows, and nothing is heard."""
    listener = Listener(facts=replace(FACTS, languages=("tl", "en", "fr")))
    reply = await ask(app_of(listener), language=language)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "language")
    assert code in (None, error["code"])
    assert "Supported values are: 'en', 'fr', and 'tl'." in error["message"]
    assert listener.recordings == []
    assert (await ask(app_of(listener), language="french")).status_code == 200


LATIN = (
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ncaf\xe9\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nx\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("", b""),
        ("multipart/form-data", b"--x\r\n"),
        ("multipart/form-data; boundary=x", b"--y\r\nhello"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nx"),
        ("multipart/form-data; boundary=x; charset=punycode", LATIN),
        ("multipart/form-data; boundary=x; charset=undefined", LATIN),
    ],
)
async def test_bodies_that_are_no_form(kind: str, body: bytes) -> None:
    """Such a body is a 400, never a 500."""
    async with client_of(app_of()) as client:
        reply = await client.post(T, content=body, headers={"content-type": kind})
    assert reply.status_code == 400, reply.text


WHOLE = (
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--x\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + HELLO + b"\r\n--x--"
)


@pytest.mark.parametrize("cut", [1, 20, len(WHOLE) - len(HELLO)])
async def test_a_form_that_is_cut_says_so(cut: int) -> None:
    """The error is not that a file is missing, but that the last boundary is."""
    kind = {"content-type": "multipart/form-data; boundary=x"}
    async with client_of(app_of()) as client:
        whole = await client.post(T, content=WHOLE, headers=kind)
        reply = await client.post(T, content=WHOLE[:-cut], headers=kind)
    assert (whole.status_code, reply.status_code) == (200, 400)
    assert "the body ends before its last boundary" in reply.json()["error"]["message"]


async def test_a_form_that_is_cut_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is closed if the rest of its form does not come, or if its client leaves."""
    opened: list[SpooledTemporaryFile[bytes]] = []

    def spooled(*arguments: Any, **options: Any) -> SpooledTemporaryFile[bytes]:
        opened.append(SpooledTemporaryFile(*arguments, **options))  # noqa: SIM115
        return opened[-1]

    monkeypatch.setattr(formparsers, "SpooledTemporaryFile", spooled)
    kind = {"content-type": "multipart/form-data; boundary=x"}
    async with client_of(app_of()) as client:
        for body in (WHOLE[:-1], WHOLE):
            await client.post(T, content=body, headers=kind)
    for _ in range(100):
        if len(opened) == 2 and all(one.closed for one in opened):
            return
        await asyncio.sleep(0.01)
    raise AssertionError([one.closed for one in opened])


async def test_a_compressed_form_is_refused() -> None:
    """The error names the encoding, and says that none is taken."""
    kind = {"content-type": "multipart/form-data; boundary=x", "content-encoding": "gzip"}
    async with client_of(app_of()) as client:
        reply = await client.post(T, content=gzip.compress(WHOLE), headers=kind)
    assert reply.status_code == 400
    message = "Unsupported content encoding: 'gzip'. Send the form without 'Content-Encoding'"
    assert reply.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(("text", "streams"), [("1", True), ("True", True), ("0", False)])
async def test_booleans_of_forms(text: str, streams: bool) -> None:
    """`1` and `0` are booleans as well, which some clients write; other texts are an error."""
    reply = await ask(app_of(), stream=text)
    assert reply.headers["content-type"].startswith("text/event-stream") is streams
    error = (await ask(app_of(), stream="yes")).json()["error"]
    assert error["message"] == "Invalid 'stream': expected 'true' or 'false'."
    assert error["param"] == "stream"


async def test_a_file_as_text() -> None:
    """A file without a name is a text, and the error says so."""
    async with client_of(app_of()) as client:
        reply = await client.post(T, data={"model": "x", "file": "x"}, files={"y": b"y"})
    assert reply.json()["error"]["code"] == "invalid_type"


async def test_a_form_with_too_much() -> None:
    """A form with too many fields, or a long text, is a 400."""
    fields: dict[str, Any] = {f"x{number}": "1" for number in range(300)}
    many = await ask(app_of(), **fields)
    long = await ask(app_of(), prompt="x" * 300_000)
    assert (many.status_code, long.status_code) == (400, 400)
    assert "At most 256 fields" in many.json()["error"]["message"]


async def test_a_large_file_is_refused_while_it_is_read() -> None:
    """The rest of a body over the limit is not read, with and without its length."""
    taken = 0

    async def body() -> Any:
        nonlocal taken
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            taken += 1
            yield bytes(10_000)

    async with client_of(app_of(max_body=50_000)) as client:
        kind = {"content-type": "multipart/form-data; boundary=x"}
        reply = await client.post(T, content=body(), headers=kind)
        other = await client.post(T, data={"model": "x"}, files={"file": bytes(60_000)})
    assert (reply.status_code, other.status_code) == (413, 413)
    assert reply.json()["error"]["code"] == "request_too_large"


async def test_a_recording_that_is_too_long() -> None:
    """The error for a transcriber's own limit has its seconds."""
    app = app_of(Listener(facts=replace(FACTS, most_seconds=1.0)))
    error = (await ask(app)).json()["error"]
    assert (error["param"], error["code"]) == ("file", "audio_too_long")
    assert "at most 1 s" in error["message"]


async def test_translations() -> None:
    """The reply has the English text only; `language` and `stream` are no fields of it."""
    listener = Listener()
    app = app_of(listener)
    reply = await ask(app, TRANSLATIONS, stream="true", language="de")
    assert reply.json() == {"text": TEXT}
    assert reply.headers["x-latimer-ignored"] == "language, stream"
    assert listener.recordings[0].translate
    verbose = (await ask(app, TRANSLATIONS, response_format="verbose_json")).json()
    assert (verbose["task"], verbose["language"]) == ("translate", "english")
    assert "usage" not in verbose


async def test_translations_without_a_translator() -> None:
    """A transcriber that does not translate is a path that is not served."""
    reply = await ask(app_of(Listener(facts=PLAIN)), TRANSLATIONS)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unsupported_endpoint"


async def test_nothing_transcribes() -> None:
    """Without a transcriber, the path is not served, and the error says how it would be."""
    for name in ("demo", "whisper-1"):
        app = OpenAIAdapter(Echo(), model_names=["demo"])
        reply = await ask(app, model=name)
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert error["code"] == "unsupported_endpoint"
        assert "transcriber" in error["message"]


async def test_names_of_models() -> None:
    """The transcriber answers to its own name, to the model's, and to OpenAI's inexactly."""
    app = app_of(any_model=False, model_names=["demo"])
    own, model, openai, unknown = [
        await ask(app, model=name) for name in ("listener", "demo", "whisper-1", "other")
    ]
    assert [one.status_code for one in (own, model, openai, unknown)] == [200, 200, 200, 404]
    assert openai.headers["x-latimer-inexact"] == "model"
    assert "x-latimer-inexact" not in own.headers
    assert unknown.json()["error"]["code"] == "model_not_found"


async def test_keys() -> None:
    """A key is needed, and its limits and models apply; a name of OpenAI's does not go around."""
    table = KeyConfig(digest=digest_of("secret"), models=["demo"], requests_per_minute=2)
    app = app_of(any_model=False, model_names=["demo", "more"], keys={"a": table})
    async with client_of(app) as client:

        async def send(key: str, model: str) -> httpx2.Response:
            headers = {"authorization": f"Bearer {key}"}
            files = {"file": HELLO}
            return await client.post(T, data={"model": model}, files=files, headers=headers)

        replies = [
            await send(*one)
            for one in (
                ("wrong", "demo"), ("secret", "more"), ("secret", "demo"), ("secret", "whisper-1"),
                ("secret", "demo"),
            )
        ]  # fmt: skip
    assert [one.status_code for one in replies] == [401, 404, 200, 200, 429]
    assert replies[2].headers["x-ratelimit-remaining-requests"] == "1"


async def test_logs_and_metrics() -> None:
    """A request is in the log and in the metrics, as one of the transcriber by any of its names."""
    lines: list[bytes] = []
    log = RequestLog(lines.append, "json", "info", False)
    app = app_of(metrics=True, observers=[log], model_names=["demo"])
    async with client_of(app) as client:
        for name in ("demo", "whisper-1", "listener"):
            await client.post(T, data={"model": name}, files={"file": HELLO})
        metrics = (await client.get("/metrics")).text
    await app.aclose()
    events = [json.loads(line) for line in b"".join(lines).splitlines()]
    for event in events:
        assert (event["path"], event["status"]) == (T, 200)
        assert (event["model"], event["engine"]) == ("listener", "listener")
    counted = f'{{endpoint="{T}",model_name="listener",status="200"}} 3.0'
    assert counted in metrics, [line for line in metrics.splitlines() if T in line]
    assert len(events) == 3


async def test_a_client_that_leaves_ends_the_work() -> None:
    """The transcription ends with its client."""
    listener = Listener(pause=30)
    with serving(lambda: app_of(listener)) as address:
        async with httpx2.AsyncClient() as client:
            sent = asyncio.create_task(
                client.post(f"{address}{T}", data={"model": "x"}, files={"file": HELLO})
            )
            while not listener.running:
                await asyncio.sleep(0.01)
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
        async with asyncio.timeout(10):
            while listener.running:
                await asyncio.sleep(0.01)


async def test_few_recordings_are_in_memory() -> None:
    """Of many requests, four have their samples at once; the others wait, and all are answered."""
    most = 0

    class Counting(Listener):
        def _heard(self) -> Any:
            nonlocal most
            most = max(most, self.running)
            return super()._heard()

    app = app_of(Counting(pause=0.1))
    async with client_of(app) as client:

        async def send() -> int:
            reply = await client.post(T, data={"model": "x"}, files={"file": HELLO})
            return int(reply.status_code)

        assert await asyncio.gather(*(send() for _ in range(8))) == [200] * 8
    assert most == 4


async def test_the_transcriber_is_closed_with_the_app() -> None:
    """The app releases it."""
    listener = Listener()
    await app_of(listener).aclose()
    assert listener.closed == 1


async def test_a_quiet_recording() -> None:
    """A recording without speech is an empty text in every format."""
    for form, body in (("text", "\n"), ("srt", ""), ("vtt", "WEBVTT\n\n")):
        assert (await ask(app_of(Listener(())), response_format=form)).text == body
    assert (await ask(app_of(Listener(())))).json()["text"] == ""


async def test_the_path_without_its_prefix() -> None:
    """The prefix `/v1` is optional, as for every path."""
    assert (await ask(app_of(), "/audio/transcriptions")).status_code == 200


async def test_the_extension_of_the_name_does_not_matter() -> None:
    """The format is known by the bytes: the helper's WAV files are all named `.ogg`."""
    stereo = wav(tone(0.5, 8_000, 2), 8_000, 2)
    listener = Listener()
    assert (await ask(app_of(listener), file=stereo)).status_code == 200
    assert listener.recordings[0].seconds == pytest.approx(0.5, abs=0.01)
