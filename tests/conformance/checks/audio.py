"""`POST /audio/speech` (contract of audio, 2).

The checks of spoken chat are in `audio_chat`, those of transcriptions in `audio_transcription`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..check import Body, Diverges, Fail, Skip, check, expect
from ..raw import connected, exchange
from ..sounds import Sound, sound_of
from ..target import ABSENT, Api, Reply, events

S = "/audio/speech"
TEXT = "Two cats sat on the mat, and a dog came in."
# Sentences of which each takes an engine some time.
STORY = tuple(f"This is sentence {number}, and the sun is shining." for number in range(1, 81))
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "onyx", "nova", "sage", "shimmer", "verse",
    "marin", "cedar",
)  # fmt: skip
# The bytes of a second of pcm: 24,000 samples of 16 bits.
PCM_SECOND = 48_000
# By how much two lengths of one text may differ: voices are not always the same.
CLOSE = 1.34
# The seconds of a whole answer that is too quick to measure.
QUICK = 0.25


def body_of(api: Api, **fields: Any) -> dict[str, Any]:
    """Return the body of a request, without the fields that are None."""
    body = {"model": api.model, "input": TEXT, "voice": "alloy", "response_format": "wav", **fields}
    return {name: value for name, value in body.items() if value is not None}


def served(reply: Reply) -> Reply:
    """Return a successful reply; raise `Unsupported` for a clean rejection, else `Fail`."""
    if reply.status != 200:
        reply.ok()
    return reply


async def speak(api: Api, **fields: Any) -> Reply:
    """Return the reply to a request that the server must support."""
    reply = served(await api.post(S, body_of(api, **fields)))
    expect(reply.body, "expected audio, but got an empty body")
    return reply


def close(one: float, other: float) -> bool:
    """Return True if two lengths can be those of one text."""
    return 0 < one < CLOSE * other and other < CLOSE * one


def expect_close(found: float, wanted: float, what: str) -> None:
    """Raise `Fail` unless two lengths in seconds can be those of one text."""
    expect(close(found, wanted), f"expected {wanted:.2f} s {what}, but got {found:.2f} s")


def expect_kind(reply: Reply, *kinds: str) -> None:
    """Raise `Fail` unless a reply has one of the content types."""
    found = reply.kind
    expect(found in kinds, f"expected content-type {' or '.join(kinds)}, but got {found!r}")


def expect_pcm(data: bytes) -> float:
    """Return the seconds of samples at 24 kHz; raise `Fail` unless they are plausible ones."""
    fine = data and not len(data) % 2 and data[:4] not in (b"RIFF", b"fLaC", b"OggS")
    expect(fine, f"expected samples of 16 bits, but got {len(data)} bytes: {data[:16]!r}")
    return len(data) / PCM_SECOND


async def whole(api: Api) -> Sound:
    """Return the spoken text as a wav file."""
    sound = sound_of((await speak(api)).body)
    expect(sound.container == "wav", f"expected a wav file, but got {sound.container}")
    expect(any(sound.samples), "expected a sound, but got silence")
    expect(0.5 < sound.seconds < 30, f"expected a few seconds, but got {sound.seconds:.2f}")
    return sound


@check("audio.speech-wav", "Speech as wav is a RIFF file with true sizes or those of a stream.",
       "must", "A2 A9.14")  # fmt: skip
async def as_wav(api: Api) -> None:
    await whole(api)
    expect_kind(await speak(api), "audio/wav", "audio/x-wav", "audio/wave")


@check("audio.speech-pcm", "Speech as pcm is 16-bit samples at 24 kHz, without a header.",
       "must", "A2 A9.15")  # fmt: skip
async def as_pcm(api: Api) -> None:
    wanted = (await whole(api)).seconds
    reply = await speak(api, response_format="pcm")
    expect_kind(reply, "audio/pcm", "audio/l16", "audio/x-pcm", "application/octet-stream")
    expect_close(expect_pcm(reply.body), wanted, "of pcm")


@check("audio.speech-longer", "A longer text takes longer to speak.", "must", "A2")
async def longer(api: Api) -> None:
    one = (await whole(api)).seconds
    two = sound_of((await speak(api, input=f"{TEXT} {TEXT} {TEXT}")).body).seconds
    expect(two > 1.5 * one, f"expected over {1.5 * one:.2f} s, but got {two:.2f} s")


KINDS = {
    "mp3": ("audio/mpeg", "audio/mp3"),
    "opus": ("audio/opus", "audio/ogg"),
    "aac": ("audio/aac", "audio/aacp"),
    "flac": ("audio/flac", "audio/x-flac"),
}


def _encoded(container: str, kinds: Sequence[str], field: str | None) -> Body:
    async def run(api: Api) -> None:
        wanted = (await whole(api)).seconds
        reply = await api.post(S, body_of(api, response_format=field))
        if reply.status != 200:
            error = reply.error(400)
            named = "response_format" in f"{error['param']} {error['message']}"
            known = "wav" in error["message"] or "pcm" in error["message"]
            expect(
                named and known,
                f"expected an error that names response_format and formats, but got {error}",
            )
            return
        found = sound_of(reply.body)
        expect(found.container == container, f"expected {container}, but got {found.container}")
        expect_kind(reply, *kinds)
        expect_close(found.seconds, wanted, f"of {container}")

    return run


for _name, _kinds in KINDS.items():
    check(f"audio.speech-{_name}",
          f"Speech as {_name} is that format, or rejected with an error that lists the formats.",
          "must", "A2 A9.16")(_encoded(_name, _kinds, _name))  # fmt: skip
check("audio.speech-default",
      "Speech without a format is mp3, or rejected with an error that lists the formats.",
      "must", "A2 A9.16")(_encoded("mp3", KINDS["mp3"], None))  # fmt: skip


# Each row: the id, the fields, level, source, the word that the error must contain.
WRONG: Sequence[tuple[str, Mapping[str, Any], str, str, str]] = (
    ("input-missing", {"input": None}, "must", "A2 A9.17", "input"),
    ("input-empty", {"input": ""}, "must", "A2 A9.17", "input"),
    ("input-long", {"input": "a b " * 1024 + "c"}, "must", "A2 A9.17", "input"),
    ("input-number", {"input": 5}, "must", "A2 A9.17", "input"),
    ("model-missing", {"model": None}, "must", "A2", "model"),
    ("voice-missing", {"voice": None}, "must", "A2 A9.18", "voice"),
    ("voice-unknown", {"voice": "nobody-speaks"}, "must", "A2 A9.18", "voice"),
    ("speed-below", {"speed": 0.2}, "must", "A2 A9.19", "speed"),
    ("speed-above", {"speed": 4.1}, "must", "A2 A9.19", "speed"),
    ("format-unknown", {"response_format": "midi"}, "must", "A2 A9.16", "response_format"),
    ("stream-format-unknown", {"stream_format": "ws"}, "must", "A2", "stream_format"),
)  # fmt: skip


# What a server may also do without OpenAI's limits: True for the seconds of a right answer, and
# those of the usual text.
RIGHT: Mapping[str, Callable[[float, float], bool]] = {
    "input-long": lambda found, one: found > 20 * one,
    "model-missing": lambda found, one: found > 0,
    "speed-below": lambda found, one: found > CLOSE * one,
    "speed-above": lambda found, one: one > CLOSE * found > 0,
}


def _rejected(changes: Mapping[str, Any], word: str, right: Any) -> Body:
    async def run(api: Api) -> None:
        await speak(api)
        reply = await api.post(S, body_of(api, **changes))
        if right is not None and reply.status == 200 and not api.hosted:
            one, found = (await whole(api)).seconds, sound_of(reply.body).seconds
            fine = right(found, one)
            expect(fine, f"expected an error, or what is asked for, but got {found:.2f} s of "
                         f"speech, and {one:.2f} s of the usual one")  # fmt: skip
            return
        error = reply.error(400)
        named = word in str(error["param"] or error["message"])
        expect(named, f"expected an error that names {word!r}, but got {error}")

    return run


def _shown(changes: Mapping[str, Any]) -> str:
    ((name, value),) = changes.items()
    if value is None:
        return f"without {name}"
    return f"with {name} {value!r}" if len(str(value)) < 40 else f"with {name} of 4,097 characters"


for _id, _changes, _level, _source, _word in WRONG:
    _more = ", or spoken" if _id in RIGHT else ""
    _promise = (
        f"A request for speech {_shown(_changes)} is rejected with a 400 error that names "
        f"{_word!r}{_more}."
    )
    check(f"audio.{_id}", _promise, _level, _source, seconds=60 if _id == "input-long" else 20)(  # type: ignore[arg-type]
        _rejected(_changes, _word, RIGHT.get(_id)))  # fmt: skip


@check("audio.voices", "Each of OpenAI's thirteen voices is spoken.", "must", "A2 A9.18",
       seconds=60)  # fmt: skip
async def voices(api: Api) -> None:
    await speak(api)
    for voice in OPENAI_VOICES:
        reply = await api.post(S, body_of(api, input="Yes.", voice=voice))
        fine = reply.status == 200 and sound_of(reply.body).seconds > 0
        expect(fine, f"expected speech with {voice!r}, but got {reply.status} {reply.text[:200]}")


@check("audio.voices-listed", "The error for an unknown voice lists voices that are spoken.",
       "should", "A2 A9.18")  # fmt: skip
async def voices_listed(api: Api) -> None:
    await speak(api)
    message = (await api.post(S, body_of(api, voice="nobody-speaks"))).error(400)["message"]
    quoted = message.replace('"', "'").split("'")[1::2]
    listed = [word for word in quoted if word != "nobody-speaks" and " " not in word]
    expect(listed, f"expected the names of voices in quotes, but got {message!r}")
    reply = await api.post(S, body_of(api, input="Yes.", voice=listed[0]))
    expect(reply.status == 200, f"expected speech with {listed[0]!r}, but got {reply.text[:200]}")


@check("audio.voice-object", "A voice may be an object with its id.", "must", "A2 A9.18")
async def voice_object(api: Api) -> None:
    wanted = (await whole(api)).seconds
    reply = await api.post(S, body_of(api, voice={"id": "alloy"}))
    expect(reply.status == 200, f"expected speech, but got {reply.status}: {reply.text[:200]}")
    expect_close(sound_of(reply.body).seconds, wanted, "with the voice's id")


@check("audio.speed", "A speed of 2 shortens speech, or is rejected or reported by a header.",
       "must", "A2 A9.19")  # fmt: skip
async def speed(api: Api) -> None:
    one = (await whole(api)).seconds
    reply = await api.post(S, body_of(api, speed=2.0))
    if reply.status == 400:
        error = str(reply.error(400))
        expect("speed" in error, f"expected an error that names speed, but got {error}")
        return
    half = sound_of(served(reply).body).seconds
    told = any("speed" in value for name, value in reply.headers.items() if name.startswith("x-"))
    expect(half < 0.75 * one or told, f"expected about {one / 2:.2f} s, but got {half:.2f} s")
    same = sound_of((await speak(api, speed=1.0)).body).seconds
    expect_close(same, one, "with speed 1")


@check("audio.instructions", "Instructions for the voice are accepted.", "must", "A2")
async def instructions(api: Api) -> None:
    wanted = (await whole(api)).seconds
    reply = await speak(api, instructions="Speak calmly.")
    found = sound_of(reply.body).seconds
    expect(found < 3 * wanted, f"expected about {wanted:.2f} s, but got {found:.2f} s")


@check("audio.accept", "Speech is served to clients that accept application/octet-stream.",
       "must", "A2 A9.20")  # fmt: skip
async def accept(api: Api) -> None:
    await speak(api)
    body = json.dumps(body_of(api)).encode()
    reply = await api.send("POST", S, body, {"accept": "application/octet-stream"})
    expect(reply.status == 200, f"expected status 200, but got {reply.status}")
    expect(sound_of(reply.body).container == "wav", "expected a wav file, but got another")


@check("audio.request-id", "Speech has an x-request-id, as other answers have.", "must", "A9.39")
async def request_id(api: Api) -> None:
    found = [(await speak(api)).headers.get("x-request-id") for _ in range(2)]
    fine = all(found) and found[0] != found[1]
    expect(fine, f"expected an x-request-id for each request, but got {found}")


@check("audio.key", "A wrong API key gets 401 for speech and for a transcription.",
       "must", "A9.39")  # fmt: skip
async def key(api: Api) -> None:
    if "authorization" not in api.client.headers:
        raise Skip("this check needs an API key: --api-key")
    await speak(api)
    for path, body in ((S, body_of(api)), ("/audio/transcriptions", {})):
        if (await api.send("POST", path, b"{}")).status in ABSENT:
            continue
        reply = await exchange(api, "POST", path, body, bearer="Bearer sk-wrong")
        if reply.status == 200:
            raise Diverges("the server accepts any API key")
        expect(reply.status == 401, f"expected status 401 at {path}, but got {reply.status}")


def deltas(found: Sequence[Any]) -> list[bytes]:
    """Return the pieces of streamed speech; raise `Fail` unless the events are those of speech."""
    expect(
        found and found[-1].get("type") == "speech.audio.done",
        f"expected speech.audio.done as the last event, but got {str(found[-1:])[:200]}",
    )
    pieces = []
    for event in found[:-1]:
        fine = event.get("type") == "speech.audio.delta" and isinstance(event.get("audio"), str)
        expect(fine, f"expected speech.audio.delta with audio, but got {str(event)[:200]}")
        try:
            pieces.append(base64.b64decode(event["audio"], validate=True))
        except ValueError:
            raise Fail(f"expected base64, but got {event['audio'][:80]!r}") from None
    expect(pieces and all(pieces), "expected pieces of audio, but got none, or an empty one")
    return pieces


async def stream(api: Api, **fields: Any) -> list[Any]:
    """Return the events of streamed speech, with or without `[DONE]`."""
    return events(await speak(api, stream_format="sse", **fields), needs_done=False)


@check("audio.speech-stream", "Streamed speech is deltas and one done event, with usage.",
       "must", "A2 A9.22")  # fmt: skip
async def streamed(api: Api) -> None:
    found = await stream(api, response_format="pcm")
    expect_close(expect_pcm(b"".join(deltas(found))), (await whole(api)).seconds, "of pcm")
    usage = found[-1].get("usage")
    expect(isinstance(usage, dict), f"expected usage, but got {found[-1]}")
    counts = [usage.get(f"{kind}_tokens") for kind in ("input", "output", "total")]
    fine = all(type(count) is int and count >= 0 for count in counts)
    expect(fine and counts[0] + counts[1] == counts[2], f"expected three counts, but got {usage}")


@check("audio.speech-stream-same",
       "The pieces of streamed speech are, joined, one file with one header.",
       "must", "A2 A9.22")  # fmt: skip
async def streamed_same(api: Api) -> None:
    one, two = [(await speak(api, response_format="pcm")).body for _ in range(2)]
    joined = b"".join(deltas(await stream(api, response_format="pcm")))
    expect(joined == one or one != two, "expected the bytes of the plain answer, but got others")
    file = b"".join(deltas(await stream(api)))
    heads = len(re.findall(rb"RIFF.{4}WAVE", file, re.DOTALL))
    expect(heads == 1, f"expected one header in all pieces, but got {heads}")
    found = sound_of(file)
    expect_close(found.seconds, (await whole(api)).seconds, "in all pieces")


@check("audio.first-byte", "The first audio of a long text arrives before its last is spoken.",
       "must", "A2 A9.21", alone=True, seconds=60)  # fmt: skip
async def first_byte(api: Api) -> None:
    await speak(api)
    text = " ".join(itertools.islice(STORY, 24))
    body = body_of(api, input=text, response_format="pcm")
    start, first, got = time.monotonic(), 0.0, b""
    async with connected(api, "POST", S, body) as (reader, _writer):
        while chunk := await reader.read(65536):
            got += chunk if len(got) < 8192 else b""
            if not first and len(got.partition(b"\r\n\r\n")[2]) > 100:
                first = time.monotonic() - start
    took = time.monotonic() - start
    if took < QUICK:
        raise Skip(f"the whole answer took only {took:.2f} s")
    expect(
        0 < first < 0.7 * took,
        f"expected the first audio early, but got it after {first:.2f} of {took:.2f} s",
    )


@check("audio.speech-disconnect", "Speaking ends when the client disconnects.",
       "must", "A2 A9.13", alone=True, seconds=60)  # fmt: skip
async def disconnect(api: Api) -> None:
    await speak(api)
    short = body_of(api, input="Yes.")
    start = time.monotonic()
    await exchange(api, "POST", S, short)
    idle = time.monotonic() - start
    text = " ".join(STORY)[:4096]
    for _ in range(8):
        body = body_of(api, input=text, response_format="pcm")
        async with connected(api, "POST", S, body) as (reader, _writer):
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(1)
    await asyncio.sleep(1.5)
    start = time.monotonic()
    await exchange(api, "POST", S, short)
    took = time.monotonic() - start
    expect(
        took < idle + 1.0,
        f"expected the next speech after {idle:.2f} s, but got it after {took:.2f} s",
    )


@check("audio.models", "A model states audio as an output if the server speaks, and only then.",
       "should", "A9.40")  # fmt: skip
async def models(api: Api) -> None:
    listed = (await api.get("/models")).ok()["data"]
    kinds = [one.get("architecture") for one in listed if one.get("id") == api.model]
    ways = [one.get("output_modalities") for one in kinds if isinstance(one, dict)]
    stated = [one for one in ways if isinstance(one, list)]
    reply = await api.post(S, body_of(api, input="Yes."))
    speaks = reply.status == 200 and bool(reply.body)
    if not stated:
        served(reply)
        raise Skip("the list of models states no modalities")
    expect(("audio" in stated[0]) == speaks,
           f"expected what /audio/speech does ({reply.status}), but got {stated[0]}")  # fmt: skip
    served(reply)
