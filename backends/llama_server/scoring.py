"""Log-probabilities of tokens that are given, by making llama-server generate them (sans-I/O).

It tells log-probabilities of what it generates only, but those are of the model's own logits,
whatever forces the token. So a grammar of token ids forces whole runs; it refuses end tokens, empty
pieces and parts of characters (`llama_grammar_apply_impl` in llama-grammar.cpp), which a bias
forces one by one. A token that ends inside a character has no entry at all (`process_token` in
server-context.cpp): another one is forced in its place, and it is found among the alternatives.
Every id that comes back is compared with the one that was wanted.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from ..base import Alternative, TokenIds
from ..errors import EngineError, Unsupported, told_logprob
from .events import ENGINE, check_model
from .translate import NEUTRAL
from .vocabulary import Vocabulary, ends_inside

# Shorter runs cost more calls than they save time, longer ones make large grammars.
SHORTEST, LONGEST = 32, 256
# Beyond this many alternatives the whole vocabulary is asked for.
WIDE = 500
# No logit comes near.
FORCE = 10_000.0
# The smallest float, which the server writes for a probability of zero.
ZERO = -1e38

Kind = Literal["grammar", "bias", "among"]


class Score(NamedTuple):
    """A token's log-probability, and the most likely tokens at its place."""

    logprob: float
    top: tuple[Alternative, ...]


class ScoringCall(NamedTuple):
    """A native call: tokens `start` to `stop` of some ids, forced after those before them."""

    kind: Kind
    start: int
    stop: int
    wide: bool = False


def plan(ids: TokenIds, start: int, vocabulary: Vocabulary, slots: int) -> list[ScoringCall]:
    """The calls that score the tokens from `start` (at least 1) on, spread over the slots."""
    longest = min(max(math.ceil((len(ids) - start) / slots), SHORTEST), LONGEST)
    calls: list[ScoringCall] = []
    for at in range(start, len(ids)):
        kind = _kind(vocabulary.piece(ids[at]))
        last = calls[-1] if calls else None
        if last and kind == last.kind == "grammar" and at - last.start < longest:
            calls[-1] = last._replace(stop=at + 1)
        else:
            calls.append(ScoringCall(kind, at, at + 1))
    return calls


def _kind(piece: bytes) -> Kind:
    if not piece or piece[0] == 0:
        return "bias"
    if ends_inside(piece):
        return "among"
    try:
        piece.decode()
    except UnicodeDecodeError:
        return "bias"
    return "grammar"


def to_native(
    call: ScoringCall, ids: TokenIds, top: int, vocabulary: Vocabulary, cache: bool
) -> dict[str, Any]:
    """The payload of a call; `cache` says whether what was evaluated before may be reused."""
    payload: dict[str, Any] = {
        **NEUTRAL,
        "prompt": ids[: call.start],
        "n_predict": call.stop - call.start,
        "n_probs": max(top, 1),
        "temperature": 0.0,
        "stream": False,
        "cache_prompt": cache,
        "response_fields": ["model", "completion_probabilities", "timings"],
    }
    if call.kind == "grammar":
        terminals = " ".join(f"<[{token}]>" for token in ids[call.start : call.stop])
        payload["grammar"] = f"root ::= {terminals}"
    elif call.kind == "bias":
        payload["logit_bias"] = [[ids[call.start], FORCE]]
    else:
        payload["logit_bias"] = [[vocabulary.ordinary, FORCE]]
        payload["n_probs"] = len(vocabulary) if call.wide else max(min(WIDE, len(vocabulary)), top)
    return payload


def read(
    call: ScoringCall,
    ids: TokenIds,
    top: int,
    body: bytes,
    vocabulary: Vocabulary,
    names: Container[str] | None = None,
) -> tuple[list[Score], list[ScoringCall]]:
    """The scores of a call's first tokens, and the calls that are still to be made for the others.

    Args:
        names: what the server may call the model, None for anything.

    Raises:
        OtherModel: another model answered.
        EngineError: another token came back than the one that was forced.
        Unsupported: the server makes log-probabilities up.
    """
    reply = orjson.loads(body)
    if names is not None:
        check_model(reply, names)
    if (reply.get("timings") or {}).get("draft_n"):
        raise speculative()
    entries = reply.get("completion_probabilities") or []
    if call.kind == "among":
        return _read_among(call, ids, top, entries, vocabulary)
    scores: list[Score] = []
    for entry, wanted in zip(entries, ids[call.start : call.stop], strict=False):
        if entry["id"] != wanted:
            break
        scores.append(Score(logprob_of(entry), alternatives(entry, top, vocabulary)))
    return scores, after(call, len(scores), ids)


def after(call: ScoringCall, scored: int, ids: TokenIds) -> list[ScoringCall]:
    """The calls for what a call did not score.

    A run can end early: by an end token that has a spelling, by a stop that was set on the server.
    """
    start = call.start + scored
    if start == call.stop:
        return []
    if scored:
        return [call._replace(start=start)]
    if call.kind == "bias":
        raise EngineError(f"{ENGINE} cannot be made to generate token {ids[start]}.")
    rest = [call._replace(start=start + 1)] if start + 1 < call.stop else []
    return [ScoringCall("bias", start, start + 1), *rest]


def _read_among(
    call: ScoringCall, ids: TokenIds, top: int, entries: Sequence[Any], vocabulary: Vocabulary
) -> tuple[list[Score], list[ScoringCall]]:
    wanted = ids[call.start]
    for entry in entries[:1]:
        for other in entry["top_logprobs"]:
            if other["id"] == wanted:
                return [Score(logprob_of(other), alternatives(entry, top, vocabulary))], []
    if call.wide:
        raise EngineError(f"{ENGINE} does not tell the log-probability of token {wanted}.")
    return [], [call._replace(wide=True)]


def alternatives(entry: Any, top: int, vocabulary: Vocabulary) -> tuple[Alternative, ...]:
    """The most likely tokens of an entry, spelled by the vocabulary."""
    return tuple(
        Alternative(other["id"], *vocabulary.token(other["id"]), logprob_of(other))
        for other in entry["top_logprobs"][:top]
    )


def logprob_of(entry: Any) -> float:
    """The log-probability that an entry, or one of its alternatives, tells."""
    value = told_logprob(entry["logprob"])
    return value if value > ZERO else -math.inf


def speculative() -> Unsupported:
    """Draft models: the server does not compute the log-probabilities of what they propose."""
    return Unsupported(
        "logprobs",
        f"this {ENGINE}",
        "It decodes speculatively and makes log-probabilities up; start it without a draft model.",
    )
