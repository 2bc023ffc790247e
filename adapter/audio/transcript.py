"""A transcript in the formats of replies (contract of audio, section 3)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import orjson

from ...backends.speech.base import Segment
from ...schemas.openai.transcriptions import (
    DurationUsage,
    TokenUsage,
    Transcript,
    TranscriptEvent,
    TranscriptSegment,
)
from .languages import NAMES

# The types of replies in formats that are not JSON.
TYPES: Mapping[str, bytes] = {
    "text": b"text/plain; charset=utf-8",
    "srt": b"text/plain; charset=utf-8",
    "vtt": b"text/vtt; charset=utf-8",
}


class Transcribed(NamedTuple):
    """A recording that was transcribed.

    Args:
        segments: its text, in the order of the recording.
        seconds: its length.
        language: the ISO 639-1 code of what is spoken; empty if it is unknown.
        temperature: that of the request.
        granularities: what has times in `verbose_json`: `segment`, `word` or both.
        translate: True if the text is a translation to English.
    """

    segments: Sequence[Segment]
    seconds: float
    language: str = ""
    temperature: float = 0.0
    granularities: Sequence[str] = ("segment",)
    translate: bool = False

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join([one.text for one in self.segments]).strip()


def usage_of(found: Transcribed) -> DurationUsage | TokenUsage:
    """Return the tokens of a language model; for others, the length."""
    read = sum(one.prompt_tokens for one in found.segments)
    written = sum(one.completion_tokens for one in found.segments)
    if not read:
        return {"type": "duration", "seconds": math.ceil(found.seconds)}
    return {
        "type": "tokens",
        "input_tokens": read,
        "output_tokens": written,
        "total_tokens": read + written,
    }


def body_of(found: Transcribed, form: str) -> bytes:
    """Return the body of a reply; large ones are for a thread."""
    return _BODIES[form](found)


def _json(found: Transcribed) -> bytes:
    reply: Transcript = {"text": found.text}
    if not found.translate:
        reply["usage"] = usage_of(found)
    return orjson.dumps(reply)


def _text(found: Transcribed) -> bytes:
    return f"{found.text}\n".encode()


def _verbose(found: Transcribed) -> bytes:
    language = "en" if found.translate else found.language
    reply: Transcript = {
        "task": "translate" if found.translate else "transcribe",
        "language": NAMES.get(language, language) or "unknown",
        "duration": round(found.seconds, 3),
        "text": found.text,
    }
    if "segment" in found.granularities:
        reply["segments"] = [
            _segment(index, one, found.temperature) for index, one in enumerate(found.segments)
        ]
    if "word" in found.granularities:
        reply["words"] = [
            {"word": word.text.strip(), "start": _rounded(word.start), "end": _rounded(word.end)}
            for one in found.segments
            for word in one.words
        ]
    if not found.translate:
        reply["usage"] = usage_of(found)
    return orjson.dumps(reply)


def _segment(index: int, one: Segment, temperature: float) -> TranscriptSegment:
    start, end = one.start or 0.0, one.end or 0.0
    data = one.text.encode()
    return {
        "id": index,
        "seek": int(start * 100),
        "start": _rounded(start),
        "end": _rounded(end),
        "text": one.text,
        "tokens": list(one.tokens),
        "temperature": temperature,
        "avg_logprob": one.logprob or 0.0,
        "compression_ratio": len(data) / len(zlib.compress(data)),
        "no_speech_prob": one.no_speech or 0.0,
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _srt(found: Transcribed) -> bytes:
    cues = [
        f"{number}\n{_times(one, ',')}\n{_line(one.text)}\n\n"
        for number, one in enumerate(_spoken(found), 1)
    ]
    return "".join(cues).encode()


def _vtt(found: Transcribed) -> bytes:
    cues = [f"{_times(one, '.')}\n{_line(one.text)}\n\n" for one in _spoken(found)]
    return ("WEBVTT\n\n" + "".join(cues)).encode()


_BODIES: Mapping[str, Callable[[Transcribed], bytes]] = {
    "json": _json,
    "text": _text,
    "verbose_json": _verbose,
    "srt": _srt,
    "vtt": _vtt,
}


def _spoken(found: Transcribed) -> list[Segment]:
    return [one for one in found.segments if one.text.strip()]


def _times(one: Segment, mark: str) -> str:
    return f"{_clock(one.start or 0.0, mark)} --> {_clock(one.end or 0.0, mark)}"


def _clock(seconds: float, mark: str) -> str:
    """Return a time of a subtitle: hours, minutes, seconds and, after `mark`, milliseconds."""
    rest, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(rest, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{milliseconds:03}"


def _line(text: str) -> str:
    """Return a text as one line that no parser takes for the times of a cue."""
    return " ".join(text.replace("-->", "->").split())


class TextStream:
    """The events of a stream; their texts, joined, are the transcript without space around it."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False

    def feed(self, text: str) -> bytes:
        """Return the event of a further part of the text; nothing while there is none to send."""
        text = self._held + text
        if not self._has_begun:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if not kept:
            return b""
        self._has_begun = True
        return _event({"type": "transcript.text.delta", "delta": kept})

    @staticmethod
    def end(found: Transcribed) -> bytes:
        """Return the last event."""
        done: TranscriptEvent = {"type": "transcript.text.done", "text": found.text}
        usage = usage_of(found)
        # OpenAI's type of this event has tokens only.
        if usage["type"] == "tokens":
            done["usage"] = {**usage}
        return _event(done)


def _event(event: TranscriptEvent) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
