"""Tests of the koboldcpp backend, over a recorded server or a live one if there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import orjson
import pytest
from httpcore2 import AsyncConnectionInterface, Request, Response
from latimer.backends.base import (
    MEDIA,
    Finish,
    Generation,
    Grammar,
    Media,
    Piece,
    Prompt,
    Sampling,
    Stops,
    Text,
)
from latimer.backends.errors import (
    ContextExceeded,
    EngineError,
    EngineUnavailable,
    InvalidGrammar,
    Refused,
    Unsupported,
)
from latimer.backends.http import ConnectionPool
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.queue import Ticket
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.model import Model
from support.engines.recorded import RecordedKoboldcpp
from support.engines.replay import Replay
from support.jobs import run
from support.recordings import DEMO_CHATML, body, exchange

GREEDY = Sampling(temperature=0.0)
COUNT = Text(DEMO_CHATML.format("Count to 12."))


@pytest.fixture(scope="module")
async def backend(koboldcpp_replay: tuple[str, Replay | None]) -> AsyncIterator[KoboldCpp]:
    """A backend over koboldcpp."""
    made = KoboldCpp(koboldcpp_replay[0], max_waiting=8)
    yield made
    await made.aclose()


class Watched(AsyncConnectionInterface):
    """A client that counts concurrent requests to the tokenizer."""

    def __init__(self, address: str) -> None:
        self.running = self.most = 0
        self._pool = ConnectionPool(address)
        self.aclose = self._pool.aclose  # type: ignore[method-assign]

    async def handle_async_request(self, request: Request) -> Response:
        """Send a request and read its response."""
        counted = request.url.target.endswith((b"/tokencount", b"/detokenize"))
        self.running += counted
        self.most = max(self.most, self.running)
        try:
            async with await self._pool.handle_async_request(request) as response:
                content = await response.aread()
                return Response(response.status, headers=response.headers, content=content)
        finally:
            self.running -= counted


@pytest.mark.parametrize("extra", [{"top_a": 1e30}, {"tfs": 0.0}, {"smoothing_factor": 100.0}])
async def test_koboldcpps_own_samplers_have_an_effect(
    backend: KoboldCpp, extra: dict[str, float]
) -> None:
    """Top-a, tail-free sampling and smoothing can leave the most likely tokens only."""
    job = Generation(Prompt(COUNT), 12, (3,), sampling=GREEDY)
    wanted, _ = await run(backend, job)
    for extras in ({}, extra):
        sampling = Sampling(temperature=5.0, extras=extras)
        found, _ = await run(backend, replace(job, sampling=sampling))
        assert (found == wanted) == bool(extras)


async def test_koboldcpp_tokenizes_one_text_at_a_time(
    koboldcpp_replay: tuple[str, Replay | None],
) -> None:
    """Requests to the tokenizer run one at a time, also after callers are cancelled, because it has
    one buffer."""
    client = Watched(koboldcpp_replay[0])
    backend = KoboldCpp(koboldcpp_replay[0], client=client)

    async def count() -> int:
        return len(await backend.tokenize(COUNT.text, add_special=False, parse_special=True))

    asked = [asyncio.ensure_future(count()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in asked[:10]:
        task.cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert found[10:] == [12] * 10
    assert client.most == 1
    await client.aclose()


async def test_koboldcpp_goes_on_beyond_its_cap(backend: KoboldCpp) -> None:
    """A completion of more than 80 % of the context is generated in several calls."""
    sampling = Sampling(temperature=0.0, extras={"ignore_eos": True})
    texts, finishes = await run(
        backend, Generation(Prompt(Text("One day,")), 1700, sampling=sampling)
    )
    assert (finishes[0].reason, finishes[0].completion_tokens) == ("length", 1700)
    assert len(texts[0]) > 4000


async def test_koboldcpp_refuses_ids_that_its_tokeniser_changes(backend: KoboldCpp) -> None:
    """Token ids are rejected if their text has other ids."""
    with pytest.raises(Unsupported, match="does not preserve"):
        await run(backend, Generation(Prompt((130,)), 5))


async def test_koboldcpp_always_parses_control_tokens(backend: KoboldCpp) -> None:
    """A prompt whose control tokens must not be parsed is rejected."""
    with pytest.raises(Unsupported, match="always parses"):
        await run(backend, Generation(Prompt(Text("x", parse_special=False)), 5))


async def test_koboldcpp_ends_at_once_with_an_end_token(backend: KoboldCpp) -> None:
    """An empty completion, whose stream has no final event, ends normally."""
    grammar = Grammar("gbnf", 'root ::= ""', "grammar")
    job = Generation(Prompt(COUNT), 10, sampling=GREEDY, grammar=grammar)
    texts, finishes = await run(backend, job)
    assert texts == [b""]
    assert (finishes[0].reason, finishes[0].completion_tokens) == ("end", 0)


async def test_a_grammar_goes_on_over_several_calls(backend: KoboldCpp) -> None:
    """A completion that takes several calls follows its grammar to the end."""
    grammar = Grammar("gbnf", 'root ::= ("1" [2] [3] [4]){450} "."', "grammar")
    job = Generation(Prompt(Text("1234")), 1900, sampling=GREEDY, grammar=grammar)
    texts, finishes = await run(backend, job)
    assert texts == [b"1234" * 450 + b"."]
    assert finishes[0].completion_tokens == 1801


async def test_a_job_that_has_ended_counts_once(backend: KoboldCpp) -> None:
    """A client that leaves after the end of its only choice adds no tokens to those of the end."""
    ticket = Ticket()
    with pytest.raises(asyncio.CancelledError):
        async with backend.open(
            Generation(Prompt(COUNT), 5, sampling=GREEDY, ticket=ticket)
        ) as all_:
            batches = [batch async for batch in all_]
            raise asyncio.CancelledError
    assert isinstance(batches[-1][-1], Finish)
    assert (ticket.prompt, ticket.generated) == (0, 0)


@pytest.mark.parametrize("text", ["root ::= !<[5]>", 'root ::= "x" | <[300]>', "root ::= <eos>"])
async def test_tokens_in_grammars_are_refused(backend: KoboldCpp, text: str) -> None:
    """koboldcpp gets no grammar with tokens: it ends at some, and fails at others."""
    job = Generation(Prompt(Text("1234")), 10, grammar=Grammar("gbnf", text, "grammar"))
    with pytest.raises(InvalidGrammar, match="does not support tokens, such as <"):
        await run(backend, job)
    with pytest.raises(InvalidGrammar, match="does not support tokens, such as <"):
        async with backend.native(job, False):
            pass


async def test_long_native_replies_are_refused(backend: KoboldCpp) -> None:
    """A native reply that would take several calls is rejected."""
    with pytest.raises(Unsupported, match="1639"):
        async with backend.native(Generation(Prompt(COUNT), 1700), False):
            pass


STREAM = "/api/extra/generate/stream"
PERF = {**orjson.loads(body("koboldcpp", "perf")), "stop_reason": 0, "idle": 1}


async def silence() -> AsyncIterator[bytes]:
    """Yield nothing, as in the recording `prompt-null-stream`."""
    await asyncio.sleep(3600)
    yield b""


@pytest.mark.timed
async def test_a_stream_that_never_ends_is_an_error() -> None:
    """A stream that stays open while the engine is idle raises an error."""
    assert "stays open" in exchange("koboldcpp", "prompt-null-stream")["note"]
    engine = RecordedKoboldcpp({STREAM: silence(), "/api/extra/perf": PERF}, silence=0.05)
    start = time.monotonic()
    with pytest.raises(EngineError, match="idle"):
        await run(engine.backend, Generation(Prompt(COUNT), 5))
    assert time.monotonic() - start < 2


async def test_a_null_body_is_an_error() -> None:
    """The body `null`, which koboldcpp sends after an internal failure, raises an error."""
    client = httpx2.MockTransport(lambda _: httpx2.Response(200, content=b"null"))
    with pytest.raises(EngineError, match="failed to answer"):
        await KoboldCpp("http://fake", client=client).model()


@pytest.mark.parametrize("reason", ["x", True, 0, [], {}])
async def test_an_unknown_finish_reason_is_an_error(reason: Any) -> None:
    """An unknown finish reason raises an error."""
    event = b"data: " + orjson.dumps({"token": "a", "finish_reason": reason}) + b"\n\n"
    with pytest.raises(EngineError, match="an invalid event"):
        await run(RecordedKoboldcpp({STREAM: event}).backend, Generation(Prompt(COUNT), 5))


async def test_a_koboldcpp_that_went_away_is_asked_anew() -> None:
    """The backend reads the model again when koboldcpp returns after a failed connection."""
    names = ["koboldcpp/one", None, "koboldcpp/two"]
    seen: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/api/extra/version":
            seen.append("version")
            return httpx2.Response(200, json={"result": "KoboldCpp", "version": "1.76"})
        if request.url.path == "/api/v1/model":
            return httpx2.Response(200, json={"result": names[0]})
        if request.url.path == "/api/extra/tokencount" and names[0] is None:
            raise httpx2.ConnectError("gone")
        if request.url.path == "/api/extra/true_max_context_length":
            return httpx2.Response(200, json={"value": 2048})
        return httpx2.Response(200, json={"value": 1, "ids": [0], "result": "<s>"})

    client = httpx2.MockTransport(answer)
    backend = KoboldCpp("http://fake", client=client)
    assert (await backend.model()).name == "koboldcpp/one"
    names.pop(0)
    with pytest.raises(EngineUnavailable):
        await run(backend, Generation(Prompt(COUNT), 5))
    names.pop(0)
    assert (await backend.model()).name == "koboldcpp/two"
    assert len(seen) > 1


async def test_an_older_koboldcpp_counts_by_its_tokeniser() -> None:
    """Versions before 1.115 report no tokens, so the text is tokenized and the usage is marked as
    inexact."""

    def count(request: httpx2.Request) -> httpx2.Response:
        value = orjson.loads(request.content)
        ids = [0] * value["special"] + list(range(len(value["prompt"])))
        return httpx2.Response(200, json={"value": len(ids), "ids": ids})

    backend = RecordedKoboldcpp({
        "/api/extra/version": {"result": "KoboldCpp", "version": "1.76"},
        "/props": lambda _: httpx2.Response(404),
        "/api/extra/tokencount": count,
    }).backend  # fmt: skip
    assert (await backend.model()).template is None
    assert "usage" in backend.capabilities.inexact
    texts, finishes = await run(backend, Generation(Prompt(COUNT), 7))
    assert texts == [b"1, 2, 3"]
    assert finishes[0].completion_tokens == 7


@pytest.mark.timed
async def test_koboldcpp_work_ends_when_its_client_leaves(
    koboldcpp_replay: tuple[str, Replay | None],
) -> None:
    """Leaving a job aborts its generation by key, and the next job ends within 1.5 seconds."""
    address, replay = koboldcpp_replay
    backend = KoboldCpp(address)
    sampling = Sampling(temperature=0.0, extras={"ignore_eos": True})
    async with backend.open(
        Generation(Prompt(Text("One day,")), 1600, sampling=sampling)
    ) as batches:
        await anext(aiter(batches))
    start = time.monotonic()
    await run(backend, Generation(Prompt(COUNT), 5, sampling=GREEDY))
    # Five tokens take half a second by themselves: the stream starts after 0.35 s.
    assert time.monotonic() - start < 1.5
    if replay is not None:
        assert replay.ended
    await backend.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_bos_of_the_client_counts(streamed: bool) -> None:
    """The engine's count of a prompt includes its BOS only if the client wrote that BOS."""
    async with FakeKoboldcpp() as fake:
        backend = KoboldCpp(fake.url)
        assert (await backend.model()).adds_bos
        counts = []
        for text in (Text("echo:a"), Text("echo:a", bos="<|endoftext|>")):
            job = Generation(Prompt(text), 5, sampling=GREEDY, streamed=streamed)
            counts.append((await run(backend, job))[1][0].prompt_tokens)
        assert counts == [len("echo:a"), len("echo:a") + 1]
        await backend.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bos_among_token_ids_is_not_added_again(streamed: bool) -> None:
    """Token ids are the engine's whole prompt: their BOS is the one that it adds, and ids without
    one are rejected."""
    async with FakeKoboldcpp(script="5") as fake:
        backend = KoboldCpp(fake.url)
        ids = await backend.tokenize("ab", add_special=True, parse_special=True)
        fake.prompts.clear()
        job = Generation(Prompt(ids), 5, sampling=GREEDY, streamed=streamed)
        texts, finishes = await run(backend, job)
        assert (texts, finishes[0].prompt_tokens, fake.prompts) == ([b"5"], 3, ["ab"])
        with pytest.raises(Unsupported, match="Begin the token ids with the BOS"):
            await run(backend, Generation(Prompt(ids[1:]), 5))
        await backend.aclose()


def seen(count: int, most: int | None, streamed: bool = False, clips: bool = False) -> Generation:
    """Return a job with images in front of its text."""
    media = tuple(Media("image", b"png", f"content[{index}]") for index in range(count))
    prompt = Prompt(Text(MEDIA * count + "a"), media=media)
    return Generation(prompt, most, sampling=GREEDY, streamed=streamed, clips=clips)


# The text of two images, with the words for them.
WORDS = len("\n(Attached Image 1)\n\n(Attached Image 2)\na")


@pytest.mark.parametrize("streamed", [False, True])
async def test_images_count_and_leave_room_for_the_text(streamed: bool) -> None:
    """The tokens of images count as the prompt's, and the engine may not generate more than the
    context has room for next to them, because it would cut the text."""
    context = 500
    async with FakeKoboldcpp(
        model=Model("koboldcpp/fake", context), script="5", version={"vision": True}, media=150
    ) as fake:
        backend = KoboldCpp(fake.url)
        await backend.model()
        count = WORDS + 300
        for most, room in ((None, context - count - 5), (20, 20)):
            texts, finishes = await run(backend, seen(2, most, streamed))
            assert (texts, finishes[0].prompt_tokens) == ([b"5"], count)
            assert fake.rooms[-2:] == [1, room]
        # One more token than there is room for, with the BOS and what the engine leaves unused.
        most = context - count - 4
        with pytest.raises(ContextExceeded) as caught:
            await run(backend, seen(2, most, streamed))
        assert caught.value.prompt_tokens + most == context + 1
        assert (await run(backend, seen(2, 200, streamed, clips=True)))[0] == [b"5"]
        async with backend.native(seen(2, None), streamed) as reply:
            assert b"5" in b"".join([chunk async for chunk in reply.body])
        assert fake.rooms[-2:] == [1, context - count - 5]
        await backend.aclose()


async def test_images_that_the_engine_drops_are_refused() -> None:
    """An image that the engine cannot read is an error, and so are more than it uses."""
    async with FakeKoboldcpp(script="5", version={"vision": True}) as fake:
        backend = KoboldCpp(fake.url)
        with pytest.raises(Refused, match="cannot read") as refused:
            await run(backend, seen(1, 5))
        assert refused.value.param == "content[0]"
        fake.media = 5
        await run(backend, seen(16, 5))
        with pytest.raises(Unsupported, match="last 16 images") as unsupported:
            await run(backend, seen(17, 5))
        assert unsupported.value.param == "content[16]"
        await backend.aclose()


async def test_a_model_without_a_bos_gets_none(backend: KoboldCpp) -> None:
    """The tokenizer adds a BOS only for a model whose prompts get one."""
    assert not (await backend.model()).adds_bos
    for text, ids in (("hello", (273, 1012)), ("", ())):
        assert await backend.tokenize(text, add_special=True, parse_special=True) == ids


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_koboldcpp_ends_a_choice_that_the_reader_has_cut(logprobs: int | None) -> None:
    """A choice that the reader has cut aborts its generation, and the tokens before the cut count,
    also where log-probabilities come last."""
    aborted = asyncio.Event()
    tokens = ["a", "b", "x", "c"]
    top = [{"token": token, "token_id": 7, "logprob": -0.5, "top_logprobs": []} for token in tokens]

    async def events() -> AsyncIterator[bytes]:
        for token in tokens:
            yield b"data: " + orjson.dumps({"token": token, "finish_reason": None}) + b"\n\n"
        await aborted.wait()

    def abort(_request: httpx2.Request) -> httpx2.Response:
        aborted.set()
        return httpx2.Response(200, json={"success": True})

    engine = RecordedKoboldcpp({
        STREAM: events(),
        "/api/extra/abort": abort,
        "/api/extra/last_logprobs": {
            "logprobs": {"content": top, "tokens": tokens, "token_ids": [7] * 4}
        },
        "/api/extra/perf": PERF,
    })  # fmt: skip
    stops = Stops(("x",), by_reader=True)
    job = Generation(Prompt(COUNT), 500, stops=stops, logprobs=logprobs)
    text, tokens_read, finish = b"", 0, None
    async with asyncio.timeout(5), engine.backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    text, tokens_read = text + event.data, tokens_read + len(event.tokens)
                    if text.endswith(b"x"):
                        stops.ends[0] = 2
                elif isinstance(event, Finish):
                    finish = event
    assert aborted.is_set()
    assert text == b"abx"
    assert tokens_read == (0 if logprobs is None else 3)
    assert finish is not None
    assert (finish.reason, finish.completion_tokens) == ("stop", 2)
