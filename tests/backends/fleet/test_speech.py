"""Tests of speech and transcription in a fleet, by fakes with the replies of koboldcpp 1.115.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from latimer.adapter import OpenAIAdapter
from latimer.adapter.fleet import Fleet
from latimer.adapter.settings import Settings
from support.clients import client_of
from support.engines.koboldcpp import FakeKoboldcpp
from support.sounds import HELLO, tone, wav

SPEECH, T = "/v1/audio/speech", "/v1/audio/transcriptions"
ABLE = {"tts": True, "transcribe": True}


def able(*texts: str, **facts: Any) -> FakeKoboldcpp:
    """Return a koboldcpp that speaks and transcribes."""
    speech = wav(tone(0.5, 24_000), 24_000)
    return FakeKoboldcpp(version=ABLE, hears=texts, wav=speech, **facts)


@asynccontextmanager
async def fleet(
    folder: Path, engines: Mapping[str, FakeKoboldcpp], models: Mapping[str, Sequence[str]]
) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve models over engines, as a settings file has them."""
    async with AsyncExitStack() as stack:
        lines = []
        for name, engine in engines.items():
            await stack.enter_async_context(engine)
            lines.append(f'[engines.{name}]\nbackend = "koboldcpp"\nurl = "{engine.url}"\n')
        for name, its in models.items():
            lines.append(f"[models.{name}]\nengines = {[*its]}\n")
        file = folder / "fleet.toml"
        file.write_text("".join(lines))
        settings = Settings.load(file)
        served = Fleet(settings)
        app = OpenAIAdapter(served.entries, **settings.arguments("adapter"))
        app.service.release = served.aclose
        stack.push_async_callback(app.aclose)
        served.start()
        await asyncio.gather(*(pool.ask_all() for pool in served.pools.values()))
        yield await stack.enter_async_context(client_of(app))


async def speak(client: httpx2.AsyncClient, model: str, **fields: Any) -> httpx2.Response:
    """Ask for speech."""
    body = {"model": model, "voice": "kobo", "input": "Hello.", "response_format": "wav", **fields}
    return await client.post(SPEECH, json=body)


async def hear(client: httpx2.AsyncClient, model: str) -> httpx2.Response:
    """Send a recording."""
    return await client.post(T, data={"model": model}, files={"file": HELLO})


async def test_a_koboldcpp_of_a_fleet_speaks_and_transcribes(tmp_path: Path) -> None:
    """Its model does by its own name, and the whole fleet by those of OpenAI; others say no."""
    plain, other = FakeKoboldcpp(), able(" One.", " Two.")
    models = {"plain": ["a"], "able": ["b"]}
    async with fleet(tmp_path, {"a": plain, "b": other}, models) as client:
        for model in ("able", "tts-1"):
            reply = await speak(client, model)
            assert (reply.status_code, reply.content[:4]) == (200, b"RIFF"), reply.text
        assert [(await hear(client, model)).json()["text"] for model in ("able", "whisper-1")] == [
            "One.", "Two.",
        ]  # fmt: skip
        for reply in (await speak(client, "plain"), await hear(client, "plain")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (
                404, "unsupported_endpoint",
            )  # fmt: skip
        voices = (await client.get("/v1/audio/voices")).json()
        assert "kobo" in str(voices)
        listed = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
    assert "audio" in str(listed["able"])
    assert len(other.spoken) == len(other.heard) == 2
    assert not plain.spoken + plain.heard


async def test_the_engines_of_a_model_share_the_work(tmp_path: Path) -> None:
    """Each of two engines speaks and hears at the same time; one that has neither does nothing."""
    engines = {"a": able(" A."), "b": FakeKoboldcpp(), "c": able(" C.")}
    for engine in engines.values():
        engine.may_speak.clear()
        engine.may_hear.clear()
    async with fleet(tmp_path, engines, {"m": [*engines]}) as client:
        speaking = [asyncio.create_task(speak(client, "m")) for _ in range(2)]
        while not all(engines[name].spoken for name in "ac"):
            await asyncio.sleep(0.01)
        for engine in engines.values():
            engine.may_speak.set()
        assert [one.status_code for one in await asyncio.gather(*speaking)] == [200, 200]
        hearing = [asyncio.create_task(hear(client, "m")) for _ in range(2)]
        while not all(engines[name].heard for name in "ac"):
            await asyncio.sleep(0.01)
        for engine in engines.values():
            engine.may_hear.set()
        texts = {one.json()["text"] for one in await asyncio.gather(*hearing)}
    assert texts == {"A.", "C."}
    assert not engines["b"].spoken + engines["b"].heard


async def test_an_engine_that_is_lost_is_replaced(tmp_path: Path) -> None:
    """Another engine speaks and hears; without one, the error is a 503, and not that none can."""
    engines = {"a": able(" A.", " A."), "b": able(" B.", " B.")}
    async with fleet(tmp_path, engines, {"m": ["a", "b"]}) as client:
        assert (await speak(client, "m")).status_code == 200
        await engines["a"].stop()
        assert (await speak(client, "m")).status_code == 200
        reply = await hear(client, "m")
        assert reply.json().get("text") == "B.", reply.text
        await engines["b"].stop()
        for reply in (await speak(client, "m"), await hear(client, "m")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (
                503, "engine_unavailable",
            )  # fmt: skip
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_model_of_a_fleet_that_hears_transcribes(tmp_path: Path) -> None:
    """A model with audio input gets the recording in a chat, whichever engine has it."""
    hearing = FakeKoboldcpp(version={"audio": True}, script="Heard.", media=5)
    models = {"plain": ["a"], "hearing": ["b"]}
    async with fleet(tmp_path, {"a": FakeKoboldcpp(), "b": hearing}, models) as client:
        for model in ("hearing", "whisper-1"):
            reply = await hear(client, model)
            assert (reply.status_code, reply.json().get("text")) == (200, "Heard."), reply.text
            assert reply.json()["usage"]["type"] == "tokens"
        assert (await hear(client, "plain")).status_code == 404
