"""The whole characters at the end of a call, by koboldcpp's tokenizer.

koboldcpp drops bytes that are no whole character from all of its texts. So a call can end inside a
character, and its text does not show it.
"""

from __future__ import annotations

from ..base import TokenIds
from ..errors import EngineError
from .server import Server
from .translate import ENGINE

# Unassigned characters, whose four bytes are four tokens in all usual vocabularies. The second
# byte is from 0xa0 and the third one below 0x90: after each beginning of a character, one of the
# two can follow.
RARE = ("\U000651d5", "\U000722ea", "\U000a9371")
# A character has at most four bytes.
MOST_BYTES = 4


async def whole(server: Server, ids: TokenIds) -> int:
    """Return how many of the first tokens end with a whole character.

    Raises:
        EngineError: the vocabulary has no tokens of single bytes.
    """
    high, low = await _continuations(server)
    for count in range(len(ids), 0, -1):
        tail = ids[max(count - MOST_BYTES, 0) : count]
        text = await server.detokenize(tail)
        # Bytes that continue no character are dropped.
        longer = [await server.detokenize((*tail, *[byte] * MOST_BYTES)) for byte in (high, low)]
        if longer == [text, text]:
            return count
    return 0


async def _continuations(server: Server) -> tuple[int, int]:
    """Return two tokens, each a byte inside characters."""
    for character in RARE:
        ids = tuple((await server.token_count(character, False))["ids"])[-MOST_BYTES:]
        if len(ids) == MOST_BYTES and await server.detokenize(ids) == character.encode():
            return ids[1], ids[2]
    raise EngineError(
        f"{ENGINE} needs a second call for an answer with a grammar, and its vocabulary does not "
        "show where characters end. Send a smaller 'max_tokens'."
    )
