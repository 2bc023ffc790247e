"""Tests of libraries that transcribe, in processes of their own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import wave
from pathlib import Path

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.errors import EngineError, EngineUnavailable, Refused
from latimer.backends.speech.base import Recording, Segment, Transcriber
from latimer.backends.speech.libraries import UnknownLibrary, transcriber_of
from latimer.backends.speech.process import LibraryTranscriber
from support.clients import client_of
from support.engines.echo import Echo
from support.sounds import HELLO, tone

LIBRARIES = Path(__file__).parent.parent.parent / "support" / "libraries"

SPEECH = "The weather is fine today. Please open the window and turn off the light."


async def heard(transcriber: Transcriber, recording: Recording) -> list[Segment]:
    """Return the segments of a recording."""
    async with transcriber.transcribe(recording) as segments:
        return [one async for one in segments]


def spoken(folder: Path) -> bytes:
    """Return a text as it is spoken by flite, at 16 kHz."""
    file = folder / "speech.wav"
    subprocess.run(["flite", "-voice", "rms", "-t", SPEECH, "-o", str(file)], check=True)
    with wave.open(str(file)) as found:
        assert found.getframerate() == 16_000
        samples: bytes = found.readframes(found.getnframes())
        return samples


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("foo", "Expected one of faster-whisper, pocketsphinx"),
        ("foo:bar", "no library 'foo' transcribes"),
    ],
)
def test_unknown_libraries(value: str, message: str) -> None:
    """The error lists those that are known."""
    with pytest.raises(UnknownLibrary, match=message):
        transcriber_of(value)


def test_libraries_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra that installs one."""
    monkeypatch.setattr("latimer.backends.speech.libraries.find_spec", lambda _name: None)
    with pytest.raises(UnknownLibrary, match=r"pip install '\.\[transcription\]' in a clone"):
        transcriber_of("faster-whisper:base")


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        ("~/whisper", str(Path.home() / "whisper"), "whisper"),
        ("hf:Systran/faster-whisper-tiny", "Systran/faster-whisper-tiny", "faster-whisper-tiny"),
        ("hf:tiny", "tiny", "tiny"),
    ],
)
def test_models_are_named_as_for_other_options(
    model: str, given: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gets a path without `~`, which a shell leaves after a colon, and no `hf:`."""
    monkeypatch.setattr("latimer.backends.speech.libraries.find_spec", lambda _name: object())
    found = transcriber_of(f"faster-whisper:{model}")
    assert isinstance(found, LibraryTranscriber)
    assert found._model == given
    assert found.known().name == f"faster-whisper:{name}"


@pytest.mark.parametrize("offline", [True, False])
async def test_offline_the_library_asks_no_hub(
    offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process gets the variable that forbids the network to the hub's own programs."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "faster_whisper.py").write_text(
        "import os\nraise ValueError(os.environ.get('HF_HUB_OFFLINE', 'not set'))\n"
    )
    transcriber = LibraryTranscriber("faster-whisper", "base", offline=offline)
    with pytest.raises(EngineUnavailable, match=": 1$" if offline else ": not set$"):
        await transcriber.facts()
    await transcriber.aclose()


async def test_a_library_that_cannot_be_loaded() -> None:
    """The error has the library's own reason."""
    broken = LibraryTranscriber("pocketsphinx", "/nowhere")
    with pytest.raises(EngineUnavailable, match="cannot load '/nowhere'"):
        await broken.facts()
    await broken.aclose()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> LibraryTranscriber:
    """Return the stand-in for faster-whisper, which may take a second for a recording."""
    monkeypatch.setenv("PYTHONPATH", str(LIBRARIES))
    return LibraryTranscriber("faster-whisper", "base", longest=1)


async def test_a_recording_that_takes_too_long(brief: LibraryTranscriber) -> None:
    """Its process is ended, also within a segment, and those that wait are served by another."""
    await brief.facts()
    process = brief._process
    assert process is not None
    endless, brave = Recording(tone(0.1), prompt="so endless"), Recording(tone(0.1), prompt="short")
    late, found = await asyncio.gather(
        heard(brief, endless), heard(brief, brave), return_exceptions=True
    )
    assert isinstance(late, Refused)
    assert process.returncode == -9
    assert isinstance(found, list)
    assert [one.text for one in found] == [" short"]
    await brief.aclose()


async def test_requests_at_once_have_one_process(brief: LibraryTranscriber) -> None:
    """Asking what a busy library can do starts no second process, which nobody would end."""
    await brief.facts()
    task = asyncio.create_task(heard(brief, Recording(tone(0.1), prompt="endless")))
    while brief._process is not None:
        await asyncio.sleep(0.01)
    await asyncio.gather(brief.facts(), brief.facts())
    assert brief._process is None
    task.cancel()
    await asyncio.wait([task])
    await brief.aclose()


async def test_the_error_for_one_that_takes_too_long(brief: LibraryTranscriber) -> None:
    """It is a 400, so that clients do not send the recording again, and names the seconds."""
    brief._longest = 0.25
    app = OpenAIAdapter(Echo(), any_model=True, transcriber=brief)
    async with client_of(app) as client:
        form = {"model": "whisper-1", "prompt": "endless"}
        reply = await client.post("/v1/audio/transcriptions", data=form, files={"file": HELLO})
    await app.aclose()
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "file")
    reason = "the recording takes more than 0.25 s. Send it in parts."
    assert error["message"] == f"faster-whisper rejected the request: {reason}"


class Recorded:
    """The transcriber of the tests below, and a recording of speech."""

    def __init__(self, transcriber: LibraryTranscriber, samples: bytes) -> None:
        self.transcriber = transcriber
        self.samples = samples


@pytest.fixture
async def sphinx(tmp_path: Path) -> Recorded:
    """Return PocketSphinx, and speech for it."""
    pytest.importorskip("pocketsphinx")
    if shutil.which("flite") is None:
        pytest.skip("flite is not installed")
    found = transcriber_of("pocketsphinx")
    assert isinstance(found, LibraryTranscriber)
    return Recorded(found, spoken(tmp_path))


@pytest.mark.slow
async def test_speech_is_understood(sphinx: Recorded) -> None:
    """PocketSphinx understands easy words of flite, twice the same, and times of words rise."""
    recording = Recording(sphinx.samples, words=True)
    first, second = [await heard(sphinx.transcriber, recording) for _ in range(2)]
    await sphinx.transcriber.aclose()
    text = "".join(one.text for one in first)
    for word in ("weather", "today", "window", "light"):
        assert word in text
    assert first == second
    times = [time for one in first for word in one.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[-1] <= recording.seconds


@pytest.mark.slow
async def test_a_transcription_that_is_left_ends(sphinx: Recorded) -> None:
    """Its process is killed, and the next recording has another one."""
    transcriber = sphinx.transcriber
    await transcriber.facts()
    process = transcriber._process
    assert process is not None
    task = asyncio.create_task(heard(transcriber, Recording(sphinx.samples * 100)))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert process.returncode is not None
    found = await heard(transcriber, Recording(sphinx.samples))
    assert "weather" in "".join(one.text for one in found)
    await transcriber.aclose()


@pytest.mark.slow
async def test_a_process_that_dies(sphinx: Recorded) -> None:
    """A crash of the library is an error of the engine, and the next recording works."""
    transcriber = sphinx.transcriber
    await transcriber.facts()
    process = transcriber._process
    assert process is not None
    task = asyncio.create_task(heard(transcriber, Recording(sphinx.samples * 100)))
    await asyncio.sleep(0.5)
    process.kill()
    with pytest.raises(EngineError, match="ended"):
        await task
    assert await heard(transcriber, Recording(tone(0.1))) == []
    await transcriber.aclose()
