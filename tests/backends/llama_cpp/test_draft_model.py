"""Tests of drafts by a smaller model: that answers stay what they are, and what is refused."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from latimer.backends.base import Finish, Generation, Grammar, Piece, Prompt, Sampling, Stops, Text
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from latimer.backends.llama_cpp.draft_model import DraftModel, Wanted
from latimer.backends.llama_cpp.drafts import DecodeCost
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.scheduler import Scheduler
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from support import gguf_files
from support.windowed import windowed

from .test_drafts import PROMPTS, accepted, events_of, job_of, without_counts

RECURRENT = Path(__file__).parent.parent.parent / "models" / "recurrent.gguf"
SETTINGS: dict[str, Any] = {
    "context": 1024, "cache_memory": 0, "cache_type": "f32", "flash_attention": False,
    "prompt_lookup": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that mostly agrees with the demo model."""
    target = tmp_path_factory.mktemp("draft") / "noisy.gguf"
    return gguf_files.noisy(DEMO_MODEL, target, gguf.GGMLQuantizationType.F32)


@pytest.fixture(scope="module")
async def engines(demo_f32: Path, noisy: Path) -> AsyncIterator[list[LlamaCpp]]:
    """Engines without drafts, and with drafts by the same and by a noisy model.

    They draft even where it does not pay, as with models of one size.
    """
    made = [LlamaCpp(demo_f32, draft_model=draft, **SETTINGS) for draft in (None, demo_f32, noisy)]
    cheap = DecodeCost()
    cheap.line = (0.6, 0.4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_cost_for", lambda *_: cheap)
        yield made
    for one in made:
        await one.aclose()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stops": Stops((" 9", "dog"))},
    "several": {"seeds": (1, 2, 3)},
    "grammar": {"grammar": Grammar("regex", "(( [0-9]+,)|[a-z ]){1,200}", "regex")},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 1])
async def test_answers_are_the_same(engines: list[LlamaCpp], kind: str, seed: int | None) -> None:
    """With a draft model the text, the counts and the reason are those without drafts."""
    # One that the model repeats, and one that it does not; each stop sequence needs its own.
    for prompt in PROMPTS if kind == "stop" else PROMPTS[::3]:
        job = replace(job_of(prompt, seed), **KINDS[kind])
        found = []
        for engine in engines:
            job.stops = replace(job.stops, ends={})
            found.append(without_counts(await events_of(engine, job)))
        assert found[0] == found[1] == found[2]


async def test_an_equal_model_is_accepted(engines: list[LlamaCpp]) -> None:
    """Greedy drafts of the same model are accepted, and those of a noisy one in part."""
    finishes = []
    for engine in engines:
        events = await events_of(engine, job_of(PROMPTS[3], sampling=Sampling(0.0)))
        finishes.append(next(event for event in events if isinstance(event, Finish)))
    assert {finish.reason for finish in finishes} == {"end"}, "no draft goes beyond the end"
    assert [finish.accepted_tokens > 0 for finish in finishes] == [False, True, True]
    assert finishes[1].rejected_tokens == 0
    assert finishes[2].rejected_tokens > 0


async def test_log_probabilities_are_the_same(engines: list[LlamaCpp]) -> None:
    """Tokens and alternatives of drafted positions have the probabilities of single decodes."""
    job = job_of(PROMPTS[3], logprobs=3)
    plain, drafted, _ = [await events_of(engine, job) for engine in engines]
    assert accepted(drafted) > 0
    for one, other in zip(plain[:-1], drafted[:-1], strict=True):
        assert one.tokens[0].id == other.tokens[0].id
        assert one.tokens[0].logprob == pytest.approx(other.tokens[0].logprob, abs=1e-4)


@pytest.mark.slow
async def test_many_at_once_are_the_same(engines: list[LlamaCpp]) -> None:
    """Sequences of one batch, and those that take over their ids, do not disturb each other."""
    jobs = [job_of(prompt + " " * number) for prompt in PROMPTS for number in range(6)]
    found = [await asyncio.gather(*(events_of(one, job) for job in jobs)) for one in engines]
    texts = [
        [b"".join(e.data for e in events if isinstance(e, Piece)) for events in each]
        for each in found
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
async def test_sampled_tokens_have_the_distribution(engines: list[LlamaCpp]) -> None:
    """Third tokens of unseeded answers with drafts occur as often as without (chi-square)."""
    count = 1200
    sampling = Sampling(3.0, logit_bias=((0, -100.0), (2, -100.0)))
    job = Generation(Prompt(Text(PROMPTS[3])), 3, (None,) * 50, sampling=sampling, logprobs=0)
    tables = []
    for engine in (engines[0], engines[2]):
        found: Counter[int] = Counter()
        for _ in range(count // 50):
            last: dict[int, int] = {}
            for event in await events_of(engine, replace(job, stops=Stops())):
                if not isinstance(event, Finish):
                    last[event.choice] = event.tokens[0].id
            found.update(last.values())
        tables.append(found)
    often = [token for token in tables[0] | tables[1] if tables[0][token] + tables[1][token] >= 10]
    rows = [[table[token] for token in often] for table in tables]
    for row in rows:
        row.append(count - sum(row))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in zip(*rows, strict=True) if a + b)
    assert len(often) > 3
    # Five standard deviations above the mean of the chi-square distribution.
    assert statistic < len(often) + 5 * math.sqrt(2 * len(often))


def test_drafts_follow_a_sequence_that_changes(demo_loaded: LoadedModel) -> None:
    """A draft depends on the sequence only, and not on what was drafted for its id before."""
    vocabulary = Vocabulary(demo_loaded)
    options = Options(threads=1, parallel=2, cache_type="f32", flash_attention=False)
    story = list(vocabulary.tokenize(PROMPTS[3], add_special=True, parse_special=True))
    numbers = list(vocabulary.tokenize(PROMPTS[0], add_special=True, parse_special=True))

    def fresh(history: list[int]) -> list[int]:
        model = DraftModel(DEMO_MODEL, options, 512, vocabulary)
        (draft,) = model.propose([Wanted(0, history, 5)], 1).values()
        model.close()
        return draft

    model = DraftModel(DEMO_MODEL, options, 512, vocabulary)
    for history in (story, [*story, 5], numbers, numbers[:-3], story):
        assert model.propose([Wanted(0, history, 5)], 1)[0] == fresh(history)
    both = model.propose([Wanted(1, numbers, 3), Wanted(0, story, 5)], 1)
    assert both == {0: fresh(story), 1: fresh(numbers)[:3]}
    model.close()
    vocabulary.close()


def test_drafts_of_a_window_are_those_of_a_fresh_model(tmp_path: Path) -> None:
    """A sequence that changes far before its end is evaluated again, because its window is gone."""
    path = windowed(tmp_path / "windowed.gguf", 16)
    options = Options(threads=1, parallel=1, batch=64, cache_type="f32", flash_attention=False)
    loaded = LoadedModel(path, options)
    vocabulary = Vocabulary(loaded)
    words = random.Random(1).choices(range(270, 400), k=500)

    def drafts(model: DraftModel, history: list[int]) -> list[int]:
        found: dict[int, list[int]] = {}
        while not found:
            found = model.propose([Wanted(0, history, 5)], 1)
        return found[0]

    model = DraftModel(path, options, 1024, vocabulary)
    for history in (words[:400], words[:80], [*words[:79], *words[400:]], words[:490]):
        fresh = DraftModel(path, options, 1024, vocabulary)
        assert drafts(model, history) == drafts(fresh, history)
        assert model._context.first(0) <= len(history) - 16
        fresh.close()
    model.close()
    vocabulary.close()
    loaded.close()


def test_a_long_prompt_is_evaluated_in_steps(demo_loaded: LoadedModel) -> None:
    """One call evaluates at most a batch, and sequences without cells get no draft."""
    vocabulary = Vocabulary(demo_loaded)
    options = Options(threads=1, parallel=2, batch=64)
    model = DraftModel(DEMO_MODEL, options, 256, vocabulary)
    history = [100 + number % 200 for number in range(150)]
    found = [model.propose([Wanted(0, history, 2)], 1) for _ in range(4)]
    assert [len(drafts.get(0, [])) for drafts in found] == [0, 0, 2, 2]
    assert model.propose([Wanted(1, history, 200)], 1) == {}
    assert len(model.propose([Wanted(1, history[:40], 4)], 1)[1]) == 4
    model.close()
    vocabulary.close()


async def test_other_models_are_refused(demo_f32: Path, tmp_path: Path) -> None:
    """A draft model needs the same tokens, a memory that removes tokens, and no `exact`."""
    tokens = gguf.GGUFReader(DEMO_MODEL).fields["tokenizer.ggml.tokens"].contents()
    changed = {"tokenizer.ggml.tokens": [*tokens[:-1], "other"]}
    other = gguf_files.copy(DEMO_MODEL, tmp_path / "other.gguf", changes=changed)
    cases = [
        (DEMO_MODEL, other, "other tokens"),
        (DEMO_MODEL, RECURRENT, "cannot draft"),
        (RECURRENT, DEMO_MODEL, "Omit --draft-model"),
        (DEMO_MODEL, tmp_path / "none.gguf", "no draft model"),
    ]
    for target, draft, text in cases:
        with pytest.raises(EngineError, match=text):
            await LlamaCpp(target, draft_model=draft).model()
    with pytest.raises(EngineError, match="'exact' does not support a draft model"):
        LlamaCpp(demo_f32, draft_model=DEMO_MODEL, exact=True)


@pytest.mark.parametrize("window", [6, 16, 200])
async def test_a_window_loses_nothing_by_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Drafts by prompt lookup and by a model change no answer of a model with a sliding window,
    with cells for its windows only and with one for each token."""
    cheap = DecodeCost()
    cheap.line = (0.6, 0.4)
    monkeypatch.setattr(Scheduler, "_cost_for", lambda *_: cheap)
    path = windowed(tmp_path / "windowed.gguf", window)
    words = random.Random(1)
    prompts = [words.choices(range(270, 300), k=words.randrange(20, 200)) * 2 for _ in range(8)]
    greedy = Sampling(0.0)
    jobs = [Generation(Prompt(tuple(ids)), 60, sampling=greedy, logprobs=2) for ids in prompts]
    found, drafted = [], []
    for more in ({}, {"prompt_lookup": True}, {"draft_model": path}):
        backend = LlamaCpp(path, batch=64, **{**SETTINGS, **more})
        answers = await asyncio.gather(*(events_of(backend, replace(job)) for job in jobs))
        await backend.aclose()
        drafted.append(sum(accepted(events) for events in answers))
        found.append(
            [
                [event.tokens[0] for event in events if isinstance(event, Piece)]
                for events in answers
            ]
        )
    assert drafted[0] == 0
    assert min(drafted[1:]) > 20
    for one in found[1:]:
        for tokens, others in zip(found[0], one, strict=True):
            for token, other in zip(tokens, others, strict=True):
                assert token.logprob == pytest.approx(other.logprob, abs=1e-3)
                if token.id != other.id:
                    # Two tokens can be equally likely, and then the answers differ.
                    assert other.id in [alternative.id for alternative in token.top]
                    break
