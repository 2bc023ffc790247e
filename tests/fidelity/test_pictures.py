"""Tests that pictures of models with M-RoPE give llama-server's tokens and log-probabilities.

The two versions of llama.cpp compute embeddings that differ more than the logits of texts do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from latimer.backends.base import (
    MEDIA,
    Backend,
    Finish,
    Generation,
    Media,
    Piece,
    Prompt,
    Sampling,
    Text,
    Token,
)
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.scheduler import Scheduler
from latimer.backends.llama_cpp.tasks import Run
from latimer.backends.llama_server import LlamaServer
from support.mrope import (
    QWEN2,
    QWEN3,
    QWEN25,
    QWEN35,
    Family,
    language_model,
    noise,
    picture,
    projector,
)
from support.reference import EXACT
from support.servers import llama_server
from support.texts import fragments

pytestmark = pytest.mark.slow

# Prompts are longer than a block, so that they can be reused.
WORDS = "the of and to in is was he she it with for on that Hello world été 12 345 " * 4
WIDE, TALL, SMALL, ROW = picture(6, 3, 1), picture(3, 5, 2), picture(3, 3, 3), picture(9, 1, 4)
Parts = Sequence[str | bytes]
PROMPTS: dict[str, Parts] = {
    "none": ["the of and"],
    "first": [WIDE, "hello"],
    "twice": [TALL, "hello", TALL],
    "middle": [WORDS, SMALL, "world"],
    "row": ["the", ROW, "of"],
    "three": [SMALL, "he and she", WIDE, WORDS, TALL, "was it"],
    "neighbours": ["in", TALL, WIDE, SMALL],
    "resized": [noise(61, 100, 5), "is", noise(200, 37, 6), "that"],
}
TOKENS = 32


class Engines(NamedTuple):
    """A model on llama-server, and the files to load it in process."""

    family: Family
    server: Backend
    files: tuple[Path, Path]
    # Biases against the tokens for which the server has no log-probability.
    banned: tuple[tuple[int, float], ...]

    def local(self, *, exact: bool = False, context: int = 2048, batch: int = 512) -> LlamaCpp:
        """Return the model in process, with llama-server's exact arithmetic and one thread."""
        model, mmproj = self.files
        return LlamaCpp(
            model,
            mmproj=mmproj,
            context=context,
            parallel=8,
            batch=batch,
            threads=1,
            exact=exact,
            flash_attention=False,
            cache_type="f32",
        )


class Answer(NamedTuple):
    """The tokens of an answer, and the usage."""

    tokens: list[Token]
    usage: tuple[int, int]
    cached: int


FAMILIES = {"Qwen2-VL": QWEN2, "Qwen2.5-VL": QWEN25, "Qwen3-VL": QWEN3, "Qwen3.5": QWEN35}


@pytest.fixture(scope="module", params=[*FAMILIES.values()], ids=[*FAMILIES])
async def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engines]:
    """Run a family's model with a random projector."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp("mrope")
    model = language_model(folder / "model.gguf", family)
    mmproj = projector(folder / "mmproj.gguf", family)
    flags = ("--mmproj", str(mmproj), *EXACT)
    with llama_server(model, *flags, slots=8, context=512) as address:
        server = LlamaServer(address)
        banned = tuple((token, -100.0) for token in fragments(await server.token_bytes() or ()))
        yield Engines(family, server, (model, mmproj), banned)
        await server.aclose()


@pytest.fixture(scope="module")
async def expected(engines: Engines) -> dict[str, Answer]:
    """Return llama-server's answer to each prompt."""
    return {name: await ask(engines, engines.server, parts) for name, parts in PROMPTS.items()}


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Record the runs that are preempted after their pictures were evaluated."""
    found: list[Run] = []
    preempt = Scheduler._preempt

    def noted(scheduler: Scheduler, run: Run) -> None:
        if run.slot.spans:
            found.append(run)
        preempt(scheduler, run)

    monkeypatch.setattr(Scheduler, "_preempt", noted)
    return found


async def ask(engines: Engines, backend: Backend, parts: Parts, choices: int = 1) -> Answer:
    """Return the first greedy answer, and check that all choices are equal."""
    text = "".join(MEDIA if isinstance(part, bytes) else part for part in parts)
    content = Text(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", True)
    media = tuple(Media("image", part, "p") for part in parts if isinstance(part, bytes))
    sampling = Sampling(0.0, logit_bias=engines.banned)
    job = Generation(
        Prompt(content, media=media),
        TOKENS,
        sampling=sampling,
        seeds=(None,) * choices,
        logprobs=3,
    )
    tokens: list[list[Token]] = [[] for _ in range(choices)]
    finishes: list[Finish] = []
    async with backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    tokens[event.choice] += event.tokens
                elif isinstance(event, Finish):
                    finishes.append(event)
    assert all([token.id for token in one] == [token.id for token in tokens[0]] for one in tokens)
    usage = (finishes[0].prompt_tokens, finishes[0].completion_tokens)
    return Answer(tokens[0], usage, finishes[0].cached_tokens)


def logprob_of(token: Token) -> float:
    """Return the log-probability of a generated token, which has one."""
    assert token.logprob is not None
    return token.logprob


def check(ours: Answer, theirs: Answer, seen: bool = True) -> None:
    """Check that two engines gave the same tokens, log-probabilities and usage."""
    assert [token.id for token in ours.tokens] == [token.id for token in theirs.tokens]
    assert ours.usage == theirs.usage
    near = 1e-3 if seen else 1e-4
    for one, other in zip(ours.tokens, theirs.tokens, strict=True):
        assert abs(logprob_of(one) - logprob_of(other)) < near
        pairs = zip(one.top, other.top, strict=True)
        assert all(abs(a.logprob - b.logprob) < near for a, b in pairs)


@pytest.mark.parametrize("batch", [512, 16])
async def test_alone(engines: Engines, expected: dict[str, Answer], batch: int) -> None:
    """No, one, two or three pictures at any place give llama-server's tokens and numbers, also in
    batches that are smaller than a picture."""
    local = engines.local(exact=True, batch=batch)
    for name, parts in PROMPTS.items():
        check(await ask(engines, local, parts), expected[name], name != "none")
    await local.aclose()
    first = {tuple(token.id for token in answer.tokens) for answer in expected.values()}
    assert len(first) == len(PROMPTS)


async def test_eight_at_once(engines: Engines, expected: dict[str, Answer]) -> None:
    """Eight prompts at once give the same, evaluated or reused, and so do several choices."""
    local = engines.local()
    for again in range(2):
        answers = await asyncio.gather(
            *(ask(engines, local, parts, 1 + again) for parts in PROMPTS.values())
        )
        others = await asyncio.gather(
            *(ask(engines, engines.server, parts) for parts in PROMPTS.values())
        )
        for name, answer, other in zip(PROMPTS, answers, others, strict=True):
            check(answer, expected[name], name != "none")
            check(other, expected[name], name != "none")
        cached = [answer.cached for answer in answers if answer.usage[0] > 80]
        # A recurrent model reuses prompts from their checkpoints only, which short ones lack.
        assert engines.family.recurrent or bool(again) == all(cached) == any(cached)
    await local.aclose()


async def test_prefixes(engines: Engines) -> None:
    """A prompt that continues another before, between or after its pictures gives the same."""
    known: Parts = [WORDS, WIDE, "he and she", TALL, WORDS, SMALL, "world"]
    local = engines.local()
    first = await ask(engines, local, known)
    whole, least = first.usage[0], 64
    assert first.cached == 0
    for changed, parts in (
        (1, [*known[:1], TALL, *known[2:]]),
        (2, [*known[:2], "was it", *known[3:]]),
        (3, [*known[:3], SMALL, "of"]),
        (5, [*known[:5], ROW, "world"]),
        (6, [*known[:6], "été"]),
        (7, [*known, "12 345", ROW, "in"]),
    ):
        ours = await ask(engines, local, parts)
        check(ours, await ask(engines, engines.server, parts))
        if engines.family.recurrent:
            # The first prompt that branches off has made a checkpoint there.
            assert (least < ours.cached < whole) == (changed > 1), changed
        else:
            assert least < ours.cached < whole, changed
            least = ours.cached
    await local.aclose()


@pytest.mark.parametrize("context", [320, 640])
async def test_preemption(
    engines: Engines, expected: dict[str, Answer], preempted: list[Run], context: int
) -> None:
    """Prompts that are preempted and resumed give the same."""
    local = engines.local(context=context)
    answers = await asyncio.gather(*(ask(engines, local, parts) for parts in PROMPTS.values()))
    await local.aclose()
    for name, answer in zip(PROMPTS, answers, strict=True):
        check(answer, expected[name], name != "none")
    assert preempted
