"""Tests of a library that speaks in a process of its own; a stand-in for Piper speaks."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
from latimer.backends.errors import (
    EngineError,
    EngineSilent,
    EngineUnavailable,
    Unspoken,
    Unsupported,
)
from latimer.backends.queue import Ticket
from latimer.backends.speech import libraries
from latimer.backends.speech.base import Pcm, SpeakerFacts, Utterance, Voice
from latimer.backends.speech.libraries import UnknownLibrary, speaker_of
from latimer.backends.speech.speaking import LibrarySpeaker

LIBRARIES = Path(__file__).parent.parent.parent / "support" / "libraries"
TENTH = bytes((0, 1)) * 2_205


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a voice of one speaker, and one of two."""
    folder = tmp_path_factory.mktemp("voices")
    for name, speakers in (("anna", {}), ("duo", {"bela": 0, "carl": 7})):
        (folder / f"{name}.onnx").write_bytes(b"onnx")
        config = {
            "language": {"family": "hu"},
            "speaker_id_map": speakers,
        }
        (folder / f"{name}.onnx.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def speaker(voices: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LibrarySpeaker]:
    """Return a speaker with these voices."""
    monkeypatch.setenv("PYTHONPATH", str(LIBRARIES))
    found = LibrarySpeaker("piper", str(voices))
    yield found
    await found.aclose()


async def spoken(speaker: LibrarySpeaker, text: str, voice: str = "anna") -> bytes:
    """Return the samples of a text."""
    async with speaker.speak(Utterance(text, voice, ticket=Ticket())) as pieces:
        return b"".join([piece.samples async for piece in pieces])


async def test_the_voices_of_a_folder(speaker: LibrarySpeaker) -> None:
    """Each file is a voice, and each speaker of a file with several."""
    facts = await speaker.facts()
    names = ["anna", "duo:bela", "duo:carl"]
    assert list(facts.voices) == [Voice(name, "hu") for name in names]


async def test_audio_arrives_in_pieces(speaker: LibrarySpeaker) -> None:
    """The first piece arrives before the last is spoken, in the voice that was asked for."""
    async with speaker.speak(Utterance("one slow", "duo:carl")) as pieces:
        begin = time.monotonic()
        assert await anext(pieces) == Pcm(bytes((7, 1)) * 2_205, 22_050)
        assert time.monotonic() - begin < 0.4
        assert len([piece async for piece in pieces]) == 1


async def test_nothing_is_loaded_to_tell_the_name(voices: Path) -> None:
    """The name is known without a process, and the voices once they were read."""
    speaker = LibrarySpeaker("piper", str(voices))
    assert speaker.known() == SpeakerFacts(f"piper:{voices.name}", ())
    assert speaker._process is None


async def test_long_sentences_are_computed_in_runs(speaker: LibrarySpeaker) -> None:
    """A word of 700 phonemes arrives in three pieces; one of 1,501 is refused at once."""
    async with speaker.speak(Utterance("a" * 700, "anna")) as pieces:
        assert [len(piece.samples) // len(TENTH) async for piece in pieces] == [300, 300, 100]
    with pytest.raises(Unsupported, match=r"1,501 phonemes, and at most 1,500") as caught:
        await spoken(speaker, "a" * 1501)
    assert caught.value.param == "input"
    assert await spoken(speaker, "a") == TENTH


async def test_a_text_that_takes_too_long_is_ended(
    speaker: LibrarySpeaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed, and the text that waits behind it is spoken by another one."""
    monkeypatch.setattr("latimer.backends.speech.speaking._LONGEST", 0.7)
    await speaker.facts()
    begin = time.monotonic()
    slow, next_ = await asyncio.gather(
        spoken(speaker, "one slow slow slow slow slow slow slow slow"),
        spoken(speaker, "two"),
        return_exceptions=True,
    )
    assert isinstance(slow, EngineSilent), slow
    assert next_ == TENTH
    assert time.monotonic() - begin < 3


async def test_a_cancelled_text_does_not_end_the_process(speaker: LibrarySpeaker) -> None:
    """The next text waits for the end of the sentence, and gets its own audio."""
    await speaker.facts()
    process = speaker._process
    task = asyncio.create_task(spoken(speaker, "one slow two"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await spoken(speaker, "three") == TENTH
    assert speaker._process is process


async def test_a_text_that_nobody_waits_for_ends_with_its_process(
    speaker: LibrarySpeaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence that takes too long is killed, and the next one starts another process."""
    monkeypatch.setattr("latimer.backends.speech.speaking._PATIENCE", 0.05)
    await speaker.facts()
    process = speaker._process
    task = asyncio.create_task(spoken(speaker, "slow slow slow slow slow"))
    await asyncio.sleep(0.1)
    task.cancel()
    assert await spoken(speaker, "three") == TENTH
    assert speaker._process is not process


async def test_failures(speaker: LibrarySpeaker) -> None:
    """An exception has its text; a process that ends is started again for the next text."""
    with pytest.raises(EngineError, match="piper failed to speak: cannot say fail"):
        await spoken(speaker, "one fail")
    assert await spoken(speaker, "one") == TENTH
    with pytest.raises(EngineError, match="has ended"):
        await spoken(speaker, "one crash")
    assert await spoken(speaker, "one") == TENTH


async def test_a_text_without_sound(speaker: LibrarySpeaker) -> None:
    """It is the fault of the text, and the process speaks the next one."""
    for text in (" ", "mute"):
        with pytest.raises(Unspoken) as caught:
            await spoken(speaker, text)
        assert caught.value.param == "input"
    async with speaker.speak(Utterance("mute one mute", "anna")) as pieces:
        assert [piece async for piece in pieces] == [Pcm(TENTH, 22_050)]


async def test_several_at_once(speaker: LibrarySpeaker) -> None:
    """Each gets its own audio, one after the other; no task or process is left at the end."""
    texts = ["one " * (index + 1) for index in range(5)]
    found = await asyncio.gather(*(spoken(speaker, text) for text in texts))
    assert [len(one) // len(TENTH) for one in found] == [1, 2, 3, 4, 5]
    process = speaker._process
    assert process is not None
    await speaker.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrong.onnx", "not a voice"),
        ("alone.onnx", "alone.onnx.json' cannot be read"),
        ("empty", "has no file VOICE.onnx"),
    ],
)
async def test_models_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    """The reason is in the error, which names the library and the model."""
    monkeypatch.setenv("PYTHONPATH", str(LIBRARIES))
    (tmp_path / "empty").mkdir()
    for file in ("wrong.onnx", "alone.onnx"):
        (tmp_path / file).touch()
    (tmp_path / "wrong.onnx.json").write_text("{}")
    speaker = LibrarySpeaker("piper", str(tmp_path / name))
    with pytest.raises(EngineUnavailable, match=f"piper cannot load .*{says}"):
        await speaker.facts()
    await speaker.aclose()


async def test_a_folder_that_is_no_model_of_sherpa_onnx(tmp_path: Path) -> None:
    """The error says what is missing."""
    speaker = speaker_of(f"sherpa-onnx:{tmp_path}")
    with pytest.raises(EngineUnavailable, match="is not a model"):
        await speaker.facts()
    await speaker.aclose()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("flute:x", r"no library 'flute' speaks\. Expected one of piper:VOICE\.onnx, sherpa-onnx"),
        ("sherpa-onnx", "needs a model: sherpa-onnx:FOLDER"),
        ("sherpa-onnx:/none", "'/none' does not exist"),
        ("piper:/", r"the extra 'piper': run pip install '\.\[piper]' in a clone"),
    ],
)
def test_wrong_values(value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says what to write instead, or what to install."""

    def found(name: str) -> ModuleSpec | None:
        # The extra `piper` may be installed here.
        return None if name == "piper" else find_spec(name)

    monkeypatch.setattr(libraries, "find_spec", found)
    with pytest.raises(UnknownLibrary, match=says):
        speaker_of(value)
