"""Whether an answer that ended without its final event is whole.

koboldcpp closes a stream without that event when everything was sent before it noticed that the
generation had ended. A connection that breaks looks the same, and what it tells of its last
generation may be of another one: so the text must be proven to be all of it.
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
# How often, and how many seconds apart, it is asked whether it is idle. It stops being busy a
# moment after it has closed the stream; a generation that still runs takes longer.
LOOKS, LOOK_SECONDS = 20, 0.05


async def finish_reason(
    server: Server, genkey: str, text: bytes, before: int | None, shows_control: bool
) -> FinishReason:
    """Return why a generation ended whose stream does not say it.

    Args:
        genkey: the call's.
        text: what the call has sent.
        before: how many generations there had been before it, None if that is not known.
        shows_control: whether control tokens are part of the text.

    Raises:
        EngineError: nothing proves that the text is whole.
    """
    perf = await _idle(server)
    reason = STOP_REASONS.get(whole_of(perf["stop_reason"], least=-(2**31)))
    if reason is None:
        raise EngineError(f"{ENGINE} ended its answer without saying why.")
    if server.tells_tokens:
        told = await server.told(genkey)
        proven = told is not None and await _is_of(told, text, reason, server, shows_control)
    else:
        proven = await _is_counted(perf, text, reason, before, server)
    if not proven:
        raise EngineError(f"{ENGINE} ended its answer before it was finished.")
    return reason


async def _idle(server: Server) -> Perf:
    """What the engine tells once nothing is generated any more."""
    for _ in range(LOOKS):
        perf = await server.perf()
        if perf["idle"]:
            return perf
        await asyncio.sleep(LOOK_SECONDS)
    raise EngineError(f"{ENGINE} closed its answer and still generates.")


async def _is_of(
    told: LastLogprobs, text: bytes, reason: FinishReason, server: Server, shows_control: bool
) -> bool:
    """Whether a generation's tokens are the text."""
    tokens, ids = told["tokens"], told["token_ids"]
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
    # Tokens that are parts of characters are empty there, but not in their text.
    return await server.detokenize(tuple(ids)) == text


def joined(tokens: Collection[str], control: Collection[str] = ()) -> bytes:
    """Return the text of tokens, without that of control tokens."""
    return "".join(text_of(token) for token in tokens if token not in control).encode()


async def _is_counted(
    perf: Perf, text: bytes, reason: FinishReason, before: int | None, server: Server
) -> bool:
    """Whether the last generation was this one, and its tokens are as many as the text has."""
    if before is None or whole_of(perf["total_gens"]) != before + 1:
        return False
    counted = len((await server.token_count(text.decode(), False))["ids"])
    return counted == whole_of(perf["last_token_count"]) - (reason == "stop")
