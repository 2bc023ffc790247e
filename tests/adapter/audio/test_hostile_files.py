"""Files that are made to crash a decoder get an answer, and the server stays small."""

from __future__ import annotations

import asyncio
import os
import resource
from collections import Counter
from pathlib import Path

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.conformance.recordings import SENTENCE, spoken
from support.clients import client_of
from support.dictation import dictation
from support.engines.echo import Echo
from support.hostile_audio import hostile_files, whole_files

PATH = "/v1/audio/transcriptions"
# MiB that the server may take more after all files than before; the files are its own memory, too.
GROWTH = 32
# MiB of the largest process that decodes. Its address space is limited (`SOUND_MEMORY`).
CHILD = 400


def _largest_child() -> float:
    """Return the memory of the largest process that has ended, in MiB."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def _resident() -> float:
    """Return the MiB of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / (1 << 20)


async def test_good_files() -> None:
    """The files that are broken below are transcribed as they are."""
    app = OpenAIAdapter(Echo(), any_model=True, **dictation())
    async with client_of(app) as client:
        for name, data in whole_files().items():
            reply = await client.post(PATH, files={"file": (name, data)}, data={"model": "m"})
            assert (reply.status_code, reply.json().get("text")) == (200, SENTENCE), name
    await app.aclose()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
async def test_hostile_files() -> None:
    """Each of 118 files gets a transcript or a 400, within bounds of time and memory."""
    files = [*hostile_files()]
    assert len(files) >= 100
    found: dict[str, int] = {}
    app = OpenAIAdapter(Echo(), any_model=True, **dictation())
    async with client_of(app) as client:
        client.timeout = 120

        async def send(name: str, data: bytes) -> None:
            reply = await client.post(PATH, files={"file": ("a.wav", data)}, data={"model": "m"})
            found[name] = reply.status_code
            if reply.status_code != 200:
                assert reply.json()["error"]["param"] == "file", (name, reply.text)

        await send("good", spoken())
        before, largest = _resident(), _largest_child()
        for start in range(0, len(files), 4):
            await asyncio.gather(*(send(*one) for one in files[start : start + 4]))
        growth = _resident() - before
        await send("good", spoken())
    await app.aclose()
    child = _largest_child()
    print(f"{len(files)} files: {dict(Counter(found.values()))}, {growth:.0f} MiB, {child:.0f} MiB")
    assert {name: status for name, status in found.items() if status not in (200, 400)} == {}
    assert found["good"] == 200
    assert growth < GROWTH
    # Children of earlier tests may have been larger, and a child begins as a copy of this process.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert child < max(CHILD, largest + 1, own + 1)
