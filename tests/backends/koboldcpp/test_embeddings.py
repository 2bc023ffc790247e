"""Tests of embeddings over a recorded koboldcpp, or a live one if there is one, and over a fake."""

from __future__ import annotations

import asyncio
import os
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest
from latimer.backends.base import Embedding, EmbeddingModel, Generation, Prompt, Ranking, Text
from latimer.backends.errors import (
    EmptyPrompt,
    EngineError,
    EngineUnavailable,
    NotServed,
    Refused,
    Unsupported,
)
from latimer.backends.koboldcpp import KoboldCpp, embeddings
from latimer.backends.koboldcpp.embeddings import INEXACT
from support.embeddings import MODELS, TEXTS, backend_of, cosine, is_unit
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.replay import EMBEDDINGS, Replay, replaying
from support.jobs import run

# koboldcpp parses the control tokens that a text spells.
PLAIN = [text for text in TEXTS if "<" not in text]


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[KoboldCpp]:
    """A backend over a koboldcpp with the demo model and an encoder with CLS pooling."""
    live = os.environ.get("LATIMER_KOBOLDCPP_EMBEDDINGS_URL")
    if live:
        made = KoboldCpp(live)
        yield made
        await made.aclose()
        return
    with replaying(Replay(EMBEDDINGS)) as (address, replay):
        made = KoboldCpp(address)
        yield made
        await made.aclose()
        assert not replay.unknown


async def test_koboldcpp_facts_of_embeddings(backend: KoboldCpp) -> None:
    """The dimensions are known; pooling and context are not reported."""
    assert await backend.embedding_model() == EmbeddingModel(64, None, None, inexact=INEXACT)


async def test_koboldcpp_vectors_are_those_of_llama_cpp(backend: KoboldCpp) -> None:
    """The vectors of several calls are in order, with unit length and llama-server's numbers."""
    job = Embedding([Text(text) for text in PLAIN])
    found = await backend.embed(job)
    assert all(map(is_unit, found.vectors))
    async with backend_of(MODELS / "bert-cls.gguf", "--embeddings") as (other, _address):
        own = await other.embed(job)
    for vector, expected in zip(found.vectors, own.vectors, strict=True):
        assert cosine(vector, expected) > 0.99999
    # It also counts [CLS] and [SEP] of each input.
    assert found.prompt_tokens == own.prompt_tokens + 2 * len(PLAIN)


async def test_koboldcpp_names_an_input_without_a_vector(backend: KoboldCpp) -> None:
    """An input that is too long is an error of the request that names it and the likely reason."""
    with pytest.raises(Refused) as caught:
        await backend.embed(Embedding([Text("x"), Text("x " * 600)]))
    assert caught.value.param == "input[1]"
    assert "--embeddingsmaxctx" in caught.value.reason


VERSION = {"result": "KoboldCpp", "version": "1.115.1", "llm": False, "embeddings": True}
VECTOR = [0.6, 0.8]


def coded(*numbers: float) -> str:
    """Return numbers as 32-bit floats in base64."""
    return b64encode(array("f", numbers).tobytes()).decode()


def reply(vectors: Sequence[str], tokens: Any = 1) -> bytes:
    """Return a response with vectors in order."""
    data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return orjson.dumps({"data": data, "usage": {"prompt_tokens": tokens}})


def of_texts(texts: Sequence[str]) -> bytes:
    """Return a response with different vectors, and none for texts of more than 100 characters."""
    return reply(["" if len(text) > 100 else coded(len(text), 1.0) for text in texts])


Make = Callable[..., Awaitable[tuple[FakeKoboldcpp, KoboldCpp]]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Return a function that starts a koboldcpp with an embedding model only, and its backend."""
    async with AsyncExitStack() as stack:

        async def made(
            answer: Callable[[Sequence[str]], bytes] = of_texts,
        ) -> tuple[FakeKoboldcpp, KoboldCpp]:
            fake = FakeKoboldcpp(version={**VERSION, "embeddingModel": "small"}, embed=answer)
            backend = KoboldCpp((await stack.enter_async_context(fake)).url)
            stack.push_async_callback(backend.aclose)
            return fake, backend

        yield made


async def test_an_embedding_model_alone_is_served(make: Make) -> None:
    """A koboldcpp without a text model embeds, has the name of its embedding model, and refuses to
    generate."""
    _, backend = await make()
    assert (await backend.model()).name == "koboldcpp/small"
    assert await backend.embedding_model() == EmbeddingModel(
        2, None, None, generates=False, inexact=INEXACT
    )
    assert len((await backend.embed(Embedding([Text("x")] * 20))).vectors) == 20
    for work in (
        run(backend, Generation(Prompt(Text("a")), 1)),
        backend.special_tokens(),
        backend.tokenize("a", add_special=True, parse_special=True),
        backend.detokenize((1,)),
    ):
        with pytest.raises(NotServed) as caught:
            await work
        assert caught.value.task == "generate"


async def test_koboldcpp_without_an_embedding_model(
    koboldcpp_replay: tuple[str, Replay | None],
) -> None:
    """Without an embedding model there are no facts, and the error names the flag."""
    backend = KoboldCpp(koboldcpp_replay[0])
    assert await backend.embedding_model() is None
    with pytest.raises(NotServed) as caught:
        await backend.embed(Embedding([Text("x")]))
    facts = caught.value.task, caught.value.hint
    assert facts == ("embed", "Start koboldcpp with --embeddingsmodel.")
    await backend.aclose()


async def test_koboldcpp_has_no_rankings(make: Make) -> None:
    """A ranking is refused, since koboldcpp has no endpoint for it."""
    with pytest.raises(NotServed) as caught:
        await (await make())[1].rank(Ranking("a", ["b"]))
    assert caught.value.task == "rank"


@pytest.mark.parametrize("item", [(1, 2), Text("a\0b"), Text("")], ids=["ids", "null", "empty"])
async def test_koboldcpp_refuses_odd_inputs(make: Make, item: Any) -> None:
    """Ids, a text that the engine would cut, and an empty text, which ends it, are not sent."""
    fake, backend = await make()
    with pytest.raises((Unsupported, EmptyPrompt)) as caught:
        await backend.embed(Embedding([Text("x"), item]))
    assert caught.value.param == ("input[1]" if isinstance(item, Text) else "input")
    assert ["x"] not in fake.embedded


@pytest.mark.parametrize(
    ("vectors", "hint"),
    [
        ([coded(*VECTOR)] * 2, "does not pool"),
        ([coded(0.0, 0.0)] * 2, "no vectors"),
        (["", ""], "no vectors"),
        ([coded(1.0, 0.0, 0.0), coded(0.9, 0.0, 0.0)], "no vectors"),
    ],
    ids=["first-token", "zeros", "none", "memory"],
)
async def test_models_without_pooling_are_refused(
    make: Make, vectors: list[str], hint: str
) -> None:
    """A model whose vectors are those of the first token, or zeros, has no embeddings."""
    _, backend = await make(lambda texts: reply(vectors[: len(texts)]))
    assert await backend.embedding_model() is None
    with pytest.raises(NotServed, match=hint):
        await backend.embed(Embedding([Text("x")]))


async def test_a_failing_engine_is_not_the_clients_fault(make: Make) -> None:
    """If short texts fail as well, the missing vector is an error of the engine."""
    fake, backend = await make()
    await backend.embedding_model()
    fake.embed = lambda texts: reply([""] * len(texts))
    with pytest.raises(EngineError, match=r"'input\[0\]', nor for a short text"):
        await backend.embed(Embedding([Text("x"), Text("y")]))


ENTRY = {"index": 0, "embedding": coded(*VECTOR)}
USAGE = {"usage": {"prompt_tokens": 1}}


@pytest.mark.parametrize(
    "content",
    [
        b"null",
        b"7",
        b"",
        b"[" * 200_000,
        b"{}",
        orjson.dumps({"data": [], **USAGE}),
        orjson.dumps({"data": [ENTRY, ENTRY], **USAGE}),
        orjson.dumps({"data": [{**ENTRY, "index": 1}], **USAGE}),
        orjson.dumps({"data": [{**ENTRY, "embedding": VECTOR}], **USAGE}),
        orjson.dumps({"data": [{**ENTRY, "embedding": "AAA"}], **USAGE}),
        orjson.dumps({"data": [{**ENTRY, "embedding": "AAAAAAA="}], **USAGE}),
        orjson.dumps({"data": [ENTRY]}),
        reply([coded(*VECTOR)], -1),
        reply([coded(*VECTOR)], "1"),
        reply([coded(float("nan"), 1.0)]),
        reply([coded(float("inf"), 1.0)]),
        reply([coded(0.6, 0.8, 0.0)]),
    ],
    ids=lambda content: content[:60].decode(),
)
async def test_wrong_vectors_of_koboldcpp_are_an_engine_error(make: Make, content: bytes) -> None:
    """A malformed reply, and a vector that is not finite or has another length, is never passed
    on."""
    fake, backend = await make()
    await backend.embedding_model()
    fake.embed = lambda _texts: content
    with pytest.raises(EngineError):
        await backend.embed(Embedding([Text("x")]))


async def test_other_jobs_take_turns_with_embeddings(make: Make) -> None:
    """A job that starts during one of many inputs is computed after one more of its calls."""
    fake, backend = await make()
    await backend.embedding_model()
    fake.embedded.clear()
    fake.may_embed.clear()
    long = asyncio.create_task(backend.embed(Embedding([Text("long")] * 80)))
    while not fake.embedded:
        await asyncio.sleep(0.001)
    short = asyncio.create_task(backend.embed(Embedding([Text("short")])))
    await asyncio.sleep(0)
    fake.may_embed.set()
    await short
    assert len(fake.embedded) <= 3
    assert len((await long).vectors) == 80


async def test_calls_have_as_many_texts_as_half_a_second_allows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast engine gets more texts in each call, up to a limit, and a slow one gets fewer."""
    fake, backend = await make()
    await backend.embedding_model()
    fake.embedded.clear()
    job = Embedding([Text("text")] * 600)
    assert len((await backend.embed(job)).vectors) == 600
    assert [len(call) for call in fake.embedded][:5] == [8, 16, 32, 64, 128]
    assert max(map(len, fake.embedded)) == 128
    fake.embedded.clear()
    monkeypatch.setattr(embeddings, "LONG", 0.0)
    await backend.embed(job)
    assert [len(call) for call in fake.embedded][:4] == [128, 64, 32, 16]


async def test_a_cancelled_embedding_keeps_its_turn_until_the_engine_is_done(make: Make) -> None:
    """After a cancellation the engine still computes, so the next call waits for the end."""
    fake, backend = await make()
    await backend.embedding_model()
    fake.may_embed.clear()
    fake.embedded.clear()
    job = asyncio.create_task(backend.embed(Embedding([Text("long")] * 80)))
    while not fake.embedded:
        await asyncio.sleep(0.01)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    before = len(fake.embedded)
    after = asyncio.create_task(backend.embed(Embedding([Text("next")])))
    await asyncio.sleep(0.05)
    assert len(fake.embedded) == before
    fake.may_embed.set()
    async with asyncio.timeout(2):
        await after
    assert fake.embedded[before:] == [["next"]]


async def test_another_embedding_model_is_noticed(make: Make) -> None:
    """A job for a model that was replaced is not sent, and the dimensions are learned again."""
    fake, backend = await make()
    old = await backend.model()
    assert await backend.embedding_model() == EmbeddingModel(
        2, None, None, generates=False, inexact=INEXACT
    )
    fake.version["embeddingModel"] = "other"
    await asyncio.sleep(0.25)
    await fake.restart()
    fake.embed = lambda texts: reply([coded(len(text), 1.0, 1.0) for text in texts])
    with pytest.raises(EngineUnavailable, match="another model"):
        await backend.embed(Embedding([Text("x")], fingerprint=old.fingerprint))
    assert await backend.embedding_model() == EmbeddingModel(
        3, None, None, generates=False, inexact=INEXACT
    )


async def test_facts_of_koboldcpp_do_not_wait_for_a_turn(make: Make) -> None:
    """While the engine is in use the dimensions are unknown, and they are learned afterwards."""
    _, backend = await make()
    await backend.model()
    await backend.server.turns.take()
    async with asyncio.timeout(1):
        facts = await backend.embedding_model()
    assert facts == EmbeddingModel(None, None, None, generates=False, inexact=INEXACT)
    backend.server.turns.release()
    assert await backend.embedding_model() == EmbeddingModel(
        2, None, None, generates=False, inexact=INEXACT
    )
