"""The audio of the toy server: tones for texts, and a transcript by the length of a recording.

The answers to chat are spoken here, too. The data of a stream is cut into pieces of 0.1 s.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import struct
import time
import wave
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from suite import model
from suite.rules import Refused

if TYPE_CHECKING:
    from suite.server import Send, Server

SPEECH = "/audio/speech"
TRANSCRIPTIONS, TRANSLATIONS = "/audio/transcriptions", "/audio/translations"
FORMS = (TRANSCRIPTIONS, TRANSLATIONS)
VOICES = (
    "toy", "alloy", "ash", "ballad", "coral", "echo", "fable", "onyx", "nova", "sage", "shimmer",
    "verse", "marin", "cedar",
)  # fmt: skip
KINDS = {"wav": "audio/wav", "pcm": "audio/pcm", "pcm16": "audio/pcm", "mp3": "audio/mpeg"}
# Samples a second, and the samples of a character.
RATE, LETTER = 24_000, 480
PIECE = 4800
# 576 samples of silence: MPEG 2, layer III, 32 kbit/s, 24 kHz, mono.
SILENCE = b"\xff\xf3\x44\xc4" + bytes(92)
# The characters of a text that takes time to speak.
LONG = 1000
WORDS = ("The", "cat", "sat", "on", "the", "chair.")
# The seconds of a recording for each word.
WORD = 0.2447
MOST = 25 << 20
TEXT_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")


def check_chat(body: dict[str, Any]) -> None:
    """Raise `Refused` for the first error in what a chat asks of audio."""
    modalities = body.get("modalities")
    if modalities is None or modalities == ["text"]:
        return
    if sorted(modalities) != ["audio", "text"]:
        raise Refused("Invalid 'modalities'.", "modalities", "invalid_value")
    settings = body.get("audio")
    if not isinstance(settings, dict):
        raise Refused("Missing required parameter: 'audio'.", "audio")
    _check_voice(settings.get("voice"), "audio.voice")
    form = settings.get("format")
    if form not in ("wav", "mp3", "pcm16"):
        raise Refused("Invalid 'audio.format'. Supported values are: 'wav', 'mp3', 'pcm16'.",
                      "audio.format", "unsupported_value")  # fmt: skip
    if body.get("stream") and form != "pcm16":
        raise Refused(f"'audio.format' does not support '{form}' when stream=true. Supported "
                      "values are: 'pcm16'.", "audio.format", "unsupported_value")  # fmt: skip


def _check_voice(voice: Any, where: str) -> None:
    name = voice.get("id") if isinstance(voice, dict) else voice
    if name is None:
        raise Refused(f"Missing required parameter: '{where}'.", where)
    if name not in VOICES:
        names = ", ".join(f"'{one}'" for one in VOICES)
        raise Refused(f"Invalid value: '{name}'. Supported values are: {names}.", where)


def tone(text: str, speed: float = 1.0) -> bytes:
    """Return samples whose number depends on the length of a text."""
    count = int(len(text) * LETTER / speed)
    period = struct.pack("<60h", *([4000] * 30 + [-4000] * 30))
    return (period * (count // 60 + 1))[: 2 * count]


def encoded(samples: bytes, form: str) -> bytes:
    """Return samples in a format."""
    if form == "mp3":
        return SILENCE * max(1, len(samples) // 2 // 576)
    if form != "wav":
        return samples
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(samples)
    return file.getvalue()


def wants(sent: Mapping[str, Any]) -> bool:
    """Return True if a chat asks for audio."""
    return "audio" in (sent.get("modalities") or ())


def resolve(body: dict[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Return a chat in which the ids of spoken answers are their transcripts."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    new = []
    for index, message in enumerate(messages):
        audio = message.get("audio") if isinstance(message, dict) else None
        if audio and not message.get("content"):
            if audio["id"] not in known:
                where = f"messages[{index}].audio.id"
                raise Refused(f"Audio with id '{audio['id']}' not found.", where)
            message = {"role": "assistant", "content": known[audio["id"]]}
        new.append(message)
    return {**body, "messages": new}


def spoken(body: dict[str, Any], sent: Mapping[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """Return a chat completion whose texts are spoken."""
    for choice in body["choices"]:
        message = choice["message"]
        if message.get("tool_calls"):
            continue
        text, name = message["content"], _name(known)
        known[name] = text
        data = encoded(tone(text), sent["audio"]["format"])
        message["content"] = None
        message["audio"] = {"id": name, "data": base64.b64encode(data).decode(),
                            "expires_at": int(time.time()) + 3600, "transcript": text}  # fmt: skip
    return body


def spoken_chunks(chunks: list[Any], known: dict[str, str]) -> list[Any]:
    """Return the chunks of a chat whose text is spoken: pieces follow each transcript."""
    name, new, whole = _name(known), [], ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("role") and "content" in delta:
                choice["delta"] = {"role": "assistant", "audio": {"id": name, "transcript": ""}}
            elif delta.get("content"):
                text = delta["content"]
                whole += text
                choice["delta"] = {"audio": {"transcript": text}}
                new += [chunk, _piece(chunk, {"data": base64.b64encode(tone(text)).decode()})]
                continue
            elif choice["finish_reason"] and whole:
                new.append(_piece(chunk, {"expires_at": int(time.time()) + 3600}))
            new.append(chunk)
        if not chunk["choices"]:
            new.append(chunk)
    known[name] = whole
    return new


def _piece(chunk: dict[str, Any], audio: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"audio": audio}, "logprobs": None, "finish_reason": None}
    return {**chunk, "choices": [choice]}


def _name(known: Mapping[str, str]) -> str:
    return f"audio_{len(known):016x}"


class Audio:
    """The routes of speech and of transcriptions."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.known: dict[str, str] = {}

    async def speak(self, sent: dict[str, Any], send: Send, receive: Any) -> None:
        """Answer a request for speech."""
        server = self._server
        check_speech(sent)
        sent = server.fault.valid(SPEECH, sent)
        await server.ready()
        form = sent.get("response_format") or "mp3"
        data = encoded(tone(sent["input"], sent.get("speed") or 1.0), form)
        if sent.get("stream_format") == "sse":
            await self._stream(data, sent, send)
            return
        data = server.fault.sound(data, sent)
        await server.begin(send, KINDS[form])
        slow = len(sent["input"]) > LONG
        if slow and server.fault.buffers:
            await asyncio.sleep(1.2)
            slow = False
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        async for piece, _ in server.paced(pieces, slow, receive):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, data: bytes, sent: dict[str, Any], send: Send) -> None:
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        events = [{"type": "speech.audio.delta", "audio": base64.b64encode(one).decode()}
                  for one in pieces]  # fmt: skip
        count = len(model.tokenize(sent["input"], False))
        usage = {"input_tokens": count, "output_tokens": 0, "total_tokens": count}
        done = {"type": "speech.audio.done", "usage": usage}
        await self._send_events(SPEECH, [*events, done], sent, send)

    async def _send_events(
        self, path: str, events: list[Any], sent: dict[str, Any], send: Send
    ) -> None:
        server = self._server
        await server.begin_stream(send)
        for event in server.fault.audio_events(path, events, sent):
            await server.data(send, json.dumps(event))
        await server.data(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def transcribe(
        self, path: str, kind: str, body: bytes, send: Send, sent: dict[str, Any]
    ) -> None:
        """Answer a form with a recording."""
        server = self._server
        parts = parse(kind, body)
        if len(parts.get("file", {}).get("data", b"")) > MOST:
            raise Refused("The file is too large: at most 25 MB are allowed.", "file", status=413)
        sent |= unbracketed(server.fault.request(path, parts))
        check_form(sent)
        text, seconds = heard(sent["file"]["data"])
        sent |= server.fault.valid(path, sent)
        await server.ready()
        if sent.get("stream") == "true" and path == TRANSCRIPTIONS:
            await self._send_events(path, events_of(text, seconds), sent, send)
            return
        form = sent.get("response_format", "json")
        found = server.fault.reply(path, _reply(path, form, text, seconds, sent), sent)
        if isinstance(found, str):
            await server.begin(send, "text/vtt" if form == "vtt" else "text/plain; charset=utf-8")
            await send({"type": "http.response.body", "body": found.encode()})
            return
        await server.reply(send, 200, found)


def check_speech(body: dict[str, Any]) -> None:
    """Raise `Refused` for the first error in a request for speech."""
    if body.get("model") != "org/toy":
        raise Refused("you must provide a model parameter", "model")
    text = body.get("input")
    if not isinstance(text, str) or not 0 < len(text) <= 4096:
        raise Refused("Invalid 'input': a text of 1 to 4096 characters.", "input")
    _check_voice(body.get("voice"), "voice")
    form = body.get("response_format") or "mp3"
    if form not in ("wav", "pcm", "mp3"):
        raise Refused("Invalid 'response_format'. Supported values are: 'mp3', 'wav', 'pcm'.",
                      "response_format", "unsupported_value")  # fmt: skip
    if not 0.25 <= (body.get("speed") or 1.0) <= 4:
        raise Refused("Invalid 'speed'.", "speed")
    if body.get("stream_format") not in (None, "audio", "sse"):
        raise Refused("Invalid 'stream_format'.", "stream_format")


def parse(kind: str, body: bytes) -> dict[str, Any]:
    """Return the parts of a form: texts, lists of texts for names with brackets, and the file."""
    found = re.fullmatch(r'multipart/form-data; ?boundary="?([^"]+)"?', kind)
    if not found:
        raise Refused("The body must be a form.")
    boundary = b"--" + found.group(1).encode()
    begin, *parts = body.split(boundary)
    if begin or len(parts) < 2 or parts.pop().strip() != b"--":
        raise Refused("The form is incomplete.")
    sent: dict[str, Any] = {}
    for part in parts:
        head, _, value = part[2:-2].partition(b"\r\n\r\n")
        names = dict(re.findall(r'(name|filename)="([^"]*)"', head.decode()))
        name = names["name"]
        if "filename" in names:
            sent[name] = {"name": names["filename"], "data": value}
        elif name.endswith("[]"):
            sent.setdefault(name, []).append(value.decode())
        else:
            sent[name] = value.decode()
    return sent


def unbracketed(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a form, in which the name of a list may omit the brackets."""
    sent = {name.removesuffix("[]"): value for name, value in parts.items()}
    granularity = sent.get("timestamp_granularities")
    if isinstance(granularity, str):
        sent["timestamp_granularities"] = [granularity]
    return sent


def check_form(sent: dict[str, Any]) -> None:
    """Raise `Refused` for the first error in a form."""
    if not isinstance(sent.get("file"), dict):
        raise Refused("Missing required parameter: 'file'.", "file")
    if sent.get("model") != "org/toy":
        raise Refused("you must provide a model parameter", "model")
    form = sent.get("response_format", "json")
    if form not in TEXT_FORMATS:
        raise Refused("Invalid 'response_format'.", "response_format")
    granularities = sent.get("timestamp_granularities")
    if granularities and (form != "verbose_json" or not {*granularities} <= {"word", "segment"}):
        raise Refused("Invalid 'timestamp_granularities'.", "timestamp_granularities")
    try:
        float(sent.get("temperature", 0))
    except ValueError:
        raise Refused("Invalid 'temperature'.", "temperature") from None


def heard(data: bytes) -> tuple[str, float]:
    """Return the transcript of a recording, and its seconds."""
    seconds = _length(data)
    if not seconds:
        raise Refused("The file cannot be read. Supported are: wav, mp3, flac.", "file")
    count = round(seconds / WORD)
    return " ".join((WORDS * (count // len(WORDS) + 1))[:count]), seconds


def _length(data: bytes) -> float:
    """Return the seconds of a recording, or 0 if it cannot be read."""
    if data[:4] == b"fLaC":
        bits = int.from_bytes(data[18:26])
        return (bits & ((1 << 36) - 1)) / (bits >> 44)
    if data[:2] == b"\xff\xf3":
        # The recording of the checks has 24 kbit/s.
        return len(data) * 8 / 24_000
    try:
        with wave.open(io.BytesIO(data)) as file:
            loud = any(file.readframes(file.getnframes()))
            return file.getnframes() / file.getframerate() if loud else 0
    except (wave.Error, EOFError):
        return 0


def _usage(seconds: float) -> dict[str, Any]:
    return {"type": "duration", "seconds": int(seconds) + 1}


def events_of(text: str, seconds: float) -> list[Any]:
    """Return the events of a streamed transcription."""
    words = re.findall(r"\S+ ?", text)
    deltas = [{"type": "transcript.text.delta", "delta": word} for word in words]
    usage = {"type": "tokens", "input_tokens": int(10 * seconds), "output_tokens": len(words),
             "total_tokens": int(10 * seconds) + len(words)}  # fmt: skip
    return [*deltas, {"type": "transcript.text.done", "text": text, "usage": usage}]


def _reply(path: str, form: str, text: str, seconds: float, sent: Mapping[str, Any]) -> Any:
    half = seconds / 2
    words = text.split()
    lines = [" ".join(words[:3]), " ".join(words[3:])]
    times = [(0.0, half), (half, seconds)]
    if form == "text":
        return f"{text}\n"
    if form in ("srt", "vtt"):
        mark = "," if form == "srt" else "."
        cues = [f"{_stamp(start, mark)} --> {_stamp(end, mark)}\n{line}\n\n"
                for (start, end), line in zip(times, lines, strict=True)]  # fmt: skip
        if form == "vtt":
            return "WEBVTT\n\n" + "".join(cues)
        return "".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1))
    if form == "json":
        return {"text": text, "usage": _usage(seconds)}
    task = "transcribe" if path == TRANSCRIPTIONS else "translate"
    found = {"task": task, "language": "english", "duration": seconds, "text": text}
    if path == TRANSCRIPTIONS:
        found["usage"] = _usage(seconds)
    asked = sent.get("timestamp_granularities") or ["segment"]
    if "segment" in asked:
        found["segments"] = [
            _segment(number, *pair, f" {line}" if number else line)
            for number, (pair, line) in enumerate(zip(times, lines, strict=True))
        ]
    if "word" in asked:
        found["words"] = [{"word": word, "start": number * WORD, "end": number * WORD + 0.2}
                          for number, word in enumerate(words)]  # fmt: skip
    return found


def _segment(number: int, start: float, end: float, text: str) -> dict[str, Any]:
    return {"id": number, "seek": 0, "start": start, "end": end, "text": text, "tokens": [5, 6],
            "temperature": 0.0, "avg_logprob": -0.2, "compression_ratio": 1.1,
            "no_speech_prob": 0.01}  # fmt: skip


def _stamp(seconds: float, mark: str) -> str:
    thousandths = round(seconds * 1000)
    return f"00:00:{thousandths // 1000:02d}{mark}{thousandths % 1000:03d}"
