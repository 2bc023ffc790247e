"""Tests of spoken answers over time: when audio arrives, what stops it, what it holds back."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.schemas import limits
from support.clients import adapting
from support.engines.echo import Echo
from support.engines.paced_speaker import PER_CHARACTER, PacedSpeaker
from support.servers import serving
from support.spoken import PATH, SPOKEN, STREAMED, TEXT, asked, events, joined
from support.turns import measured

# Seconds of CPU time. The design limit is 5 ms; the rest is tolerance for a busy machine.
LONGEST = 0.05


def kinds(chunks: list[Any]) -> list[str]:
    """Return the keys of the audio in each chunk, without the id."""
    found = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            found += [key for key in choice["delta"].get("audio", {}) if key != "id"]
    return found


async def test_audio_begins_before_the_text_ends() -> None:
    """The first sentence is heard while the last one is generated."""
    backend = Echo(pause=0.002)
    async with adapting(backend, speaker=PacedSpeaker()) as client:
        found = kinds(events(await client.post(PATH, json=asked(**STREAMED))))
    last_text = len(found) - 1 - found[::-1].index("transcript")
    assert found.index("data") < last_text
    assert found[-1] == "expires_at"


@pytest.mark.parametrize("fields", [SPOKEN, STREAMED])
async def test_a_sentence_is_spoken_while_the_next_is_generated(fields: dict[str, Any]) -> None:
    """A plain response does not wait for the whole text before it speaks, either."""
    backend = Echo(pause=0.002)
    running = []

    class Watching(PacedSpeaker):
        def speak(self, utterance: Any) -> Any:
            running.append(backend.running)
            return super().speak(utterance)

    async with adapting(backend, speaker=Watching()) as client:
        reply = await client.post(PATH, json=asked(**fields))
    assert reply.status_code == 200
    assert running == [1, 1, 0]


async def test_slow_speech_holds_no_text_back() -> None:
    """The whole text is sent, and the engine is free, before the first sentence is spoken."""
    backend, free = Echo(), []

    class Watching(PacedSpeaker):
        async def _pieces(self, utterance: Any) -> Any:
            free.append(backend.running == 0)
            async for piece in super()._pieces(utterance):
                yield piece

    speaker = Watching(pause=0.1)
    async with adapting(backend, speaker=speaker) as client:
        found = kinds(events(await client.post(PATH, json=asked(**STREAMED))))
    assert found[: len(TEXT)] == ["transcript"] * len(TEXT)
    assert free == [True] * 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "speech"),
    [
        (0.05, 0.0),
        (0.05, 30.0),
        (0.0, 30.0),
    ],
    ids=["text", "text and speech", "speech"],
)
@pytest.mark.timed
async def test_a_client_that_leaves_ends_text_and_speech(
    text: float, speech: float, stream: bool
) -> None:
    """When a client disconnects, both end at once, in each phase of a response."""
    backend, speaker = Echo(pause=text), PacedSpeaker(pause=speech)
    fields = STREAMED if stream else SPOKEN
    app = OpenAIAdapter(backend, any_model=True, speaker=speaker)
    with serving(lambda: app) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            with pytest.raises(httpx2.ReadTimeout):
                async with asyncio.timeout(10):
                    body = asked("One. " * 40, **fields)
                    reading = client.stream("POST", PATH, json=body, timeout=0.7)
                    async with reading as reply:
                        until = time.monotonic() + 0.7
                        async for _ in reply.aiter_raw():
                            if time.monotonic() > until:
                                raise httpx2.ReadTimeout("left")
        start = time.monotonic()
        while backend.running or speaker.running:
            assert time.monotonic() - start < 0.5
            await asyncio.sleep(0.01)
        spoken = len(speaker.spoken)
        await asyncio.sleep(0.1)
        assert len(speaker.spoken) == spoken


async def test_a_slow_reader_slows_the_speech_down() -> None:
    """Audio that a client does not read is not made: it would fill the memory."""
    # A second for each character.
    speaker = PacedSpeaker(length=24_000)
    app = OpenAIAdapter(Echo("A sentence of some length. " * 8), any_model=True, speaker=speaker)
    # Linux would give a socket up to tens of megabytes.
    small = httpx2.AsyncHTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)]
    )
    with serving(lambda: app) as address:
        async with (
            httpx2.AsyncClient(base_url=address, timeout=60, transport=small) as client,
            client.stream("POST", PATH, json=asked("x", **STREAMED)) as reply,
        ):
            before = -1
            while before != speaker.pieces or not before:
                before = speaker.pieces
                await asyncio.sleep(0.25)
            # All of it has 2,080 pieces of 6 KB; sockets hold some megabytes.
            assert speaker.pieces < 1_000
            await reply.aread()
    assert speaker.pieces >= 2_080


async def test_comments_are_sent_while_it_is_spoken() -> None:
    """A stream sends comments while its text has ended and its audio has not begun."""
    async with adapting(Echo(), speaker=PacedSpeaker(pause=0.15), keepalive=0.025) as client:
        reply = await client.post(PATH, json=asked(**STREAMED))
    assert reply.text.count(": keep-alive\n\n") > 3
    assert joined(events(reply))["transcript"] == TEXT


async def test_a_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain answer with too much audio is a 400 that says what to do; a stream has no bound."""
    monkeypatch.setattr(limits, "SPOKEN_SAMPLES", limits.SPOKEN_SAMPLES._replace(maximum=0))
    backend, speaker = Echo(pause=0.002), PacedSpeaker()
    async with adapting(backend, speaker=speaker) as client:
        reply = await client.post(PATH, json=asked(TEXT * 10, **SPOKEN))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "audio_too_long")
        assert "Stream it" in error["message"]
        assert len(speaker.spoken) < 5
        chunks = events(await client.post(PATH, json=asked(**STREAMED)))
    # The spaces between sentences are not spoken.
    assert len(joined(chunks)["data"]) == 2 * (len(TEXT) - 2) * PER_CHARACTER
    assert backend.running == speaker.running == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pcm16", "mp3"])
async def test_ten_at_once_leave_the_loop_to_others(form: str) -> None:
    """No iteration of the event loop takes long while ten answers are spoken."""
    text = "This is a sentence of some length, which takes a while. " * 4
    fields = {**SPOKEN, "audio": {"voice": "low", "format": form}, "stream": form == "pcm16"}

    def app() -> OpenAIAdapter:
        backend = Echo(context=10_000, pause=0.001)
        return OpenAIAdapter(backend, any_model=True, speaker=PacedSpeaker())

    with measured(app) as (address, loop):
        async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
            # The first request imports the encoder.
            await client.post(PATH, json=asked(**fields))
            loop.longest = 0.0

            async def ask(number: int) -> httpx2.Response:
                # Ten that arrive at once are prepared in the same iteration.
                await asyncio.sleep(0.02 * number)
                return await client.post(PATH, json=asked(text, **fields))

            replies = await asyncio.gather(*map(ask, range(10)))
    assert {reply.status_code for reply in replies} == {200}
    print(f"{form}: {1_000 * loop.longest:.1f} ms")
    assert loop.longest < LONGEST
