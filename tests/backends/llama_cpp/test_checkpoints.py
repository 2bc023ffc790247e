"""Tests of checkpoints over real contexts: of recurrent states, and of sliding windows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from latimer.backends.base import Piece, Sampling
from latimer.backends.llama_cpp.drafts import Lookup
from latimer.backends.llama_cpp.states import BLOCK
from support.compressed import compressed
from support.mrope import QWEN35, language_model
from support.scheduled import ENDLESS, Engine, finish
from support.windowed import windowed

RECURRENT = Path(__file__).parent.parent.parent / "models" / "recurrent.gguf"


@pytest.fixture(scope="module", params=["recurrent", "hybrid", "window", "wide window"])
def uncut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sequences cannot be cut at any length, outside the KV cache or at all."""
    file = tmp_path_factory.mktemp("models") / "uncut.gguf"
    if request.param == "recurrent":
        return RECURRENT
    if request.param == "hybrid":
        return language_model(file, QWEN35)
    # Cells for wide windows take more than half of the context, so there is one for each token.
    return windowed(file, 300 if request.param == "wide window" else 16)


def ids_of(count: int, seed: int) -> list[int]:
    """Return random tokens."""
    return random.Random(seed).choices(range(5, 250), k=count)


def answered(engine: Engine, *prompts: Sequence[int], **job: Any) -> list[tuple[list[int], int]]:
    """Run prompts together; return the tokens of each answer, and how many were cached."""
    boxes = [engine.submit_ids(ids, 8, logprobs=0, **job)[1] for ids in prompts]
    finish(engine, *boxes)
    return [
        (
            [
                token.id
                for event in box.events
                if isinstance(event, Piece)
                for token in event.tokens
            ],
            box.finishes[0].cached_tokens,
        )
        for box in boxes
    ]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_a_turn_reuses_a_prompt_whose_answer_is_gone(uncut: Path, beside: bool) -> None:
    """The next turn of a conversation reuses the last prompt if its answer is written differently,
    and so does the same prompt once more, also after others have run."""
    first = [*ids_of(300, 1), 7, 8, 9, 10]
    second = [*first[:-2], *ids_of(90, 2), 7, 8, 9, 10]
    engine = Engine(2, 2048, uncut)
    if beside:
        engine.submit_ids(ids_of(20, 9), 500, sampling=ENDLESS)
    answers = [answered(engine, prompt)[0] for prompt in (first, second, first, second)]
    engine.close()
    for prompt, (ids, cached), least in zip(
        (first, second, first, second), answers, (0, 300, 300, 388), strict=True
    ):
        fresh = Engine(2, 2048, uncut)
        assert ids == answered(fresh, prompt)[0][0]
        fresh.close()
        assert least <= cached < len(prompt)


def test_instructions_are_evaluated_once_for_those_who_come_together(uncut: Path) -> None:
    """Conversations with the same instructions share them, whether they come together or later."""
    instructions = ids_of(200, 1)
    prompts = [[*instructions, *ids_of(80, seed)] for seed in range(2, 8)]
    engine = Engine(4, 4096, uncut)
    answers = answered(engine, *prompts[:4])
    answers += [answered(engine, prompt)[0] for prompt in prompts[4:]]
    engine.close()
    assert answers[0][1] == 0
    # Those who wait begin as soon as less than a block is missing.
    assert all(200 - BLOCK < cached <= 200 for _, cached in answers[1:])
    for prompt, (ids, _) in zip(prompts, answers, strict=True):
        fresh = Engine(2, 4096, uncut)
        assert ids == answered(fresh, prompt)[0][0]
        fresh.close()


def test_choices_share_a_checkpoint(uncut: Path) -> None:
    """The choices of a prompt that goes back to a checkpoint are those of a fresh engine."""
    first = ids_of(200, 1)
    engine = Engine(4, 4096, uncut)
    answered(engine, first)
    second = [*first[:-3], *ids_of(50, 2)]
    _, box = engine.submit_ids(second, 8, seeds=(None,) * 3)
    finish(engine, box)
    assert box.finishes[0].cached_tokens >= 196
    fresh = Engine(4, 4096, uncut)
    _, alone = fresh.submit_ids(second, 8)
    finish(fresh, alone)
    assert {box.choice(index) for index in range(3)} == {alone.text}
    engine.close()
    fresh.close()


def test_a_seeded_prompt_is_evaluated_in_one_piece(uncut: Path) -> None:
    """A seed reproduces its result after any other prompts, so its prompt gets no checkpoint."""
    prompt = ids_of(60, 1)
    sampled = Sampling(1.0)
    engine = Engine(2, 2048, uncut, batch=512)
    answers = answered(engine, prompt, sampling=sampled, seeds=(5,))
    assert not any(slot.checkpoints for slot in engine.cache._resting.values())
    answered(engine, [*prompt, *ids_of(60, 2)])
    answers += answered(engine, prompt, sampling=sampled, seeds=(5,))
    engine.close()
    assert answers[0] == answers[1]
    assert answers[0][1] == 0


def test_windows_of_sequences_that_share_instructions_find_cells(tmp_path: Path) -> None:
    """Sequences that branch off from a running one do not fail for want of cells, if windows of
    all of them take more than the context has."""
    instructions = ids_of(400, 1)
    prompts = [[*instructions, *ids_of(60, seed)] for seed in (2, 3)]
    engine = Engine(4, 1024, windowed(tmp_path / "wide.gguf", 300))
    for prompt in prompts:
        finish(engine, engine.submit_ids(prompt, 1)[1])
    # The second one leaves the KV cache, and comes back without what has left its windows.
    finish(engine, engine.submit_ids(ids_of(30, 9), 4)[1])
    boxes = [engine.submit_ids([*prompts[1], *ids_of(10, 4)], 100, sampling=ENDLESS)[1]]
    engine.scheduler.step()
    (slot,) = engine.cache._running.values()
    assert 400 in slot.points
    assert engine.context.first(slot.id) > 101
    boxes += [
        engine.submit_ids([*instructions, *ids_of(30, seed)], 60, sampling=ENDLESS)[1]
        for seed in range(20, 23)
    ]
    finish(engine, *boxes)
    engine.close()
    assert [box.error for box in boxes] == [None] * 4
    assert boxes[1].finishes[0].cached_tokens == 400


def test_a_repeated_prompt_goes_back_although_it_was_there_without_checkpoints(uncut: Path) -> None:
    """A prompt that ended as a seeded one did reuses its checkpoint the next time."""
    prompt = ids_of(300, 1)
    engine = Engine(2, 2048, uncut)
    engine.submit_ids(ids_of(20, 9), 500, sampling=ENDLESS)
    cached = []
    jobs: list[dict[str, Any]] = [{"seeds": (5,), "sampling": Sampling(1.0)}, {}, {}]
    for job in jobs:
        _, box = engine.submit_ids(prompt, 1, **job)
        finish(engine, box)
        cached.append(box.finishes[0].cached_tokens)
    engine.close()
    assert cached == [0, 0, 296]


def test_many_prompts_do_not_cut_another_into_pieces(uncut: Path) -> None:
    """Prompts that branch off close to each other let a running one end few batches early."""
    known = ids_of(600, 1)
    engine = Engine(2, 2048, uncut, batch=512)
    _, first = engine.submit_ids(known, 1)
    engine.scheduler.step()
    boxes = [
        engine.submit_ids([*known[:length], *ids_of(30, length)], 1)[1]
        for length in range(590, 530, -1)
    ]
    steps = 0
    while not first.finished:
        engine.scheduler.step()
        steps += 1
    assert steps < 6
    finish(engine, *boxes)
    engine.close()


def test_choices_whose_windows_cannot_be_copied_are_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice is evaluated from its beginning when llama.cpp cannot save the windows."""
    engine = Engine(4, 4096, windowed(tmp_path / "narrow.gguf", 16))
    monkeypatch.setattr(engine.context, "save", lambda *_: np.empty(0, np.uint8))
    _, box = engine.submit_ids(ids_of(200, 1), 8, seeds=(None,) * 3)
    engine.scheduler.step()
    while len(engine.scheduler._running) < 3:
        engine.scheduler.step()
    assert [len(slot.tokens) for slot in engine.cache._running.values()] == [200, 0, 0]
    finish(engine, box)
    engine.close()
    assert len({box.choice(index) for index in range(3)}) == 1


def test_choices_take_no_window_of_a_sequence_with_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are removed before the windows of new choices take the cells of older tokens."""
    drafts: list[int] = []
    monkeypatch.setattr(Lookup, "propose", lambda *_: drafts)
    engine = Engine(4, 2048, windowed(tmp_path / "narrow.gguf", 32), drafts=True)
    _, short = engine.submit_ids(ids_of(50, 1), 3, sampling=ENDLESS)
    engine.submit_ids(ids_of(35, 2), 90, sampling=ENDLESS)
    for _ in range(2):
        engine.scheduler.step()
    engine.submit_ids(ids_of(63, 3), 8, seeds=(None,) * 3, sampling=ENDLESS)
    engine.scheduler.step()
    # The first cells are free now, and those of the sequence with the draft follow.
    assert short.finished
    drafted, prompt = engine.scheduler._running
    assert prompt.left == 1
    # As after a preemption.
    engine.scheduler._running.reverse()
    drafts += [5] * 20
    engine.scheduler.step()
    assert len(engine.scheduler._running) == 4
    assert drafted.drafted == 20
    length = len(drafted.slot.tokens)
    assert 32 < length < 45
    assert engine.context.first(drafted.slot.id) <= length - 31
    engine.close()


def test_choices_share_all_cells_without_a_window(tmp_path: Path) -> None:
    """A model whose file has a window that llama.cpp ignores is one without a window."""
    path = windowed(tmp_path / "unused.gguf", 16, uses_it=False)
    prompt = ids_of(250, 1)
    engine = Engine(4, 512, path, batch=16)
    assert engine.states.remembers
    # Each choice would not fit with cells of its own for the prompt.
    _, box = engine.submit_ids(prompt, 50, seeds=(None,) * 4, sampling=ENDLESS)
    finish(engine, box)
    assert box.error is None
    assert len({box.choice(index) for index in range(4)}) == 1
    assert answered(engine, [*prompt[:200], 7])[0][1] == 200
    engine.close()


def test_a_sequence_that_cannot_be_copied_is_reused(tmp_path: Path) -> None:
    """Prompts and choices of DeepSeek V4, which llama.cpp cannot copy, are those of a fresh
    engine, and go back to checkpoints."""
    path = compressed(tmp_path / "compressed.gguf")
    first = ids_of(200, 1)
    prompts = [first, [*first[:-3], *ids_of(40, 2)], [*first[:150], *ids_of(90, 3)]]
    engine = Engine(4, 2048, path)
    assert not engine.model.rolls_back, "drafts cannot be removed"
    answers = [answered(engine, prompt)[0] for prompt in prompts[:2]]
    assert answers[1][1] == 196
    answers += answered(engine, *reversed(prompts))[::-1]
    _, choices = engine.submit_ids(first, 8, seeds=(None,) * 2)
    finish(engine, choices)
    engine.close()
    for prompt, (ids, _) in zip([*prompts[:2], *prompts], answers, strict=True):
        fresh = Engine(2, 2048, path)
        assert ids == answered(fresh, prompt)[0][0]
        fresh.close()
    fresh = Engine(2, 2048, path)
    _, alone = fresh.submit_ids(first, 8)
    finish(fresh, alone)
    fresh.close()
    assert [choices.choice(index) for index in range(2)] == [alone.text] * 2
