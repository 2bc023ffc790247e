"""`POST /audio/transcriptions` and `/audio/translations` (contract of audio, 3 and 4)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from openai.types.audio import (
    Transcription,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranscriptionVerbose,
    Translation,
    TranslationVerbose,
)

from ..check import Body, Diverges, check, expect
from ..published import first_wrong
from ..recordings import FORM, SENTENCE, Part, at_rate, flac, form, samples, spoken, wav
from ..target import Api, Reply, events
from .audio import expect_kind, served

T = "/audio/transcriptions"
TRANSLATIONS = "/audio/translations"
FILE: Part = ("file", ("sentence.wav", spoken()))
# The seconds of the sentence.
SECONDS = len(samples()) / 16_000
# OpenAI's limit.
MOST = 25 << 20
SEGMENT = ("id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob",
           "compression_ratio", "no_speech_prob")  # fmt: skip
TIMED = ("srt", "vtt", "verbose_json")
_TIME = r"\d\d:\d\d:\d\d"
# The hours of a time in vtt may be missing.
_SHORT = r"(?:\d\d:)?\d\d:\d\d"
SRT = re.compile(rf"(?:(\d+)\n({_TIME},\d{{3}}) --> ({_TIME},\d{{3}})\n[^\n]+\n(?:\n|$))+")
CUE = re.compile(rf"({_SHORT}[.,]\d{{3}}) --> ({_SHORT}[.,]\d{{3}})\n([^\n]+)")
VTT = re.compile(rf"WEBVTT\n\n(?:{_SHORT}\.\d{{3}} --> .+\n[^\n]+\n(?:\n|$))+")


async def send(api: Api, *parts: Part, path: str = T, file: Part | None = FILE) -> Reply:
    """Send a form with a file and a model, unless the parts name another model."""
    names = {name for name, _ in parts}
    model: list[Part] = [] if "model" in names else [("model", api.model)]
    all_parts = [*([] if file is None else [file]), *model, *parts]
    sent = dict(all_parts)
    return await api.send("POST", path, form(*all_parts), FORM, sent)


async def transcribe(api: Api, *parts: Part, **more: Any) -> Reply:
    """Return the reply to a request that the server must support."""
    return served(await send(api, *parts, **more))


async def text_of(api: Api, *parts: Part, **more: Any) -> str:
    """Return the text of a transcription."""
    found = (await transcribe(api, *parts, **more)).json()
    expect(isinstance(found, dict) and isinstance(found.get("text"), str),
           f"expected an object with a text, but got {str(found)[:200]}")  # fmt: skip
    text: str = found["text"]
    return text


def likeness(one: str, other: str) -> float:
    """Return the share of words that two texts have in common, in order."""
    return difflib.SequenceMatcher(None, _words(one), _words(other)).ratio()


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def expect_alike(found: str, wanted: str, what: str) -> None:
    """Raise `Fail` unless most of a text's words are in another one."""
    alike = likeness(found, wanted) > 0.7
    expect(alike, f"expected about {wanted!r} {what}, but got {found!r}")


@check("audio.transcription",
       "A transcription is an object with the text, and its usage adds up.",
       "must", "A3 A9.24")  # fmt: skip
async def as_json(api: Api) -> None:
    reply = await transcribe(api)
    expect_kind(reply, "application/json")
    found = reply.json()
    wrong = first_wrong(Transcription, found)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
    for count in [found["usage"]] if found.get("usage") is not None else []:
        expect_counted(count)


def expect_counted(usage: Any) -> None:
    """Raise `Fail` unless a usage is the seconds of the sentence, or tokens that add up."""
    if usage.get("type") == "duration":
        seconds = usage["seconds"]
        fine = type(seconds) in (int, float) and abs(seconds - SECONDS) < 1
        expect(fine, f"expected {SECONDS:.2f} s or the next whole second, but got {usage}")
        return
    expect(usage.get("type") == "tokens", f"expected the type duration or tokens, but got {usage}")
    counts = [usage.get(f"{kind}_tokens") for kind in ("input", "output", "total")]
    fine = all(type(count) is int for count in counts) and counts[0] + counts[1] == counts[2]
    expect(fine, f"expected counts that add up, but got {usage}")


@check("audio.transcription-usage",
       "A transcription as JSON or verbose JSON has usage, in seconds or tokens.",
       "should", "A3 A9.24")  # fmt: skip
async def usage(api: Api) -> None:
    replies = [await transcribe(api), await _timed(api, "verbose_json")]
    for reply in filter(None, replies):
        found = reply.json().get("usage")
        expect(isinstance(found, dict), f"expected usage, but got {reply.text[:200]}")
        expect_counted(found)


@check("audio.words-heard", "A spoken sentence is transcribed with most of its words.",
       "should", "A3 A9.24")  # fmt: skip
async def words_heard(api: Api) -> None:
    expect_alike(await text_of(api), SENTENCE, "in the recording")


@check("audio.same-twice", "The same recording has the same text each time.", "should", "A3")
async def same_twice(api: Api) -> None:
    one, two = [await text_of(api, ("temperature", "0")) for _ in range(2)]
    expect(one == two, f"expected one text, but got {one!r} and {two!r}")


@check("audio.transcription-text", "A transcription as text is the text and a line break.",
       "must", "A3 A9.25")  # fmt: skip
async def as_text(api: Api) -> None:
    wanted = await text_of(api)
    reply = await transcribe(api, ("response_format", "text"))
    expect_kind(reply, "text/plain")
    fine = reply.text.endswith("\n") and reply.text.strip() == wanted.strip()
    expect(fine, f"expected {wanted!r} and a line break, but got {reply.text!r}")


async def _timed(api: Api, kind: str, *more: Part) -> Reply | None:
    """Return a transcription in a format with times, or None if it is rejected by name."""
    await transcribe(api)
    reply = await send(api, ("response_format", kind), *more)
    if reply.status == 400:
        error = reply.error(400)
        named = "response_format" in f"{error['param']} {error['message']}"
        expect(named, f"expected an error that names response_format, but got {error}")
        return None
    return served(reply)


def _seconds(stamp: str) -> float:
    *hours, minutes, rest = stamp.replace(",", ".").split(":")
    return 3600 * sum(map(int, hours)) + 60 * int(minutes) + float(rest)


def _expect_cues(cues: Sequence[tuple[str, str, str]], text: str) -> None:
    """Raise `Fail` unless times rise within the recording, and the cues have the text."""
    expect_rising([(_seconds(start), _seconds(end)) for start, end, _ in cues])
    found = " ".join(words.strip() for *_, words in cues)
    expect(found.split() == text.split(), f"expected {text!r}, but got {found!r}")


def expect_rising(times: Sequence[tuple[float, float]]) -> None:
    """Raise `Fail` unless times rise, and are in the recording."""
    last = 0.0
    for start, end in times:
        fine = last - 1e-6 <= start <= end <= SECONDS + 1
        expect(fine, f"expected times that rise up to {SECONDS:.2f} s, but got {times}")
        last = start
    expect(times and max(end for _, end in times) > 0, f"expected times, but got {times}")


@check("audio.srt", "Subtitles as srt have numbers and times, or are rejected by name.",
       "must", "A3 A9.25")  # fmt: skip
async def srt(api: Api) -> None:
    reply = await _timed(api, "srt")
    if reply is None:
        return
    expect_kind(reply, "text/plain", "application/x-subrip")
    expect(SRT.fullmatch(reply.text), f"expected srt, but got {reply.text[:200]!r}")
    numbers = [int(number) for number in re.findall(r"^(\d+)$", reply.text, re.MULTILINE)]
    rising = numbers == list(range(1, len(numbers) + 1))
    expect(rising, f"expected numbers from 1, but got {numbers}")
    _expect_cues(CUE.findall(reply.text), await text_of(api))


@check("audio.vtt", "Subtitles as vtt have a head and times, or are rejected by name.",
       "must", "A3 A9.25")  # fmt: skip
async def vtt(api: Api) -> None:
    reply = await _timed(api, "vtt")
    if reply is None:
        return
    expect_kind(reply, "text/vtt", "text/plain")
    expect(VTT.fullmatch(reply.text), f"expected vtt, but got {reply.text[:200]!r}")
    _expect_cues(CUE.findall(reply.text), await text_of(api))


@check("audio.verbose",
       "A verbose transcription has a language, the duration and segments with all keys, or is "
       "rejected by name.",
       "must", "A3 A9.26")  # fmt: skip
async def verbose(api: Api) -> None:
    reply = await _timed(api, "verbose_json")
    if reply is None:
        return
    found = reply.json()
    wrong = first_wrong(TranscriptionVerbose, found)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
    expect_verbose(found, "transcribe")
    expect(not found.get("words"), f"expected no words, but got {found.get('words')}")


def expect_verbose(found: Any, task: str) -> None:
    """Raise `Fail` unless a verbose transcription has the recording's length and its segments."""
    expect(found.get("task") == task, f"expected task {task}, but got {found}")
    language = found["language"]
    expect(language == "english", f"expected the full name english, but got {language!r}")
    near = abs(float(found["duration"]) - SECONDS) < 0.5
    expect(near, f"expected {SECONDS:.2f} s, but got {found['duration']}")
    segments = found["segments"]
    expect(segments, "expected segments, but got none")
    for number, segment in enumerate(segments):
        missing = [key for key in SEGMENT if key not in segment]
        expect(not missing, f"expected {', '.join(missing)} in a segment, but got {segment}")
        # Those of some engines begin with 1.
        wanted = number + int(segments[0]["id"] == 1)
        expect(segment["id"] == wanted, f"expected id {wanted}, but got {segment['id']}")
        counts = (segment["seek"], segment["compression_ratio"], *segment["tokens"])
        shares = (segment["no_speech_prob"], segment["temperature"])
        sane = segment["avg_logprob"] <= 0 <= min(*shares, *counts) and max(shares) <= 1
        expect(sane, f"expected possible numbers in a segment, but got {segment}")
    expect_rising([(one["start"], one["end"]) for one in segments])
    joined = "".join(one["text"] for one in segments)
    same = "".join(joined.split()) == "".join(found["text"].split())
    expect(same, f"expected the text, but got {joined!r}")
    if found.get("usage") is not None:
        expect_counted(found["usage"])


def _granularity(part: str) -> Body:
    async def run(api: Api) -> None:
        reply = await _timed(api, "verbose_json")
        if reply is None:
            return
        reply = await send(api, ("response_format", "verbose_json"), (part, "word"))
        if reply.status == 400:
            error = str(reply.error(400))
            named = "timestamp_granularities" in error
            expect(named, f"expected an error that names the granularity, but got {error}")
            return
        found = served(reply).json()
        wrong = first_wrong(TranscriptionVerbose, found)
        expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
        words = found.get("words")
        expect(words, f"expected words, but got {str(found)[:200]}")
        expect_rising([(one["start"], one["end"]) for one in words])
        joined = " ".join(one["word"].strip() for one in words)
        alike = likeness(joined, found["text"]) == 1
        expect(alike, f"expected the words of {found['text']!r}, but got {joined!r}")

    return run


check("audio.words", "The granularity word adds words with times, or is rejected by name.",
      "must", "A3 A9.26")(_granularity("timestamp_granularities[]"))  # fmt: skip
check("audio.array-name", "The name of a list in a form may omit the brackets.",
      "should", "A3 A9.31")(_granularity("timestamp_granularities"))  # fmt: skip


# Each row: the id, what is wrong, the parts, the file, the level, the word of the error.
WRONG: Sequence[tuple[str, str, Sequence[Part], Part | None, str]] = (
    ("file-missing", "without a file", (), None, "file"),
    ("file-empty", "with an empty file", (), ("file", ("empty.wav", b"")), ""),
    ("file-text", "with a file that is no audio", (), ("file", ("words.wav", b"No audio. " * 99)),
     ""),
    ("file-garbage", "with random bytes", (),
     ("file", ("noise.mp3", bytes((7 * i * i + i // 3) % 256 for i in range(5000)))), ""),
    ("file-cut", "with the head of a file only", (), ("file", ("cut.wav", spoken()[:40])), ""),
    ("transcription-format", "with an unknown format", (("response_format", "midi"),), FILE,
     "response_format"),
    ("temperature-word", "with a temperature that is no number", (("temperature", "warm"),), FILE,
     "temperature"),
    ("granularity-unknown", "with an unknown granularity",
     (("response_format", "verbose_json"), ("timestamp_granularities[]", "letter")), FILE, ""),
    ("granularity-alone", "with a granularity but no verbose_json",
     (("timestamp_granularities[]", "word"),), FILE, "timestamp_granularities"),
)  # fmt: skip


def _rejected(parts: Sequence[Part], file: Part | None, word: str) -> Body:
    async def run(api: Api) -> None:
        await transcribe(api)
        error = (await send(api, *parts, file=file)).error(400)
        named = word in f"{error['param']} {error['message']}"
        expect(named, f"expected an error that names {word!r}, but got {error}")

    return run


for _name, _how, _parts, _file, _word in WRONG:
    check(
        f"audio.{_name}",
        f"A transcription {_how} is rejected with a 400 error.",
        "must",
        "A3 A9.26" if "granularity" in _name else "A3 A9.27",
    )(_rejected(_parts, _file, _word))


@check("audio.transcription-model-missing",
       "A transcription without a model is rejected with a 400 error that names it, or served.",
       "must", "A3 A9.27")  # fmt: skip
async def model_missing(api: Api) -> None:
    await transcribe(api)
    reply = await api.send("POST", T, form(FILE), FORM)
    if reply.status == 200 and not api.hosted:
        expect(reply.json()["text"], f"expected a text, but got {reply.text[:200]}")
        return
    error = reply.error(400)
    named = "model" in f"{error['param']} {error['message']}"
    expect(named, f"expected an error that names the model, but got {error}")


@check("audio.no-form", "A transcription that is no form is rejected with 400 or 415.",
       "must", "A3 A9.27")  # fmt: skip
async def no_form(api: Api) -> None:
    await transcribe(api)
    (await api.send("POST", T, b'{"model": "x", "file": "y"}')).error(400, 415)
    (await api.send("POST", T, b"no parts", FORM)).error(400)
    (await api.send("POST", T, form(FILE)[:3000], FORM)).error(400)


@check("audio.file-large",
       "Silence of 25 MB is rejected with 413, or with 400 by a server that takes larger files.",
       "must", "A3 A9.30", alone=True, seconds=60)  # fmt: skip
async def file_large(api: Api) -> None:
    await transcribe(api)
    file: Part = ("file", ("large.wav", bytes(MOST + 4096)))
    reply = await send(api, file=file)
    reply.error(413, *(() if api.hosted else (400,)))


def _same(name: str, make: Callable[[], bytes]) -> Body:
    async def run(api: Api) -> None:
        data = make()
        wanted = await text_of(api)
        expect(wanted.strip(), "expected a text, but got an empty one")
        reply = await send(api, file=("file", (name, data)))
        if reply.status == 400 and name.endswith(("mp3", "flac")):
            error = reply.error(400)
            listed = "wav" in error["message"].lower()
            expect(listed, f"expected an error that lists the formats, but got {error}")
            return
        expect_alike(served(reply).json()["text"], wanted, f"in {name}")

    return run


@check("audio.wav-8-khz", "A stereo file of 8 kHz has the text of the same recording in 16 kHz.",
       "must", "A3 A9.28")  # fmt: skip
async def eight(api: Api) -> None:
    values = at_rate(8000)
    # The same samples in 16 kHz: the sound of 8 kHz is harder to understand in any format.
    held = wav([value for value in values for _ in range(2)])
    wanted = await text_of(api, file=("file", ("sentence.wav", held)))
    expect(wanted.strip(), "expected a text, but got an empty one")
    found = await text_of(api, file=("file", ("sentence.wav", wav(values, 8000, 2))))
    # A server that reads another rate or one channel hears half or twice as many words.
    one, other = _words(found), _words(wanted)
    parts = difflib.SequenceMatcher(None, one, other).get_matching_blocks()
    alike = sum(part.size for part in parts) > max(len(one), len(other)) / 2
    expect(alike, f"expected about {wanted!r} in 8 kHz, but got {found!r}")


# Each row: the id, the name of the file, a function that makes it, what it is.
FILES: Sequence[tuple[str, str, Callable[[], bytes], str]] = (
    ("wav-48-khz", "sentence.wav", lambda: wav(at_rate(48_000), 48_000), "file of 48 kHz"),
    ("wav-24-bit", "sentence.wav", lambda: wav(samples(), width=3), "file of 24 bits"),
    ("flac", "sentence.flac", flac, "FLAC file"),
    ("mp3", "sentence.mp3", lambda: spoken("sentence.mp3"), "MP3 file"),
)
for _name, _file_name, _make, _what in FILES:
    check(f"audio.{_name}", f"A {_what} has the text of the same recording in 16 kHz.", "must",
          "A3 A9.28")(_same(_file_name, _make))  # fmt: skip
check("audio.file-name", "The format of a file is found in its bytes, not in its name.",
      "must", "A3 A9.29")(_same("sentence.webm", spoken))  # fmt: skip


@check("audio.hints", "A language, a prompt and a temperature are accepted.", "must", "A3 A9.31")
async def hints(api: Api) -> None:
    wanted = await text_of(api)
    for part in (("language", "en"), ("prompt", "A story of a cat."), ("temperature", "0")):
        expect_alike(await text_of(api, part), wanted, f"with {part[0]}")


@check("audio.parts-unknown", "Unknown parts of a form, and what only OpenAI serves, are accepted.",
       "must", "A3 A9.31")  # fmt: skip
async def parts_unknown(api: Api) -> None:
    wanted = await text_of(api)
    for part in (("chunking_strategy", "auto"), ("include[]", "logprobs"), ("user", "someone")):
        expect_alike(await text_of(api, part), wanted, f"with {part[0]}")


@check("audio.transcription-stream",
       "A streamed transcription is deltas, which are joined the text of one done event.",
       "must", "A3 A9.32")  # fmt: skip
async def streamed(api: Api) -> None:
    wanted = await text_of(api, ("temperature", "0"))
    reply = await transcribe(api, ("stream", "true"), ("temperature", "0"))
    if reply.kind == "application/json" and reply.json().get("text"):
        raise Diverges("the server ignores stream, as OpenAI does for whisper-1")
    *found, done = events(reply, needs_done=False) or [{}]
    kinds = [event.get("type") for event in found if event.get("type") != "transcript.text.segment"]
    expect(kinds and set(kinds) == {"transcript.text.delta"}, f"expected deltas, but got {kinds}")
    expect(done.get("type") == "transcript.text.done", f"expected done, but got {done}")
    for event in found:
        delta = event["type"] == "transcript.text.delta"
        wrong = first_wrong(TranscriptionTextDeltaEvent, event) if delta else None
        expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
    wrong = first_wrong(TranscriptionTextDoneEvent, done)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
    joined = "".join(event.get("delta", "") for event in found)
    expect(joined == done["text"], f"expected {done['text']!r} in deltas, but got {joined!r}")
    fine = done["text"].strip() == wanted.strip()
    expect(fine, f"expected {wanted!r}, but got {done['text']!r}")
    if done.get("usage") is not None:
        expect_counted(done["usage"])


@check("audio.stream-off", "A stream value of false gets a plain transcription.", "must", "A3")
async def stream_off(api: Api) -> None:
    expect_alike(await text_of(api, ("stream", "false")), await text_of(api), "without a stream")


@check("audio.transcription-request-id", "A transcription has an x-request-id.", "must", "A9.39")
async def request_id(api: Api) -> None:
    found = [(await transcribe(api)).headers.get("x-request-id") for _ in range(2)]
    fine = all(found) and found[0] != found[1]
    expect(fine, f"expected an x-request-id for each request, but got {found}")


@check("audio.translation", "A translation is an object with English text.", "must", "A4 A9.33")
async def translation(api: Api) -> None:
    found = (await transcribe(api, path=TRANSLATIONS)).json()
    wrong = first_wrong(Translation, found)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
    expect_alike(found["text"], SENTENCE, "in English")


@check("audio.translation-verbose", "A verbose translation has the task translate.",
       "must", "A4 A9.33")  # fmt: skip
async def translation_verbose(api: Api) -> None:
    await text_of(api, path=TRANSLATIONS)
    reply = await send(api, ("response_format", "verbose_json"), path=TRANSLATIONS)
    if reply.status == 400:
        error = str(reply.error(400))
        expect("response_format" in error, f"expected the name of the field, but got {error}")
        return
    found = served(reply).json()
    wrong = first_wrong(TranslationVerbose, found)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
    expect_verbose(found, "translate")
