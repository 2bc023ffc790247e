"""Chat with audio out (contract of audio, 1)."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..check import Body, Diverges, Fail, Unsupported, check, expect
from ..raw import connected, exchange
from ..sounds import sound_of
from ..target import Api, expect_seconds, expect_usage, only
from .audio import expect_close, expect_pcm

H = "/chat/completions"
ASK = "Count to 12."
WAV = {"voice": "alloy", "format": "wav"}
PCM = {"voice": "alloy", "format": "pcm16"}
BOTH = ["text", "audio"]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
        },
    },
}


def body_of(api: Api, **fields: Any) -> dict[str, Any]:
    """Return the body of a request, without the fields that are `...`."""
    messages = [{"role": "user", "content": ASK}]
    body = {"model": api.model, "messages": messages, "max_tokens": 24, "temperature": 0,
            "modalities": BOTH, "audio": WAV, **fields}  # fmt: skip
    return {name: value for name, value in body.items() if value is not ...}


async def ask(api: Api, **fields: Any) -> Any:
    """Return the message of an answer that the server must speak."""
    found = (await api.post(H, body_of(api, **fields))).ok()
    message = only(found["choices"], "choice")["message"]
    if not isinstance(message.get("audio"), dict):
        raise Unsupported(f"the answer has no audio: {str(message)[:200]}")
    return message


async def written(api: Api, **fields: Any) -> str:
    """Return the answer without audio."""
    found = await api.chat(ASK, max_tokens=24, temperature=0, **fields)
    text: str = found["choices"][0]["message"]["content"]
    return text


def decoded(data: Any) -> bytes:
    """Return the bytes of base64 that decodes by itself."""
    expect(isinstance(data, str) and not len(data) % 4, f"expected base64, but got {data!r:.80}")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise Fail(f"expected base64, but got {data[:80]!r}") from None


def expect_later(value: Any) -> None:
    """Raise `Fail` unless a value is a Unix time in the future, in whole seconds."""
    expect_seconds(value)
    expect(value > time.time(), f"expected a time in the future, but got {value}")


@check("audio.text-only", "The modalities text or null change nothing.", "must", "A1.1 A9.1")
async def text_only(api: Api) -> None:
    wanted = await written(api)
    for modalities in (["text"], None):
        found = await written(api, modalities=modalities)
        expect(found == wanted, f"expected {wanted!r} with {modalities}, but got {found!r}")


@check("audio.chat-object",
       "A spoken answer has no content, and an audio object with an id, data, a transcript and "
       "the time at which it expires.",
       "must", "A1.2 A9.4")  # fmt: skip
async def whole(api: Api) -> None:
    message = await ask(api)
    expect(message["content"] is None, f"expected content null, but got {message['content']!r}")
    audio = message["audio"]
    fine = isinstance(audio["id"], str) and audio["id"].startswith("audio_")
    expect(fine, f"expected an id that begins with audio_, but got {audio['id']!r}")
    expires = audio["expires_at"]
    expect_later(expires)
    expect(audio["transcript"], "expected a transcript, but got an empty one")


@check("audio.chat-wav", "The data of a spoken answer is a file in the requested format.",
       "must", "A1.2 A9.5")  # fmt: skip
async def as_wav(api: Api) -> None:
    sound = sound_of(decoded((await ask(api))["audio"]["data"]))
    expect(sound.container == "wav", f"expected a wav file, but got {sound.container}")
    expect(any(sound.samples), "expected a sound, but got silence")


@check("audio.chat-pcm", "The data of a spoken answer as pcm16 is samples at 24 kHz.",
       "must", "A1.2 A9.5")  # fmt: skip
async def as_pcm(api: Api) -> None:
    wanted = sound_of(decoded((await ask(api))["audio"]["data"])).seconds
    data = decoded((await ask(api, audio=PCM))["audio"]["data"])
    expect_close(expect_pcm(data), wanted, "of pcm16")


@check("audio.chat-voice-object", "The voice of a spoken answer may be an object with its id.",
       "must", "A1.1")  # fmt: skip
async def voice_object(api: Api) -> None:
    await ask(api)
    await ask(api, audio={**WAV, "voice": {"id": "alloy"}})


@check("audio.transcript",
       "The transcript is the text of the same request without audio, without reasoning.",
       "must", "A1.2 A9.6 A9.12")  # fmt: skip
async def transcript(api: Api) -> None:
    found = (await ask(api))["audio"]["transcript"]
    wanted = await written(api)
    expect(found == wanted, f"expected {wanted!r}, but got {found!r}")


@check("audio.unasked", "Settings of audio without the modality get no audio.", "must", "A1.1")
async def unasked(api: Api) -> None:
    await ask(api)
    found = (await api.post(H, body_of(api, modalities=...))).ok()
    message = found["choices"][0]["message"]
    fine = message.get("audio") is None and message["content"]
    expect(fine, f"expected content and no audio, but got {str(message)[:200]}")


# Each row: the id, the fields, the words of which the error must contain one, the promise.
WRONG: Sequence[tuple[str, Mapping[str, Any], Sequence[str], str]] = (
    ("settings-missing", {"audio": ...}, ("audio",), "without settings of it"),
    ("chat-voice-missing", {"audio": {"format": "wav"}}, ("audio.voice",), "without a voice"),
    ("chat-voice-unknown", {"audio": {**WAV, "voice": "nobody-speaks"}}, ("audio.voice",),
     "with an unknown voice"),
    ("chat-format-missing", {"audio": {"voice": "alloy"}}, ("audio.format",), "without a format"),
    ("chat-format-unknown", {"audio": {**WAV, "format": "midi"}}, ("audio.format",),
     "with an unknown format"),
    ("modality-unknown", {"modalities": ["text", "smell"]}, ("modalities",),
     "with an unknown modality"),
)  # fmt: skip


def _rejected(changes: Mapping[str, Any], words: Sequence[str]) -> Body:
    async def run(api: Api) -> None:
        await ask(api)
        error = (await api.post(H, body_of(api, **changes))).error(400)
        named = any(word in str(error["param"] or error["message"]) for word in words)
        expect(named, f"expected an error that names {' or '.join(words)}, but got {error}")

    return run


for _name, _changes, _words, _how in WRONG:
    check(f"audio.{_name}", f"A request for audio {_how} is rejected with a 400 error by name.",
          "must", "A1.1 A9.2" if _name == "settings-missing" else "A1.1 A9.3")(
        _rejected(_changes, _words))  # fmt: skip


@check("audio.stream-wav", "A stream of any format but pcm16 is rejected with OpenAI's message.",
       "must", "A1.1 A9.7 [ISS]")  # fmt: skip
async def stream_wav(api: Api) -> None:
    await ask(api)
    error = (await api.post(H, body_of(api, stream=True))).error(400)
    wanted = "does not support 'wav' when stream=true"
    fine = wanted in error["message"] and "pcm16" in error["message"]
    expect(fine, f"expected the words {wanted!r} and pcm16, but got {error['message']!r}")
    expect(error["param"] == "audio.format", f"expected audio.format, but got {error['param']!r}")


async def stream(api: Api, **fields: Any) -> list[Any]:
    """Return the chunks of a spoken stream that the server must support."""
    await ask(api)
    return await api.stream(H, body_of(api, audio=PCM, stream=True, **fields))


def parts(chunks: Sequence[Any], key: str) -> list[Any]:
    """Return the values of a key in the audio of a stream."""
    audios = [choice["delta"].get("audio") or {} for one in chunks for choice in one["choices"]]
    return [audio[key] for audio in audios if audio.get(key) is not None]


@check("audio.stream", "The pieces of a spoken stream are samples, each of which decodes alone.",
       "must", "A1.3 A9.8 [ISS]")  # fmt: skip
async def streamed(api: Api) -> None:
    chunks = await stream(api)
    pieces = [decoded(data) for data in parts(chunks, "data")]
    expect(pieces, "expected pieces of audio, but got none")
    for piece in pieces:
        expect(piece and not len(piece) % 2, f"expected whole samples, but got {len(piece)} bytes")
    contents = [choice["delta"].get("content") for one in chunks for choice in one["choices"]]
    expect(not any(contents), f"expected no content, but got {contents}")
    wanted = decoded((await ask(api, audio=PCM))["audio"]["data"])
    expect_close(expect_pcm(b"".join(pieces)), expect_pcm(wanted), "in the stream")


@check("audio.stream-transcript", "The pieces of a streamed transcript are, joined, the text.",
       "must", "A1.3 A9.9 A9.12")  # fmt: skip
async def streamed_transcript(api: Api) -> None:
    found = "".join(parts(await stream(api), "transcript"))
    wanted = await written(api)
    expect(found == wanted, f"expected {wanted!r}, but got {found!r}")


@check("audio.stream-id", "A spoken stream states one id, and the time at which it expires.",
       "must", "A1.3 A9.8")  # fmt: skip
async def streamed_id(api: Api) -> None:
    chunks = await stream(api)
    name = only([*set(parts(chunks, "id"))], "id of audio")
    expect(str(name).startswith("audio_"), f"expected audio_…, but got {name!r}")
    expires = parts(chunks, "expires_at")
    expect(expires, "expected the time at which it expires, but got none")
    for one in expires:
        expect_later(one)


@check("audio.stream-end", "A spoken stream ends with a finish reason, and usage on request.",
       "must", "A1.3 A9.8")  # fmt: skip
async def streamed_end(api: Api) -> None:
    chunks = await stream(api, stream_options={"include_usage": True})
    *rest, last = chunks
    expect(not last["choices"], f"expected a chunk with usage, but got {str(last)[:200]}")
    expect_usage(last["usage"])
    reasons = [choice.get("finish_reason") for one in rest for choice in one["choices"]]
    ended = [reason for reason in reasons if reason]
    if not ended:
        raise Diverges("no chunk of the stream has a finish_reason, as has been seen at OpenAI")
    plain = await api.chat(ASK, max_tokens=24, temperature=0)
    wanted = [plain["choices"][0]["finish_reason"]]
    expect(ended == wanted and reasons[-1:] == wanted,
           f"expected the finish reason {wanted[0]} at the end, but got {reasons}")  # fmt: skip


async def _size(api: Api, *turns: Any) -> int:
    messages = [{"role": "user", "content": ASK}, *turns, {"role": "user", "content": "Hello"}]
    found = (await api.post(H, body_of(api, messages=messages, modalities=..., audio=...))).ok()
    count: int = found["usage"]["prompt_tokens"]
    return count


@check("audio.follow-up", "The id of a spoken answer is read as its transcript in a conversation.",
       "must", "A1.4 A9.10")  # fmt: skip
async def follow_up(api: Api) -> None:
    audio = (await ask(api))["audio"]
    wanted = await _size(api, {"role": "assistant", "content": audio["transcript"]})
    found = await _size(api, {"role": "assistant", "audio": {"id": audio["id"]}})
    expect(found == wanted, f"expected {wanted} tokens in the prompt, but got {found}")


@check("audio.follow-up-stream", "The id of a spoken stream is read as its transcript, too.",
       "must", "A1.4 A9.10")  # fmt: skip
async def follow_up_stream(api: Api) -> None:
    chunks = await stream(api)
    text = "".join(parts(chunks, "transcript"))
    wanted = await _size(api, {"role": "assistant", "content": text})
    turn = {"role": "assistant", "content": None, "audio": {"id": parts(chunks, "id")[0]}}
    found = await _size(api, turn)
    expect(found == wanted, f"expected {wanted} tokens in the prompt, but got {found}")


@check("audio.follow-up-unknown", "An unknown id of audio is rejected with a 400 error.",
       "must", "A1.4 A9.10")  # fmt: skip
async def follow_up_unknown(api: Api) -> None:
    await ask(api)
    turn = {"role": "assistant", "audio": {"id": "audio_0123456789abcdef"}}
    messages = [{"role": "user", "content": ASK}, turn, {"role": "user", "content": "Hello"}]
    error = (await api.post(H, body_of(api, messages=messages))).error(400)
    named = "audio" in f"{error['param']} {error['message']}"
    expect(named, f"expected an error that names the audio, but got {error}")


@check("audio.chat-usage", "A spoken answer has usage, as a written one has.", "must", "A1.2")
async def usage(api: Api) -> None:
    await ask(api)
    found = (await api.post(H, body_of(api))).ok()
    expect_usage(found["usage"])
    plain = await api.chat(ASK, max_tokens=24, temperature=0)
    one, other = found["usage"]["prompt_tokens"], plain["usage"]["prompt_tokens"]
    expect(one >= other, f"expected at least {other} tokens in the prompt, but got {one}")


@check("audio.call", "A tool call in an answer that may be spoken has no audio.",
       "must", "A1.2 A9.11")  # fmt: skip
async def call(api: Api) -> None:
    await ask(api)
    choice = {"type": "function", "function": {"name": "get_weather"}}
    full = body_of(api, tools=[TOOL], tool_choice=choice, max_tokens=64)
    message = (await api.post(H, full)).ok()["choices"][0]["message"]
    made = only(message.get("tool_calls") or [], "tool call")
    expect(made["function"]["name"] == "get_weather", f"expected get_weather, but got {made}")
    expect(message.get("audio") is None, f"expected no audio, but got {str(message)[:200]}")


@check("audio.chat-disconnect", "A spoken stream ends when the client disconnects.",
       "must", "A1.3 A9.13", alone=True, seconds=60)  # fmt: skip
async def disconnect(api: Api) -> None:
    await ask(api)
    short = body_of(api, max_tokens=1)
    start = time.monotonic()
    await exchange(api, "POST", H, short)
    idle = time.monotonic() - start
    messages = [{"role": "user", "content": "Count to 1000."}]
    for _ in range(8):
        body = body_of(api, messages=messages, max_tokens=1500, stream=True, audio=PCM)
        async with connected(api, "POST", H, body) as (reader, _writer):
            await reader.readuntil(b'"transcript"')
    await asyncio.sleep(1.5)
    start = time.monotonic()
    await exchange(api, "POST", H, short)
    took = time.monotonic() - start
    expect(
        took < idle + 1.0,
        f"expected the next answer after {idle:.2f} s, but got it after {took:.2f} s",
    )
