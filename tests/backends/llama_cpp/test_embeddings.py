"""Tests of embeddings and rankings in process, against float64 arithmetic."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import AsyncIterator

import llama_cpp
import pytest
from latimer.backends.base import (
    Embedding,
    EmbeddingModel,
    Generation,
    Pooling,
    Prompt,
    Ranking,
    Sampling,
    Text,
    TokenIds,
)
from latimer.backends.errors import (
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    NotServed,
    UnknownToken,
    WordTooLong,
)
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp, threads
from support.embedding_reference import LAST, MEAN, cosine, embedding_reference
from support.embeddings import MODELS
from support.jobs import run

NAMES = ("bert-mean", "bert-cls", "last")
WORDS = ("the", "cat", "kato", "mira", "is", "blue", "sky", "été", "12", "🐱", "Hello", "of")


def texts(count: int, seed: int = 1, most: int = 40) -> list[str]:
    """Return texts of 1 to `most` words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, most))) for _ in range(count)]


def job(*inputs: str | TokenIds) -> Embedding:
    """Return a job for texts and lists of ids."""
    return Embedding([Text(one, False) if isinstance(one, str) else one for one in inputs])


@pytest.fixture(scope="module", params=NAMES)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[LlamaCpp]:
    """An embedding model for each pooling."""
    made = LlamaCpp(MODELS / f"{request.param}.gguf")
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
async def ranker() -> AsyncIterator[LlamaCpp]:
    """A reranker."""
    made = LlamaCpp(MODELS / "rank.gguf")
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
async def both() -> AsyncIterator[LlamaCpp]:
    """A chat model that also embeds."""
    made = LlamaCpp(embeddings=True)
    yield made
    await made.aclose()


async def ids_of(engine: LlamaCpp, text: str) -> TokenIds:
    """Return the tokens of an input."""
    return await engine.tokenize(text, add_special=True, parse_special=False)


async def worst_of(engine: LlamaCpp, inputs: list[str], most: int = 25) -> float:
    """Embed texts in one job, and return the smallest cosine with the reference."""
    model = await engine.model()
    reference = embedding_reference(MODELS / f"{model.name}.gguf")
    found = await engine.embed(job(*inputs))
    assert len(found.vectors) == len(inputs)
    chosen = range(0, len(inputs), max(len(inputs) // most, 1))
    return min(
        [
            cosine(
                list(found.vectors[index]), reference.vector(await ids_of(engine, inputs[index]))
            )
            for index in chosen
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 130, 2048])
async def test_vectors_are_those_of_float64_arithmetic(engine: LlamaCpp, count: int) -> None:
    """Vectors have a cosine over 0.99999 with float64 arithmetic, in batches of any size."""
    assert await worst_of(engine, texts(count, most=12 if count > 200 else 40)) > 0.99999


@pytest.mark.slow
async def test_the_longest_input_is_embedded_whole(engine: LlamaCpp) -> None:
    """An input that fills the context, and takes several batches, has the exact vector."""
    facts = await engine.embedding_model()
    assert facts is not None
    assert facts.context is not None
    reference = embedding_reference(MODELS / f"{(await engine.model()).name}.gguf")
    ids = tuple(random.Random(3).choices(range(300, 500), k=facts.context))
    found = await engine.embed(job("a cat", ids, "the sky"))
    assert cosine(list(found.vectors[1]), reference.vector(ids)) > 0.99999
    assert cosine(list(found.vectors[0]), reference.vector(await ids_of(engine, "a cat"))) > 0.99999


async def test_eight_jobs_at_once(engine: LlamaCpp) -> None:
    """Jobs that run together have the vectors that they have alone."""
    groups = [texts(20, seed) for seed in range(8)]
    together = await asyncio.gather(*(engine.embed(job(*group)) for group in groups))
    for group, found in zip(groups, together, strict=True):
        alone = await engine.embed(job(group[7]))
        assert cosine(list(found.vectors[7]), list(alone.vectors[0])) > 0.99999


async def test_a_batch_leaves_cores_to_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings have the threads for which cores are free, and the same vectors."""
    made = LlamaCpp(MODELS / "bert-mean.gguf", threads=2)
    counts = []

    def count(pointer: object, *numbers: int) -> None:
        counts.append(numbers)
        set_threads(pointer, *numbers)

    monkeypatch.setattr(threads, "SURE", 0.1)
    set_threads = llama_cpp.llama_set_n_threads
    monkeypatch.setattr(llama_cpp, "llama_set_n_threads", count)
    found = []
    for free in (2, 1):
        # The last count holds for a time.
        await asyncio.sleep(1.1 * threads.SURE)
        monkeypatch.setattr(threads, "free_cores", lambda _, free=free: free)
        found.append(list((await made.embed(job("the cat is blue"))).vectors[0]))
    await made.aclose()
    assert {counts[0], counts[-1]} == {(2, 2), (1, 1)}
    assert found[0] == found[1]


async def test_vectors_have_unit_length(engine: LlamaCpp) -> None:
    """The Euclidean norm of a vector is 1, and its length is the model's."""
    found = await engine.embed(job(*texts(5)))
    facts = await engine.embedding_model()
    assert facts is not None
    for vector in found.vectors:
        assert vector.typecode == "f"
        assert len(vector) == facts.dimensions == 64
        assert math.isclose(math.fsum(x * x for x in vector), 1, abs_tol=1e-6)


async def test_ids_are_used_unchanged(engine: LlamaCpp) -> None:
    """Token ids are not changed, and all of them count; added tokens of texts do not."""
    ids = await ids_of(engine, "the cat is blue")
    added = len(await ids_of(engine, ""))
    found = await engine.embed(job("the cat is blue", ids))
    assert cosine(list(found.vectors[0]), list(found.vectors[1])) > 0.99999
    assert found.prompt_tokens == len(ids) - added + len(ids)


async def test_control_tokens_in_texts_are_text(engine: LlamaCpp) -> None:
    """A control token that a text spells is embedded as text."""
    model = await engine.model()
    spelled = model.bos_token or model.eos_token
    found = await engine.embed(job(f"a {spelled} b"))
    parsed = await engine.tokenize(f"a {spelled} b", add_special=True, parse_special=True)
    other = await engine.embed(job(parsed))
    assert cosine(list(found.vectors[0]), list(other.vectors[0])) < 0.999


async def test_a_long_input_is_refused(engine: LlamaCpp) -> None:
    """An input of more tokens than the context is rejected with both counts, not cut."""
    facts = await engine.embedding_model()
    assert facts is not None
    assert facts.context is not None
    with pytest.raises(ContextExceeded) as one:
        await engine.embed(job("a", tuple([300] * (facts.context + 1))))
    assert (one.value.context, one.value.prompt_tokens) == (facts.context, facts.context + 1)
    assert one.value.param == "input[1]"
    with pytest.raises(ContextExceeded) as other:
        await engine.embed(job("cat " * 100_000))
    assert other.value.param == "input"


async def test_long_texts_of_few_tokens_are_embedded(engine: LlamaCpp) -> None:
    """A text that fits is embedded, with whitespace of any length; a long word is not."""
    text = " " * 6_000 + "hello"
    ids = await ids_of(engine, text)
    facts = await engine.embedding_model()
    assert facts is not None
    if facts.context is not None and len(ids) <= facts.context:
        found = await engine.embed(job(text, ids))
        assert cosine(*map(list, found.vectors)) > 0.99999
    with pytest.raises((WordTooLong, ContextExceeded)) as error:
        await engine.embed(job("a", "x" * 1_000_001))
    assert error.value.param == "input[1]"


async def test_equal_inputs_have_equal_vectors(engine: LlamaCpp) -> None:
    """Equal inputs of a job have the same numbers, in any batch."""
    found = await engine.embed(job(*texts(100), *["the cat"] * 50, *texts(100, 2), "the cat"))
    assert len(found.vectors) == 251
    assert {tuple(found.vectors[index]) for index in (100, 120, 149, 250)} == {
        tuple(found.vectors[100])
    }


async def test_unknown_ids_are_refused(engine: LlamaCpp) -> None:
    """An id that the vocabulary lacks is rejected, and so is a list of none."""
    with pytest.raises(UnknownToken) as unknown:
        await engine.embed(job((1, 900_000)))
    assert unknown.value.param == "input"
    with pytest.raises(EmptyPrompt):
        await engine.embed(job(()))


async def test_an_embedding_model_does_not_generate(engine: LlamaCpp) -> None:
    """A model that is made for embeddings rejects generation and rankings."""
    with pytest.raises(NotServed) as error:
        async with engine.open(Generation(Prompt(Text("Hello")), 2)):
            pass
    assert (error.value.task, error.value.param) == ("generate", "model")
    with pytest.raises(NotServed):
        await engine.rank(Ranking("a", ["b"]))


@pytest.mark.slow
async def test_scores_are_those_of_float64_arithmetic(ranker: LlamaCpp) -> None:
    """A reranker's scores are its own numbers, in the order of the documents."""
    reference = embedding_reference(MODELS / "rank.gguf")
    documents = [*texts(150, 5), "", "word " * 100]

    async def plain(text: str) -> TokenIds:
        return await ranker.tokenize(text, add_special=False, parse_special=False)

    found = await ranker.rank(Ranking("the blue sky", documents))
    assert len(found.scores) == len(documents)
    query = await plain("the blue sky")
    own = 0
    for document, score in zip(documents, found.scores, strict=True):
        ids = await plain(document)
        own += len(query) + len(ids)
        # ggml's table for GELU has 16 bits.
        assert abs(score - reference.scores(reference.pair(query, ids))[0]) < 0.01
    assert found.prompt_tokens == own
    assert await ranker.embedding_model() == EmbeddingModel(0, "rank", 512, generates=False)


async def test_large_inputs_are_compared_in_a_thread(both: LlamaCpp) -> None:
    """Equal inputs are found outside the event loop, if it would take long."""
    hashed: list[int] = []

    class Ids(tuple[int, ...]):
        __slots__ = ()

        def __hash__(self) -> int:
            hashed.append(threading.get_ident())
            return super().__hash__()

    long = Ids([300] * 1_000)
    await both.embed(job(*[long] * 20))
    assert len(hashed) == 20
    assert threading.get_ident() not in hashed


async def test_a_reranker_does_not_embed(ranker: LlamaCpp) -> None:
    """A reranker rejects embeddings, and names a document that is too long."""
    with pytest.raises(NotServed) as error:
        await ranker.embed(job("a"))
    assert error.value.task == "embed"
    with pytest.raises(ContextExceeded) as long:
        await ranker.rank(Ranking("a", ["b", "cat " * 600]))
    assert long.value.param == "documents[1]"


async def test_a_chat_model_embeds_on_request(both: LlamaCpp) -> None:
    """A chat model with `embeddings` generates and embeds at the same time."""

    greedy = Generation(Prompt(Text("Count to 12.")), 40, sampling=Sampling(temperature=0))
    alone, _ = await run(both, greedy)
    (together, _), found = await asyncio.gather(run(both, greedy), both.embed(job(*texts(200))))
    assert together == alone
    reference = embedding_reference(DEMO_MODEL)
    ids = await ids_of(both, texts(200)[3])
    assert cosine(list(found.vectors[3]), reference.vector(ids, LAST)) > 0.9995
    assert await both.embedding_model() == EmbeddingModel(192, "last", 2048)


async def test_a_small_batch_embeds_beside_generation() -> None:
    """A chat model with batches of four tokens embeds as one with large batches does."""
    small, large = LlamaCpp(embeddings=True, batch=4), LlamaCpp(embeddings=True)
    found, wanted = [await one.embed(job(*texts(4))) for one in (small, large)]
    for vector, right in zip(found.vectors, wanted.vectors, strict=True):
        assert cosine(list(vector), list(right)) > 0.9999
    for engine in (small, large):
        await engine.aclose()


async def test_a_chat_model_does_not_embed_by_default() -> None:
    """Without `embeddings`, a chat model rejects embeddings with the option to set."""
    engine = LlamaCpp()
    assert await engine.embedding_model() is None
    with pytest.raises(NotServed, match="--embeddings"):
        await engine.embed(job("a"))
    await engine.aclose()


async def test_cancelled_jobs_end(both: LlamaCpp) -> None:
    """A cancelled job leaves the engine, and the next one has the right vectors."""
    alone = await both.embed(job("the cat"))
    # Ids of this number are not checked in another thread, so all jobs are in the engine.
    rng = random.Random(4)
    inputs = [tuple(rng.choices(range(300, 1000), k=20)) for _ in range(800)]
    tasks = [asyncio.create_task(both.embed(job(*inputs))) for _ in range(3)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    after = await asyncio.wait_for(both.embed(job("the cat")), 2)
    assert cosine(list(alone.vectors[0]), list(after.vectors[0])) > 0.99999


async def test_options_that_contradict_the_model() -> None:
    """An encoder does not generate, and a model without a classifier is not a reranker."""
    with pytest.raises(EngineError, match="cannot generate text"):
        await LlamaCpp(MODELS / "bert-mean.gguf", embeddings=False).model()
    with pytest.raises(EngineError, match="not a reranker"):
        await LlamaCpp(pooling="rank").model()
    with pytest.raises(EngineError, match="not a reranker"):
        await LlamaCpp(MODELS / "bert-mean.gguf", pooling="rank").model()
    with pytest.raises(EngineError, match="text only"):
        await LlamaCpp(MODELS / "bert-mean.gguf", mmproj="projector.gguf").model()
    with pytest.raises(EngineError, match="'pooling'"):
        LlamaCpp(pooling="mean", embeddings=False)


async def test_closing_ends_waiting_jobs() -> None:
    """Closing the engine ends waiting jobs with an error."""
    engine = LlamaCpp(MODELS / "last.gguf")
    await engine.model()
    task = asyncio.create_task(engine.embed(job(*texts(2_048))))
    await asyncio.sleep(0.02)
    await engine.aclose()
    with pytest.raises(EngineError, match="shut down"):
        await asyncio.wait_for(task, 5)


@pytest.mark.parametrize(("pooling", "number"), [("mean", MEAN), ("last", LAST)])
async def test_pooling_can_be_set(pooling: Pooling, number: int) -> None:
    """An option replaces the pooling of the model's file."""
    engine = LlamaCpp(MODELS / "last.gguf", pooling=pooling)
    reference = embedding_reference(MODELS / "last.gguf")
    ids = await ids_of(engine, "the cat is blue")
    found = await engine.embed(job("the cat is blue"))
    assert cosine(list(found.vectors[0]), reference.vector(ids, number)) > 0.99999
    await engine.aclose()
