"""Requests to llama-server for the log-probabilities of given tokens; `scoring` plans them."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from .. import offload
from ..base import Batch, Generation, PromptTokens, Text, Token, TokenIds
from ..errors import read_from
from ..streams import together
from ..turns import Party
from . import scoring
from .events import ENGINE, OtherModel
from .facts import Facts
from .server import Server
from .translate import to_error
from .vocabulary import Vocabulary


async def prompt_tokens(
    server: Server, job: Generation, ids: TokenIds, count: int, facts: Facts
) -> Batch:
    """Return the event with the tokens of a job's prompt.

    Args:
        ids: the whole prompt; its last `count` ids are the client's own.
    """
    if not count:
        return ()
    vocabulary, bos_count = facts.vocabulary, len(ids) - count
    own = ids[bos_count:]
    text = job.prompt.content.text.encode() if isinstance(job.prompt.content, Text) else None
    # The first token gets no score (contract 2.6.1), even if a BOS before it would allow one.
    scores = await score(server, ids, bos_count + 1, job.prompt.logprobs or 0, job.party)

    def tokens() -> Sequence[Token]:
        return _tokens(own, vocabulary, text, scores)

    return (PromptTokens(0, await offload.run(6 * len(own), tokens)),)


async def score(
    server: Server, ids: TokenIds, start: int, top: int, party: Party | None = None
) -> list[scoring.Score]:
    """Return the log-probabilities of the tokens from `start` on, each given all earlier ones.

    Args:
        party: the request of the calls; None inside a call that already has a place.
    """
    facts = await server.facts()
    calls = scoring.plan(ids, start, facts.vocabulary, facts.slots)
    scores = await together(_score(server, call, ids, top, facts, party) for call in calls)
    return [score for part in scores for score in part]


async def _score(
    server: Server,
    call: scoring.ScoringCall,
    ids: TokenIds,
    top: int,
    facts: Facts,
    party: Party | None,
) -> list[scoring.Score]:
    scores: list[scoring.Score] = []
    calls = [call]
    while calls:
        call = calls.pop(0)
        native = scoring.to_native(call, ids, top, facts.vocabulary, facts.rolls_back)
        payload = await offload.run(6 * len(ids), orjson.dumps, native)
        server.known.check_is(facts.model)
        status, body = await server.call("/completion", payload, party)
        if status == 200:
            found, rest = await _read_scores(server, call, ids, top, body, facts)
        elif call.kind == "grammar" and status < 503:
            # The server answers with an error if the grammar leaves no token.
            found, rest = [], scoring.after(call, 0, ids)
        else:
            raise to_error(status, body)
        scores += found
        calls = rest + calls
    return scores


async def _read_scores(
    server: Server, call: scoring.ScoringCall, ids: TokenIds, top: int, body: bytes, facts: Facts
) -> tuple[list[scoring.Score], list[scoring.ScoringCall]]:
    try:
        with read_from(ENGINE, "the log-probabilities of a prompt"):
            return await offload.run(
                len(body), scoring.read, call, ids, top, body, facts.vocabulary, server.names
            )
    except OtherModel as error:
        raise server.served(error.name) from error


def _tokens(
    ids: TokenIds, vocabulary: Vocabulary, text: bytes | None, scores: Sequence[scoring.Score]
) -> Sequence[Token]:
    """Return a prompt's own tokens; the first has no score."""
    tokens = []
    for token, data, score in zip(ids, vocabulary.shown(ids, text), (None, *scores), strict=True):
        spelling, control = vocabulary.token(token)
        found = score or scoring.Score(0.0, ())
        logprob = None if score is None else found.logprob
        spelling = spelling if control else data
        tokens.append(Token(token, data, spelling, control, logprob, found.top))
    return tokens
