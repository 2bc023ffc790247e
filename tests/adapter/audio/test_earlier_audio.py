"""Tests of follow-ups that name an earlier spoken answer by the id of its audio."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.store.transcripts import SECONDS, Transcripts, audio_id
from support.clients import adapting, client_of
from support.engines.echo import Echo, ids_of
from support.engines.model import Model
from support.engines.paced_speaker import PacedSpeaker
from support.spoken import PATH, SPOKEN, STREAMED, TEXT, asked, events, joined


async def spoken(client: httpx2.AsyncClient, stream: bool = False, **fields: Any) -> str:
    """Return the id of the audio of a spoken answer, `TEXT`."""
    body = asked(**(STREAMED if stream else SPOKEN), **fields)
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    if stream:
        return str(joined(events(reply))["id"])
    return str(reply.json()["choices"][-1]["message"]["audio"]["id"])


def follow_up(earlier: dict[str, Any]) -> dict[str, Any]:
    """Return a request with an earlier message of the assistant."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", **earlier},
        {"role": "user", "content": "More"},
    ]
    return {"model": "m", "messages": messages}


def prompt(backend: Echo) -> str:
    """Return the prompt of the latest job."""
    return Model().text(ids_of(backend.jobs[-1]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": ""}, {"content": []}])
async def test_the_model_sees_the_transcript(stream: bool, more: dict[str, Any]) -> None:
    """An id stands for the text of its answer, with or without empty content."""
    backend = Echo()
    async with adapting(backend, speaker=PacedSpeaker()) as client:
        name = await spoken(client, stream)
        reply = await client.post(PATH, json=follow_up({"audio": {"id": name}, **more}))
    assert reply.status_code == 200, reply.text
    assert "x-latimer-ignored" not in reply.headers
    assert f"assistant\n{TEXT}<|im_end|>" in prompt(backend)


async def test_each_choice_has_its_own_id() -> None:
    """The id of the last of several choices is known."""
    backend = Echo()
    async with adapting(backend, speaker=PacedSpeaker()) as client:
        name = await spoken(client, n=3)
        assert name.endswith("02")
        reply = await client.post(PATH, json=follow_up({"audio": {"id": name}}))
    assert reply.status_code == 200, reply.text


async def test_content_wins() -> None:
    """A message with content and audio is its content; its id need not be known."""
    backend = Echo()
    async with adapting(backend) as client:
        earlier = {"content": "Own words", "audio": {"id": "audio_unknown"}}
        reply = await client.post(PATH, json=follow_up(earlier))
    assert reply.status_code == 200, reply.text
    assert "assistant\nOwn words<|im_end|>" in prompt(backend)


async def test_a_client_may_send_the_whole_audio() -> None:
    """An unknown id with the transcript, as LangChain replays it, is that transcript."""
    backend = Echo()
    audio = {"id": "audio_0", "data": "AAAA", "expires_at": 5, "transcript": "I said so."}
    async with adapting(backend) as client:
        reply = await client.post(PATH, json=follow_up({"content": "", "audio": audio}))
    assert reply.status_code == 200, reply.text
    assert "x-latimer-ignored" not in reply.headers
    assert "assistant\nI said so.<|im_end|>" in prompt(backend)


@pytest.mark.parametrize(
    ("audio", "param", "words"),
    [
        ({"id": "audio_0123"}, "messages.[1].audio.id", "Audio with id 'audio_0123' not found."),
        ({"id": f"audio_{'0' * 32}"}, "messages.[1].audio.id", "not found"),
        ({}, "messages[1].audio.id", "Missing required parameter"),
        ({"id": 5}, "messages[1].audio.id", "expected a string"),
        ("audio_0", "messages[1].audio", "expected an object"),
    ],
)
async def test_an_unknown_id_is_refused(audio: Any, param: str, words: str) -> None:
    """A 400 names the message and the id, and says what to send instead."""
    backend = Echo()
    async with adapting(backend, store="memory") as client:
        reply = await client.post(PATH, json=follow_up({"audio": audio}))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert not backend.jobs


async def test_an_id_belongs_to_its_key() -> None:
    """Another key does not know the id of an answer, stored or not."""
    async with adapting(
        Echo(), speaker=PacedSpeaker(), store="memory", api_keys=["sk-one", "sk-two"]
    ) as client:
        for stored in (False, True):
            body = asked(**SPOKEN, store=stored)
            one = {"authorization": "Bearer sk-one"}
            reply = await client.post(PATH, json=body, headers=one)
            name = reply.json()["choices"][0]["message"]["audio"]["id"]
            again = follow_up({"audio": {"id": name}})
            assert (await client.post(PATH, json=again, headers=one)).status_code == 200
            two = {"authorization": "Bearer sk-two"}
            assert (await client.post(PATH, json=again, headers=two)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_answer_is_known_as_long_as_it_is_stored(stream: bool) -> None:
    """The store keeps transcripts without data; a deleted completion's ids are unknown."""
    backend = Echo()
    app = OpenAIAdapter(backend, any_model=True, speaker=PacedSpeaker(), store="memory")
    async with client_of(app) as client:
        name = await spoken(client, stream, store=True)
        # As after an hour, or a restart.
        app.service.transcripts.close()
        app.service.transcripts = Transcripts()
        again = follow_up({"audio": {"id": name}})
        reply = await client.post(PATH, json=again)
        assert reply.status_code == 200, reply.text
        assert f"assistant\n{TEXT}<|im_end|>" in prompt(backend)
        stored = (await client.get(PATH)).json()["data"][0]
        audio = stored["choices"][0]["message"]["audio"]
        assert stored["choices"][0]["message"]["content"] is None
        assert (audio["id"], audio["data"], audio["transcript"]) == (name, "", TEXT)
        beyond = follow_up({"audio": {"id": f"{name[:-2]}7f"}})
        assert (await client.post(PATH, json=beyond)).status_code == 400
        await client.delete(f"{PATH}/{stored['id']}")
        assert (await client.post(PATH, json=again)).status_code == 400
    await app.aclose()


async def test_a_stored_follow_up_has_the_transcript() -> None:
    """The store keeps the text of earlier audio with the request, and not its data."""
    async with adapting(Echo(), speaker=PacedSpeaker(), store="memory") as client:
        name = await spoken(client)
        audio = {"id": name, "data": "AAAA", "transcript": "other"}
        made = await client.post(PATH, json=follow_up({"audio": audio}) | {"store": True})
        messages = (await client.get(f"{PATH}/{made.json()['id']}/messages")).json()["data"]
    assert messages[1]["audio"] == {"id": name, "transcript": TEXT}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deleted_answer_is_unknown_at_once(stream: bool) -> None:
    """Deleting a completion deletes the transcripts of its choices, and no others."""
    async with adapting(Echo(), speaker=PacedSpeaker(), store="memory") as client:
        other = await spoken(client, stream, store=True)
        name = await spoken(client, stream, store=True, n=2)
        made = f"chatcmpl-{name.removeprefix('audio_')[:-2]}"
        assert (await client.delete(f"{PATH}/{made}")).status_code == 200
        for gone in (name, f"{name[:-2]}00"):
            reply = await client.post(PATH, json=follow_up({"audio": {"id": gone}}))
            assert reply.json()["error"]["code"] == "audio_not_found"
        reply = await client.post(PATH, json=follow_up({"audio": {"id": other}}))
        assert reply.status_code == 200, reply.text


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Return where transcripts are kept."""
    return tmp_path / "transcripts.db" if request.param == "file" else None


async def test_transcripts_expire_and_are_bounded(place: Path | None) -> None:
    """A transcript is known for an hour; beyond the bound, the oldest are forgotten."""
    now = 1_000.0
    kept = Transcripts(place, most=2_000, now=lambda: now)
    assert await kept.find("key", "one") is None
    assert await kept.keep("key", "one", "te\ud800xt") == 1_000 + SECONDS
    assert await kept.find("key", "one") == "te\ud800xt"
    assert await kept.find("", "one") is None
    now += SECONDS
    assert await kept.find("key", "one") is None
    for number in range(100):
        await kept.keep("key", str(number), "x" * 100)
    known = [await kept.find("key", str(number)) is not None for number in range(95, 100)]
    assert known == [False] + [True] * 4
    await kept.keep("key", "long", "x" * 2_000)
    assert await kept.find("key", "long") is None
    kept.close()


async def test_workers_share_transcripts(tmp_path: Path) -> None:
    """Each knows what the other keeps or forgets; both can keep at the same time."""
    one, two = (Transcripts(tmp_path / "transcripts.db") for _ in range(2))
    both = (one, two)
    assert await two.find("", "audio_a0000") is None
    names = [audio_id("chatcmpl-a0", number) for number in range(40)]
    await asyncio.gather(*(both[n % 2].keep("", name, name) for n, name in enumerate(names)))
    for each in both:
        assert [await each.find("", name) for name in names] == names
    await one.forget("", "chatcmpl-a0")
    assert await two.find("", names[3]) is None
    for each in both:
        each.close()


async def test_a_speaker_needs_no_place_for_transcripts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the file cannot be written, the answer is spoken, and its id is unknown."""
    kept = Transcripts(tmp_path / "missing" / "transcripts.db")
    await kept.keep("", "audio_a000", "text")
    assert "cannot be kept" in caplog.text
    assert await kept.find("", "audio_a000") is None
    await kept.forget("", "chatcmpl-a0")


async def test_a_damaged_file_is_closed_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file leaves no connection open; Python 3.13 warns of one."""
    file = tmp_path / "transcripts.db"
    file.write_bytes(b"not a database, " * 64)
    kept = Transcripts(file)
    await kept.keep("", "audio_a000", "text")
    assert await kept.find("", "audio_a000") is None
    assert "file is not a database" in caplog.text
