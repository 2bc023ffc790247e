"""Tests of the calls that score a prompt's tokens, and of reading their responses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.base import Generation, Prompt, PromptTokens, Text
from latimer.backends.errors import EngineError, Unsupported
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from latimer.backends.llama_server.scoring import (
    LONGEST,
    SHORTEST,
    WIDE,
    ScoringCall,
    plan,
    read,
    to_native,
)
from latimer.backends.llama_server.translate import Vocabulary, ends_inside, read_pieces
from support.servers import llama_server

PIECES = [b"", b"a", b" b", b"\xe6", b"\xbc", b"\xa2", b"\0", " é".encode(), b"b\xf0\x9f"]
VOCABULARY = Vocabulary(PIECES, {0: b"<|c|>"})
KINDS = ["bias", "grammar", "grammar", "among", "bias", "bias", "bias", "grammar", "among"]


def entry(token: int, logprob: float = -1.0, *others: tuple[int, float]) -> dict[str, Any]:
    """Return one token's entry of a response."""
    top = [{"id": i, "token": "", "bytes": [], "logprob": value} for i, value in others]
    return {"id": token, "token": "x", "bytes": [], "logprob": logprob, "top_logprobs": top}


def reply(*entries: dict[str, Any], **more: Any) -> bytes:
    """Return the body of a response."""
    return orjson.dumps({"completion_probabilities": entries, "timings": {"cache_n": 0}, **more})


@given(st.lists(st.integers(0, 8), min_size=1, max_size=600), st.integers(1, 8))
def test_every_token_is_scored_once(tokens: list[int], slots: int) -> None:
    """The planned calls cover each token once, in order, each forced in the way that its tokens
    allow."""
    ids = tuple(tokens)
    calls = plan(ids, 1, VOCABULARY, slots)
    assert [at for call in calls for at in range(call.start, call.stop)] == list(range(1, len(ids)))
    for call in calls:
        assert {KINDS[token] for token in ids[call.start : call.stop]} == {call.kind}
        assert call.kind == "grammar" or call.stop - call.start == 1
        assert call.stop - call.start <= LONGEST


def test_long_runs_are_spread_over_the_slots() -> None:
    """The planner splits a long run over all slots, and does not split a short one."""
    assert len(plan((1,) * 129, 1, VOCABULARY, 4)) == 4
    assert len(plan((1,) * (SHORTEST + 1), 1, VOCABULARY, 4)) == 1


def test_payloads_force_their_tokens() -> None:
    """Calls force their tokens by a grammar or a bias, and an ordinary token replaces one without
    an entry."""
    ids = (1, 2, 7, 0, 3)
    payload = to_native(ScoringCall("grammar", 1, 3), ids, 2, VOCABULARY, True)
    assert payload["grammar"] == "root ::= <[2]> <[7]>"
    assert (payload["prompt"], payload["n_predict"], payload["n_probs"]) == ((1,), 2, 2)
    payload = to_native(ScoringCall("bias", 3, 4), ids, 0, VOCABULARY, False)
    assert payload["logit_bias"][0][0] == 0
    assert (payload["n_probs"], payload["cache_prompt"]) == (1, False)
    payload = to_native(ScoringCall("among", 4, 5), ids, 0, VOCABULARY, True)
    assert payload["logit_bias"][0][0] == 1
    assert payload["n_probs"] == len(PIECES) < WIDE


def test_scores_are_read_in_order() -> None:
    """Each entry gives a token's own log-probability and alternatives with the vocabulary's
    spelling."""
    ids = (1, 2, 7)
    body = reply(entry(2, -0.5, (0, -0.1), (2, -0.5)), entry(7, -3.4028234663852886e38))
    scores, rest = read(ScoringCall("grammar", 1, 3), ids, 1, body, VOCABULARY)
    assert [score.logprob for score in scores] == [-0.5, -math.inf]
    assert scores[0].top[0].spelling == b"<|c|>"
    assert scores[0].top[0].control
    assert len(scores[0].top) == 1
    assert rest == []


def test_a_run_that_ends_early_goes_on() -> None:
    """A run that ends early keeps its scores, and a bias forces the token that the grammar
    rejected."""
    ids = (1, 2, 7, 1, 2)
    call = ScoringCall("grammar", 1, 5)
    scores, rest = read(call, ids, 0, reply(entry(2)), VOCABULARY)
    assert (len(scores), rest) == (1, [ScoringCall("grammar", 2, 5)])
    scores, rest = read(call, ids, 0, reply(entry(1)), VOCABULARY)
    assert (scores, rest) == ([], [ScoringCall("bias", 1, 2), ScoringCall("grammar", 2, 5)])


def test_another_token_is_an_error_never_a_number() -> None:
    """A response with another token than the forced one raises an error."""
    with pytest.raises(EngineError, match="token 0"):
        read(ScoringCall("bias", 1, 2), (1, 0), 0, reply(entry(2)), VOCABULARY)


def test_a_token_without_an_entry_is_found_among_the_others() -> None:
    """A token without an entry is searched among the most likely tokens, then in the whole
    vocabulary."""
    ids, call = (1, 3), ScoringCall("among", 1, 2)
    body = reply(entry(1, -9.0, (2, -0.1), (3, -4.0)))
    scores, rest = read(call, ids, 1, body, VOCABULARY)
    assert (scores[0].logprob, [other.id for other in scores[0].top], rest) == (-4.0, [2], [])
    scores, rest = read(call, ids, 1, reply(entry(1, -9.0, (2, -0.1))), VOCABULARY)
    assert (scores, rest) == ([], [call._replace(wide=True)])
    with pytest.raises(EngineError):
        read(rest[0], ids, 1, reply(entry(1, -9.0, (2, -0.1))), VOCABULARY)


def test_drafted_tokens_have_no_log_probabilities() -> None:
    """Scores of a server that decodes speculatively are rejected."""
    body = reply(entry(2), timings={"draft_n": 3})
    with pytest.raises(Unsupported, match="draft model"):
        read(ScoringCall("grammar", 1, 2), (1, 2), 0, body, VOCABULARY)


@given(st.text(max_size=4), st.integers(0, 4))
def test_incomplete_characters_are_noticed(text: str, cut: int) -> None:
    """Bytes that end inside a character are detected."""
    data = text.encode()
    assert not ends_inside(data)
    size = len(text[-1:].encode())
    if 0 < cut < size:
        assert ends_inside(data[: len(data) - size + cut])


def test_a_real_vocabulary() -> None:
    """The demo model's vocabulary has three control tokens, and tokens for single bytes of a
    character."""
    body = (Path(__file__).parent / "vocabulary.json").read_bytes()
    pieces = read_pieces(body)
    vocabulary = Vocabulary(pieces, {2: b"<|im_end|>"})
    assert [token for token, piece in enumerate(pieces) if not piece] == [0, 1, 2]
    assert vocabulary.token(2) == (b"<|im_end|>", True)
    assert pieces[vocabulary.ordinary].isalpha()
    assert b"\xe6" in vocabulary.fragments


async def test_long_prompts_are_scored_in_cells_that_slots_share() -> None:
    """The calls for a long prompt take turns, so that slots which share a context have room."""
    prompt = Prompt(Text("word " * 450), logprobs=0)
    with llama_server(DEMO_MODEL, "--kv-unified", "-c", "1024", slots=4) as address:
        backend = LlamaServer(address)
        try:
            async with backend.open(Generation(prompt, 0)) as batches:
                [event, *_] = [event async for batch in batches for event in batch]
        finally:
            await backend.aclose()
    assert isinstance(event, PromptTokens)
    assert len(event.tokens) == 902
    assert sum(token.logprob is not None for token in event.tokens) == 901
