"""Proof that an answer without a final event is complete.

koboldcpp omits that event if it sends all text before it notices the end of the generation. A
broken connection looks the same, and the facts about the last generation may be about another one.
So the text has to be proven complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal

from ...schemas.native.koboldcpp import LastLogprobs, Perf
from ..errors import EngineError, text_of, whole_of
from .server import Server
from .translate import ENGINE

FinishReason = Literal["stop", "length"]

STOP_REASONS: dict[int, FinishReason] = {0: "length", 1: "stop", 2: "length"}
# The number of idle checks, and the seconds between them. koboldcpp becomes idle a moment after it
# has closed the stream; a generation that still runs takes longer.
LOOKS, LOOK_SECONDS = 20, 0.05


async def finish_reason(
    server: Server, genkey: str, text: bytes, before: int | None, shows_control: bool
) -> FinishReason:
    """Return the finish reason of a generation whose stream does not have one.

    Args:
        genkey: the key of the call.
        text: the text that the call has sent.
        before: the number of generations before the call, or None if unknown.
        shows_control: True if control tokens are part of the text.

    Raises:
        EngineError: nothing proves that the text is complete.
    """
    perf = await _idle(server)
    reason = STOP_REASONS.get(whole_of(perf["stop_reason"], least=-(2**31)))
    if reason is None:
        raise EngineError(f"{ENGINE} ended its response without a finish reason.")
    if server.reports_tokens:
        last = await server.last_logprobs(genkey)
        proven = last is not None and await _is_of(last, text, reason, server, shows_control)
    else:
        proven = await _is_counted(perf, text, reason, before, server)
    if not proven:
        raise EngineError(f"{ENGINE} ended its response before it was finished.")
    return reason


async def _idle(server: Server) -> Perf:
    """Wait until the engine is idle, and return its facts about the last generation."""
    for _ in range(LOOKS):
        perf = await server.perf()
        if perf["idle"]:
            return perf
        await asyncio.sleep(LOOK_SECONDS)
    raise EngineError(f"{ENGINE} closed its response but is still generating.")


async def _is_of(
    last: LastLogprobs, text: bytes, reason: FinishReason, server: Server, shows_control: bool
) -> bool:
    """Return True if the tokens of a generation make up the text."""
    tokens, ids = last["tokens"], last["token_ids"]
    if not tokens or len(tokens) != len(ids):
        return False
    if reason == "stop":
        tokens, ids = tokens[:-1], ids[:-1]
    if joined(tokens) == text:
        return True
    if not shows_control:
        control = {special.spelling for special in await server.specials()}
        if joined(tokens, control) == text:
            return True
    # Tokens inside a character are empty in the list, but detokenizing all ids restores them.
    return await server.detokenize(tuple(ids)) == text


def joined(tokens: Collection[str], control: Collection[str] = ()) -> bytes:
    """Return the text of tokens, without that of control tokens."""
    return "".join(text_of(token) for token in tokens if token not in control).encode()


async def _is_counted(
    perf: Perf, text: bytes, reason: FinishReason, before: int | None, server: Server
) -> bool:
    """Return True if the last generation was this one and has as many tokens as the text."""
    if before is None or whole_of(perf["total_gens"]) != before + 1:
        return False
    counted = len((await server.token_count(text.decode(), False))["ids"])
    return counted == whole_of(perf["last_token_count"]) - (reason == "stop")
