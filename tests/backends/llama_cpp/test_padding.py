"""Tests of batches with one token more: when they are used, and that they change no result."""

from __future__ import annotations

import numpy as np
import pytest
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.padding import HOLD, MOST, TRIALS, Padding


def steps(padding: Padding, tokens: int, plain: float, padded: float, count: int) -> list[bool]:
    """Decode batches that take some seconds, and return which of them got another token."""
    found = []
    for _ in range(count):
        found.append(padding.wants(tokens))
        padding.add(tokens, found[-1], padded if found[-1] else plain)
    return found


def test_the_faster_way_is_used() -> None:
    """After a trial of each way in turn, batches of a size are padded only if that is faster."""
    padding = Padding()
    trial = [False, True] * TRIALS
    assert steps(padding, 7, 0.070, 0.055, 2 * TRIALS) == trial
    assert steps(padding, 9, 0.055, 0.070, 2 * TRIALS) == trial
    assert steps(padding, 5, 0.070, 0.069, 2 * TRIALS) == trial
    assert all(steps(padding, 7, 0.070, 0.055, 100))
    assert not any(steps(padding, 9, 0.055, 0.070, 100))
    assert not any(steps(padding, 5, 0.070, 0.069, 100)), "a gain within the noise is none"


def test_a_slow_step_of_a_trial_does_not_decide() -> None:
    """One step that another process delays does not change what is found."""
    padding = Padding()
    for number in range(2 * TRIALS):
        is_padded = padding.wants(7)
        padding.add(7, is_padded, 1.0 if number == 3 else 0.055 if is_padded else 0.070)
    assert padding.wants(7)


def test_a_trial_is_repeated() -> None:
    """A verdict holds for a number of steps, since the other load of a machine changes."""
    padding = Padding()
    steps(padding, 7, 0.070, 0.055, 2 * TRIALS)
    assert all(steps(padding, 7, 0.070, 0.055, HOLD))
    assert steps(padding, 7, 0.055, 0.070, 2 * TRIALS) == [False, True] * TRIALS
    assert not padding.wants(7)


def test_one_token_even_sizes_and_many_are_never_padded() -> None:
    """A single sequence, even batches and large ones stay as they are, without a trial."""
    padding = Padding()
    assert not any(steps(padding, 8, 1.0, 0.1, 20))
    assert not any(steps(padding, 1, 1.0, 0.1, 20))
    assert not any(steps(padding, MOST + 2, 1.0, 0.1, 20))


@pytest.fixture
def context() -> Context:
    """A context of four sequences with few cells."""
    options = Options(parallel=4, batch=64)
    return Context(LoadedModel(DEMO_MODEL, options), options, 256)


def test_a_padded_batch_has_the_same_logits(context: Context) -> None:
    """The logits of a batch are the same with another token, bit by bit, and its cell is free."""
    found = []
    for is_padded in (False, True):
        for sequence in range(3):
            context.remove(sequence)
            context.add(sequence, 0, [5 + sequence, 7, 9], 0)
        context.decode()
        for sequence in range(3):
            context.add(sequence, 3, [20 + sequence], 1)
        if is_padded:
            context.pad()
        assert context.decode() == 3
        found.append(context.logits(0, 3).copy())
    assert np.array_equal(found[0], found[1])
    for sequence in range(3):
        context.remove(sequence)
    # One batch after another fills the context, if padding leaves no cell behind.
    for position in range(0, 256, 64):
        context.add(0, position, [5] * 64, 1)
        context.decode()


def test_only_a_memory_that_removes_tokens_is_padded() -> None:
    """With `exact` there is no sequence for another token, and two of them are refused."""
    options = Options(exact=True)
    exact = Context(LoadedModel(DEMO_MODEL, options), options, 64)
    assert not exact.pads
    with pytest.raises(ValueError, match="cannot be padded"):
        exact.pad()


def test_a_batch_is_padded_once(context: Context) -> None:
    """A second token that belongs to nobody would need another cell, and is refused."""
    context.add(0, 0, [5], 1)
    context.pad()
    with pytest.raises(ValueError, match="cannot be padded"):
        context.pad()
    assert context.decode() == 1
