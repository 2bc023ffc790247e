"""Faults in speech, spoken answers and transcriptions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from suite.audio import FORMS, SPEECH, TRANSCRIPTIONS, TRANSLATIONS, VOICES, encoded
from suite.faults.edits import (
    Edit,
    When,
    chunks,
    drop,
    error,
    has,
    headers,
    put,
    refuses,
    rejects,
    reply,
    request,
    says,
    swap,
    takes,
    turn,
    valid,
)
from suite.server import Fault
from suite.work import CHAT

Change = Callable[[bytes], bytes]


def _sound(change: Change, form: str | None = None) -> Fault:
    """Return a fault that changes spoken files, of one format or of all."""
    return Fault(sound=lambda data, sent: (
        change(data) if form in (None, sent.get("response_format", "mp3")) else data))  # fmt: skip


def _kind(kind: str, instead: str) -> Fault:
    """Return a fault of the content type."""
    return headers(put("content-type", instead),
                   when=has("content-type", lambda found: found.startswith(kind)))  # fmt: skip


def _as(form: str, instead: str) -> Fault:
    """Return a fault that takes a format and sends another one."""
    return takes(has("response_format", form), SPEECH, response_format=instead)


def _speech(when: When, **instead: Any) -> Fault:
    return takes(when, SPEECH, **instead)


def _chat(when: When, **instead: Any) -> Fault:
    return takes(when, CHAT, **instead)


def _form(when: When, **instead: Any) -> Fault:
    return takes(when, TRANSCRIPTIONS, **instead)


def _spoken(*edits: Edit) -> Fault:
    """Return a fault in the audio object of an answer."""
    return reply(*edits, at=CHAT, when=has("modalities.*", "audio"))


def _stream(*edits: Edit) -> Fault:
    """Return a fault in the chunks of a spoken stream."""
    return chunks(*edits, at=CHAT, when=has("modalities.*", "audio"))


def _events(path: str, *edits: Edit) -> Fault:
    """Return a fault in the events of speech, or of a transcription."""
    return Fault(audio_events=lambda at, found, sent: _all(edits, found) if at == path else found)


def _text(form: str, change: Edit) -> Fault:
    """Return a fault in a transcription in one format."""
    return Fault(
        reply=lambda path, body, sent: (
            change(body) if path in FORMS and sent.get("response_format", "json") == form else body
        )
    )


def _verbose(*edits: Edit) -> Fault:
    return Fault(
        reply=lambda path, body, sent: (
            _all(edits, body)
            if (path == TRANSCRIPTIONS and sent.get("response_format") == "verbose_json")
            else body
        )
    )


def _all(edits: tuple[Edit, ...], body: Any) -> Any:
    for edit in edits:
        body = edit(body)
    return body


def _file(begins: bytes, change: Change, name: str = "") -> Fault:
    """Return a fault that reads recordings of some format otherwise."""

    def hook(path: str, sent: dict[str, Any]) -> dict[str, Any]:
        file = sent.get("file")
        if path not in FORMS or not isinstance(file, dict) or name not in file["name"]:
            return sent
        if not file["data"].startswith(begins):
            return sent
        return {**sent, "file": {**file, "data": change(file["data"])}}

    return Fault(request=hook)


def _unread(begins: bytes) -> Fault:
    """Return a fault that rejects recordings of some format, and lists no formats."""
    hook = error(put("error.message", "Broken."), when=says("cannot be read")).error
    return Fault(error=hook, request=_file(begins, lambda data: b"").request)


def _wave(at: int, value: bytes, when: Callable[[bytes], bool] = bool) -> Fault:
    """Return a fault that reads a field of the head of wav files as another value."""
    return _file(b"RIFF", lambda data: (
        data[:at] + value + data[at + len(value):] if when(data) else data))  # fmt: skip


def _joined_later(events: list[Any]) -> list[Any]:
    """Return events of speech whose pieces are reversed."""
    return [*events[-2::-1], events[-1]]


def _headed(events: list[Any]) -> list[Any]:
    """Return events of speech, the first of them twice: a file with two heads."""
    return [events[0], *events]


def _other_text(body: Any) -> Any:
    return {**body, "text": f"{body['text']} {next(_numbers)}"}


_numbers = itertools.count(1)
SECOND = b"\x00\x10" * 24_000
LIST = "timestamp_granularities[]"
SPEECH_FAULTS = {
    "wav-as-pcm": _sound(lambda data: data[44:], "wav"),
    "wav-silent": _sound(lambda data: data[:44] + bytes(len(data) - 44), "wav"),
    "wav-size": _sound(lambda data: data[:40] + b"\x01\x00\x00\x00" + data[44:], "wav"),
    "wav-cut": _sound(lambda data: data[:-1000], "wav"),
    "wav-kind": _kind("audio/wav", "audio/mpeg"),
    "pcm-as-wav": _sound(lambda data: encoded(data, "wav"), "pcm"),
    "pcm-16-khz": _sound(lambda data: data[: len(data) // 3 * 2 // 2 * 2], "pcm"),
    "pcm-odd": _sound(lambda data: data[:-1], "pcm"),
    "pcm-kind": _kind("audio/pcm", "audio/wav"),
    "one-length": _sound(lambda data: encoded(SECOND, "wav"), "wav"),
    "mp3-as-wav": _as("mp3", "wav"),
    "mp3-cut": _sound(lambda data: data[: len(data) // 3], "mp3"),
    "mp3-kind": _kind("audio/mpeg", "audio/mp4"),
    "default-wav": takes(lambda body: "response_format" not in body, SPEECH,
                         response_format="wav"),
    **{f"{form}-as-wav": _as(form, "wav") for form in ("opus", "aac", "flac")},
    "formats-unlisted": error(put("error.message", "Invalid 'response_format'."),
                              when=says("'response_format'")),
    "no-input-taken": _speech(lambda body: "input" not in body, input="Yes."),
    "empty-input-taken": _speech(has("input", ""), input="Yes."),
    "long-input-taken": _speech(has("input", lambda text: len(str(text)) == 4097), input="Yes."),
    "number-input-taken": _speech(has("input", 5), input="5"),
    "no-model-taken": _speech(lambda body: "model" not in body, model="org/toy"),
    "no-voice-taken": _speech(lambda body: "voice" not in body, voice="toy"),
    "unknown-voice-taken": _speech(has("voice", "nobody-speaks"), voice="toy"),
    "slow-taken": _speech(has("speed", 0.2), speed=0.25),
    "fast-taken": _speech(has("speed", 4.1), speed=4),
    "midi-taken": _as("midi", "wav"),
    "stream-format-taken": _speech(has("stream_format", "ws"), stream_format="audio"),
    "only-alloy": refuses(has("voice", lambda voice: voice in VOICES[2:]), SPEECH, 400),
    "voices-unlisted": error(put("error.message", "Unknown voice."),
                             when=says("'nobody-speaks'")),
    "voices-listed-wrong": error(turn("error.message", lambda text: text.replace("'toy'", "'x'")),
                                 when=says("'nobody-speaks'")),
    "voice-object-refused": refuses(has("voice", dict), SPEECH, 400),
    "speed-ignored": valid(drop("speed"), at=SPEECH),
    "speed-one-refused": refuses(has("speed", 1.0), SPEECH),
    "instructions-refused": refuses(has("instructions"), SPEECH),
    "instructions-spoken": request(lambda body: {
        **body, "input": f"{body['instructions'] * 12} {body['input']}"}, at=SPEECH,
        when=has("instructions")),
    "speech-not-acceptable": rejects(lambda method, path, found: (
        path == SPEECH and found.get("accept") == "application/octet-stream"), 406),
    "speech-request-id": headers(drop("x-request-id"), when=has(
        "content-type", lambda found: found.startswith("audio/"))),
    "speech-no-key": Fault(wrong_key=403),
    "speech-done-missing": _events(SPEECH, lambda found: found[:-1]),
    "speech-no-usage": _events(SPEECH, lambda found: [*found[:-1], {"type": found[-1]["type"]}]),
    "speech-usage-sum": _events(SPEECH, put("*.usage.total_tokens", 1)),
    "speech-delta-name": _events(SPEECH, lambda found: [
        {"type": one["type"], "delta": one["audio"]} if "audio" in one else one for one in found]),
    "speech-delta-type": _events(SPEECH, swap("*.type", "speech.audio.delta", "audio.delta")),
    "speech-delta-cut": _events(SPEECH, turn("*.audio", lambda data: data[:-1])),
    "speech-delta-lost": _events(SPEECH, lambda found: found[1:]),
    "speech-reversed": _events(SPEECH, _joined_later),
    "speech-two-heads": _events(SPEECH, _headed),
    "speech-half": _events(SPEECH, lambda found: [*found[: len(found) // 2], found[-1]]),
    "models-no-speech": reply(put("data.*.architecture.output_modalities", ["text"]),
                              at="/models"),
}  # fmt: skip
CHAT_FAULTS = {
    "chat-null-modalities-refused": refuses(lambda body: body.get("modalities", 0) is None,
                                            CHAT, 400),
    "chat-text-modality-refused": refuses(has("modalities", ["text"]), CHAT, 400),
    "chat-content": _spoken(put("choices.*.message.content", "Hello")),
    "chat-id": _spoken(put("choices.*.message.audio.id", "msg_1")),
    "chat-expired": _spoken(put("choices.*.message.audio.expires_at", 1_700_000_000)),
    "chat-expires-milliseconds": _spoken(
        turn("choices.*.message.audio.expires_at", lambda time: 1000 * time)),
    "chat-expires-text": _spoken(turn("choices.*.message.audio.expires_at", str)),
    "chat-no-transcript": _spoken(put("choices.*.message.audio.transcript", "")),
    "chat-no-object": _spoken(put("choices.*.message.audio", None)),
    "chat-cut": _spoken(turn("choices.*.message.audio.data", lambda data: data[:-1])),
    "chat-wav-as-pcm": _chat(has("audio.format", "wav"),
                              audio={"voice": "alloy", "format": "pcm16"}),
    "chat-pcm-as-wav": _chat(lambda body: has("audio.format", "pcm16")(body) and not (
        body.get("stream")), audio={"voice": "alloy", "format": "wav"}),
    "chat-other-transcript": _spoken(turn("choices.*.message.audio.transcript",
                                           lambda text: f"{text} "), ),
    "chat-voice-object": refuses(has("audio.voice", dict), CHAT, 400),
    "chat-unasked": request(put("modalities", ["text", "audio"]), at=CHAT,
                             when=lambda body: "audio" in body and "modalities" not in body),
    "chat-no-settings": _chat(lambda body: has("modalities.*", "audio")(body) and (
        "audio" not in body), audio={"voice": "toy", "format": "wav"}),
    **{f"chat-{name}-taken": _chat(when, audio={"voice": "toy", "format": "wav"})
       for name, when in {
           "no-voice": lambda body: body.get("audio", {"voice": 0}).get("voice") is None,
           "no-format": lambda body: body.get("audio", {"format": 0}).get("format") is None,
           "unknown-voice": has("audio.voice", "nobody-speaks"),
           "unknown-format": has("audio.format", "midi"),
       }.items()},
    "chat-smell-taken": _chat(has("modalities.*", "smell"), modalities=["text"]),
    "chat-stream-wav-taken": _chat(lambda body: body.get("stream") and (
        has("audio.format", "wav")(body)), audio={"voice": "toy", "format": "pcm16"}),
    "chat-stream-wav-words": error(put("error.message", "Only pcm16 can be streamed."),
                                    when=says("when stream=true")),
    "chat-stream-wav-param": error(put("error.param", "audio"), when=says("when stream=true")),
    "chat-stream-no-data": _stream(drop("*.choices.*.delta.audio.data")),
    "chat-stream-cut": _stream(turn("*.choices.*.delta.audio.data", lambda data: data[:-1])),
    "chat-stream-odd": _stream(turn("*.choices.*.delta.audio.data", lambda data: data[:-4])),
    "chat-stream-content": _stream(put("*.choices.*.delta.content", "x")),
    "chat-stream-half": _stream(lambda found: [
        one for one in found if "data" not in str(one) or "'data': ''" in str(one)][:1] + found[
            -len(found) // 3:]),
    "chat-stream-transcript-lost": _stream(lambda found: [
        one for at, one in enumerate(found) if at != 3 or "transcript" not in str(one)]),
    "chat-stream-no-id": _stream(drop("*.choices.*.delta.audio.id")),
    "chat-stream-two-ids": _stream(lambda found: [
        put("choices.*.delta.audio.id", f"audio_{at}")(one) for at, one in enumerate(found)]),
    "chat-stream-no-expiry": _stream(drop("*.choices.*.delta.audio.expires_at")),
    "chat-stream-no-end": _stream(put("*.choices.*.finish_reason", None)),
    "chat-stream-no-usage": _stream(put("*.usage", None)),
    "chat-id-forgotten": _spoken(turn("choices.*.message.audio.id", lambda name: f"{name}x")),
    "chat-stream-id-forgotten": _stream(turn("*.choices.*.delta.audio.id",
                                              lambda name: f"{name}x")),
    "chat-follow-up-empty": request(lambda body: {**body, "messages": [
        {**one, "content": "x"} if one.get("audio") and "6789" not in one["audio"]["id"] else one
        for one in body["messages"]]}, at=CHAT, when=has("messages.*.audio")),
    "chat-unknown-id-taken": request(turn("messages", lambda found: [
        one for one in found if "0123456789" not in str(one)]), at=CHAT,
        when=has("messages.*.audio")),
    "chat-usage": _spoken(put("usage", None)),
    "chat-prompt-free": _spoken(put("usage.prompt_tokens", 0),
                                 lambda body: put("usage.total_tokens", body["usage"][
                                     "completion_tokens"])(body)),
    "chat-call-spoken": _spoken(lambda body: turn("choices.*.message", lambda found: (
        {**found, "audio": {"id": "audio_1", "data": "", "expires_at": 1, "transcript": ""}}
        if found.get("tool_calls") else found))(body)),
    "chat-no-call": request(drop("tool_choice"), drop("tools"), at=CHAT,
                             when=has("modalities.*", "audio")),
}  # fmt: skip
_TIMES = re.compile(r"00:00:00(?=[.,]\d)")
TRANSCRIPTION_FAULTS = {
    "text-missing": _text("json", lambda body: {"transcript": body["text"]}),
    "text-list": _text("json", turn("text", lambda text: [text])),
    "usage-free": _text("json", put("usage.seconds", 60)),
    "usage-text": _text("json", put("usage.seconds", "2")),
    "usage-missing": _text("json", drop("usage")),
    "usage-type": _text("json", drop("usage.type")),
    "usage-tokens": _text("json", put("usage", {"type": "tokens", "input_tokens": 1,
                                                "output_tokens": 1, "total_tokens": 1})),
    "transcription-as-text": headers(put("content-type", "text/plain"),
                                     when=has("content-type", "application/json")),
    "other-words": _text("json", put("text", "What a fine day for a walk.")),
    "text-counted": _text("json", _other_text),
    "plain-no-break": _text("text", str.strip),
    "plain-quoted": _text("text", lambda text: f'"{text.strip()}"\n'),
    "plain-kind": _kind("text/plain", "application/json"),
    "vtt-kind": _kind("text/vtt", "application/json"),
    "srt-as-vtt": _form(has("response_format", "srt"), response_format="vtt"),
    "srt-from-zero": _text("srt", lambda text: re.sub(
        r"^(\d)$", lambda found: str(int(found[1]) - 1), text, flags=re.MULTILINE)),
    "srt-points": _text("srt", lambda text: re.sub(r"(\d),(\d)", r"\1.\2", text)),
    "srt-no-gap": _text("srt", lambda text: text.replace("\n\n", "\n")),
    "srt-hours": _text("srt", lambda text: _TIMES.sub("01:00:00", text)),
    "srt-words": _text("srt", lambda text: text.replace("cat", "dog")),
    "vtt-as-srt": _form(has("response_format", "vtt"), response_format="srt"),
    "vtt-commas": _text("vtt", lambda text: re.sub(r"(\d)\.(\d)", r"\1,\2", text)),
    "vtt-hours": _text("vtt", lambda text: _TIMES.sub("01:00:00", text)),
    "vtt-words": _text("vtt", lambda text: text.replace("cat", "dog")),
    "verbose-as-json": _form(lambda body: LIST not in body and (
        body.get("response_format") == "verbose_json"), response_format="json"),
    "verbose-no-usage": _verbose(drop("usage")),
    "verbose-ratio": _verbose(put("segments.*.compression_ratio", -1.2)),
    "verbose-temperature": _verbose(put("segments.*.temperature", -0.2)),
    "verbose-task": _verbose(put("task", "listen")),
    "verbose-code": _verbose(put("language", "en")),
    "verbose-duration": _verbose(put("duration", 60.0)),
    "verbose-text-duration": _verbose(turn("duration", str)),
    "verbose-no-segments": _verbose(put("segments", [])),
    "verbose-segment-key": _verbose(drop("segments.*.seek")),
    "verbose-segment-ids": _verbose(put("segments.*.id", 0)),
    "verbose-times-fall": _verbose(turn("segments", lambda found: [
        {**one, "start": 3 - one["start"], "end": 3 - one["end"]} for one in found])),
    "verbose-times-zero": _verbose(put("segments.*.start", 0.0), put("segments.*.end", 0.0)),
    "verbose-other-text": _verbose(put("text", "The dog.")),
    "verbose-usage": _verbose(put("usage.seconds", 60)),
    "verbose-words": _verbose(lambda body: {"words": [
        {"word": "The", "start": 0.0, "end": 0.1}], **body}),
    "words-missing": _verbose(drop("words")),
    "words-text": _verbose(turn("words", lambda found: [one["word"] for one in found])),
    "words-late": _verbose(put("words.*.end", 99.0)),
    "words-other": _verbose(put("words.*.word", "dog")),
    "array-name-refused": refuses(lambda body: "timestamp_granularities" in body,
                                  TRANSCRIPTIONS, 400),
    "no-file-taken": _form(lambda body: "file" not in body,
                           file={"name": "", "data": encoded(SECOND, "wav")}),
    "file-unnamed": error(put("error", {"message": "Incomplete."}), when=says("'file'")),
    "not-audio-500": error(status=500, when=says("cannot be read")),
    "form-500": error(status=500, when=says("must be a form")),
    "form-cut-500": error(status=500, when=says("form is incomplete")),
    "transcription-midi-taken": _form(has("response_format", "midi"), response_format="json"),
    "warm-taken": _form(has("temperature", "warm"), temperature="0"),
    "letters-taken": _form(lambda body: body.get(LIST) == ["letter"], **{LIST: ["word"]}),
    "granularity-alone-taken": _form(lambda body: "response_format" not in body, **{LIST: []}),
    "form-no-model-taken": _form(lambda body: "model" not in body, model="org/toy"),
    "large-500": error(status=500, when=says("too large")),
    "wav-16-khz": _wave(24, (16_000).to_bytes(4, "little")),
    "wav-mono": _wave(22, b"\x01\x00", lambda data: data[22] == 2),
    "wav-8-bit": _wave(32, b"\x01\x00\x08\x00", lambda data: data[34] == 24),
    "flac-garbled": _file(b"fLaC", lambda data: data[:18] + b"\xff\xff" + data[20:]),
    "mp3-garbled": _file(b"\xff\xf3", lambda data: data[: len(data) // 3]),
    **{f"{name}-unread": _unread(begins)
       for name, begins in (("flac", b"fLaC"), ("mp3", b"\xff\xf3"))},
    "named-webm": _file(b"", lambda data: b"", ".webm"),
    "language-refused": refuses(has("language"), TRANSCRIPTIONS, 400),
    "prompt-refused": refuses(has("prompt"), TRANSCRIPTIONS, 400),
    "temperature-refused": refuses(has("temperature", "0"), TRANSCRIPTIONS, 400),
    "prompt-heard": Fault(reply=lambda path, body, sent: put("text", sent["prompt"])(body) if (
        path == TRANSCRIPTIONS and sent.get("prompt")) else body),
    "chunking-refused": refuses(has("chunking_strategy"), TRANSCRIPTIONS, 400),
    "logprobs-refused": refuses(lambda body: "include[]" in body, TRANSCRIPTIONS, 400),
    "user-refused": refuses(has("user"), TRANSCRIPTIONS, 400),
    "transcription-stream-whole": request(drop("stream"), at=TRANSCRIPTIONS),
    "transcription-stream-empty": _events(TRANSCRIPTIONS, put("*.text", "")),
    "transcription-stream-lost": _events(TRANSCRIPTIONS, lambda found: found[1:]),
    "transcription-stream-done": _events(TRANSCRIPTIONS, lambda found: found[:-1]),
    "transcription-stream-types": _events(TRANSCRIPTIONS, put("*.type", "transcript.text.delta")),
    "transcription-stream-usage": _events(TRANSCRIPTIONS, put("*.usage.total_tokens", 1)),
    "transcription-stream-seconds": _events(TRANSCRIPTIONS, lambda found: [
        *found[:-1], {**found[-1], "usage": {"type": "duration", "seconds": 2}}]),
    "transcription-stream-delta": _events(TRANSCRIPTIONS, lambda found: [
        {"type": one["type"], "text": one["delta"]} if "delta" in one else one for one in found]),
    "stream-false-streams": request(swap("stream", "false", "true"), at=TRANSCRIPTIONS),
    "translation-other": Fault(reply=lambda path, body, sent: (
        put("text", "Il fait beau.")(body) if path == TRANSLATIONS else body)),
    "translation-task": Fault(reply=lambda path, body, sent: swap("task", "translate", "x")(body)),
    "translation-language": Fault(reply=lambda path, body, sent: (
        swap("language", "english", "en")(body) if path == TRANSLATIONS else body)),
    "translation-as-json": takes(has("response_format", "verbose_json"), TRANSLATIONS,
                                 response_format="json"),
}  # fmt: skip
FAULTS: Mapping[str, Fault] = {
    f"audio-{name}": fault
    for name, fault in (SPEECH_FAULTS | CHAT_FAULTS | TRANSCRIPTION_FAULTS).items()
}
