"""Log-probabilities of given tokens, by forcing llama-server to generate them (sans-I/O).

The server reports log-probabilities only of generated tokens. They come from the model's own
logits, even for a forced token. There are three ways to force tokens:

* A grammar of token ids forces whole runs. It cannot force end tokens, empty pieces and parts of
  characters (`llama_grammar_apply_impl` in llama-grammar.cpp).
* A logit bias forces one of those tokens per call.
* A token that ends inside a character has no entry (`process_token` in server-context.cpp). So a
  bias forces another token in its place, and the token is found among the alternatives.

Every returned id is compared with the expected one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from .. import offload
from ..base import Alternative, Batch, Generation, PromptTokens, Text, Token, TokenIds
from ..errors import ContextFull, EngineError, Unsupported, parse_logprob, read_from
from ..queue import Ticket
from ..streams import map_concurrently
from .server import Server, ServerInfo
from .translate import ENGINE, NEUTRAL, OtherModel, Vocabulary, check_model, ends_inside, to_error

# Shorter runs need more calls than they save in time; longer runs need large grammars.
SHORTEST, LONGEST = 32, 256
# The number of alternatives to request before requesting the whole vocabulary.
WIDE = 500
# A bias far above any logit.
FORCE = 10_000.0
# The server writes the lowest float for a probability of zero, which is below this.
ZERO = -1e38

Kind = Literal["grammar", "bias", "among"]


class Score(NamedTuple):
    """A token's log-probability, and the most likely tokens at its position."""

    logprob: float
    top: tuple[Alternative, ...]


class ScoringCall(NamedTuple):
    """A native call that forces tokens `start` to `stop` of a prompt after those before them."""

    kind: Kind
    start: int
    stop: int
    wide: bool = False


def plan(ids: TokenIds, start: int, vocabulary: Vocabulary, slots: int) -> list[ScoringCall]:
    """Return the calls that score the tokens from `start` (at least 1), spread over the slots."""
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
    """Return the payload of a call; `cache` is True if it may use the prompt cache."""
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
    """Return the scores of a call's first tokens, and the calls that score the others.

    Args:
        names: the expected names of the model; None accepts any name.

    Raises:
        OtherModel: another model answered.
        EngineError: the server returned another token than the forced one.
        Unsupported: the server decodes speculatively and invents log-probabilities.
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
    """Return the calls for the tokens that a call did not score.

    A run can end early at an end token that has a spelling, or at a stop sequence that was set on
    the server.
    """
    start = call.start + scored
    if start == call.stop:
        return []
    if scored:
        return [call._replace(start=start)]
    if call.kind == "bias":
        raise EngineError(f"{ENGINE} cannot be forced to generate token {ids[start]}.")
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
        raise EngineError(f"{ENGINE} did not return the log-probability of token {wanted}.")
    return [], [call._replace(wide=True)]


def alternatives(entry: Any, top: int, vocabulary: Vocabulary) -> tuple[Alternative, ...]:
    """Return the most likely tokens of an entry, with spellings from the vocabulary."""
    return tuple(
        Alternative(other["id"], *vocabulary.token(other["id"]), logprob_of(other))
        for other in entry["top_logprobs"][:top]
    )


def logprob_of(entry: Any) -> float:
    """Return the log-probability of an entry or of one of its alternatives."""
    value = parse_logprob(entry["logprob"])
    return value if value > ZERO else -math.inf


def speculative() -> Unsupported:
    """Return the error for a server with a draft model.

    The server does not compute the log-probabilities of the tokens that a draft model proposes.
    """
    return Unsupported(
        "logprobs",
        f"this {ENGINE}",
        "It returns invented log-probabilities with speculative decoding. Start it without a "
        "draft model and --spec-type.",
    )


async def prompt_tokens(
    server: Server, job: Generation, ids: TokenIds, count: int, facts: ServerInfo
) -> Batch:
    """Return the event with the tokens of a job's prompt.

    Args:
        ids: the whole prompt; its last `count` ids are the client's own.
    """
    if not count:
        return ()
    vocabulary, bos_count = facts.vocabulary, len(ids) - count
    own = ids[bos_count:]
    text = job.prompt.content.spelled.encode() if isinstance(job.prompt.content, Text) else None
    # The first token gets no score (contract 2.6.1), even if a BOS before it would allow one.
    scores = await score(server, ids, bos_count + 1, job.prompt.logprobs or 0, job.ticket)

    def tokens() -> Sequence[Token]:
        return _tokens(own, vocabulary, text, scores)

    return (PromptTokens(0, await offload.run(6 * len(own), tokens)),)


async def score(
    server: Server, ids: TokenIds, start: int, top: int, ticket: Ticket | None = None
) -> list[Score]:
    """Return the log-probabilities of the tokens from `start` on, each given all earlier ones.

    Args:
        ticket: the request of the calls; None inside a call that already has a place.
    """
    facts = await server.facts()
    # Slots may share the cells of one context, which has no room for several long prompts.
    at_once = max(1, min(facts.slots, facts.model.context // (len(ids) + 1)))
    calls = plan(ids, start, facts.vocabulary, at_once)
    work = (_score(server, call, ids, top, facts, ticket) for call in calls)
    scores = await map_concurrently(work, at_once)
    return [score for part in scores for score in part]


async def _score(
    server: Server,
    call: ScoringCall,
    ids: TokenIds,
    top: int,
    facts: ServerInfo,
    ticket: Ticket | None,
) -> list[Score]:
    scores: list[Score] = []
    calls = [call]
    while calls:
        call = calls.pop(0)
        native = to_native(call, ids, top, facts.vocabulary, facts.rolls_back)
        payload = await offload.run(6 * len(ids), orjson.dumps, native)
        server.monitor.check_is(facts.model)
        status, body = await server.call("/completion", payload, ticket)
        if status == 200:
            found, rest = await _read_scores(server, call, ids, top, body, facts)
        else:
            error = to_error(status, body, None, facts.model.context)
            if call.kind != "grammar" or status >= 503 or isinstance(error, ContextFull):
                raise error
            # The server answers with an error if the grammar leaves no token.
            found, rest = [], after(call, 0, ids)
        scores += found
        calls = rest + calls
    return scores


async def _read_scores(
    server: Server, call: ScoringCall, ids: TokenIds, top: int, body: bytes, facts: ServerInfo
) -> tuple[list[Score], list[ScoringCall]]:
    try:
        with read_from(ENGINE, "the log-probabilities of a prompt"):
            return await offload.run(
                len(body), read, call, ids, top, body, facts.vocabulary, server.names
            )
    except OtherModel as error:
        raise server.served(error.name) from error


def _tokens(
    ids: TokenIds, vocabulary: Vocabulary, text: bytes | None, scores: Sequence[Score]
) -> Sequence[Token]:
    """Return a prompt's own tokens; the first has no score."""
    tokens = []
    for token, data, score in zip(ids, vocabulary.shown(ids, text), (None, *scores), strict=True):
        spelling, control = vocabulary.token(token)
        found = score or Score(0.0, ())
        logprob = None if score is None else found.logprob
        spelling = spelling if control else data
        tokens.append(Token(token, data, spelling, control, logprob, found.top))
    return tokens
