"""Chained hashes of the blocks of prompts, and a table of them for each engine.

A prompt is cut into blocks of 64 bytes: of its text, or of 16 token ids. The hash of a block covers
all blocks before it, so that equal hashes mean equal prefixes. Python's hash of bytes has a random
secret, so that no client can choose prompts whose hashes are equal.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..base import Content, Text

# The bytes and the tokens of a block; on average four bytes of text are a token.
BLOCK, TOKENS = 64, 16
# The blocks of a prompt that are hashed, which takes about a millisecond: 65,536 tokens.
MOST_BLOCKS = 4_096
# The blocks that a table has at most; each takes about 150 bytes.
MOST_KNOWN = 65_536
Blocks = Sequence[int]


def blocks_of(content: Content, salt: object) -> list[int]:
    """Return the chained hashes of the whole blocks of a prompt.

    Args:
        salt: the owner of the prompt; those of different owners have no hash in common.
    """
    if isinstance(content, Text):
        data = content.text[: MOST_BLOCKS * BLOCK].encode("utf-8", "surrogatepass")
    else:
        data = array("q", content[: MOST_BLOCKS * TOKENS]).tobytes()
    size = BLOCK if isinstance(content, Text) else TOKENS * 8
    last = hash(salt)
    found = []
    for start in range(0, min(len(data), MOST_BLOCKS * size) - size + 1, size):
        last = hash((last, data[start : start + size]))
        found.append(last)
    return found


class Prefixes:
    """The prefixes that an engine probably has in its prompt cache.

    Args:
        most: the largest number of blocks; the least recently used are forgotten first.

    Attributes:
        used: the blocks in the order of their use; True for the last block of a prompt that no
            other prompt has continued yet. A block is used after those that follow it, so that the
            beginning of a prompt is never forgotten before its end.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self.used: OrderedDict[int, bool] = OrderedDict()

    def resize(self, most: int) -> None:
        """Set the largest number of blocks."""
        self._most = min(max(most, 1), MOST_KNOWN)
        while len(self.used) > self._most:
            self.used.popitem(last=False)

    def add(self, blocks: Blocks) -> None:
        """Note that the engine evaluates a prompt."""
        used, is_last = self.used, True
        for block in reversed(blocks):
            # A prompt may end where the common beginning of others does.
            used[block] = is_last and used.get(block, True)
            used.move_to_end(block)
            is_last = False
        while len(used) > self._most:
            used.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, since the engine has started again."""
        self.used.clear()


def matches(tables: Iterable[Prefixes], blocks: Blocks) -> list[int]:
    """Return the number of leading blocks of a prompt that each engine has."""
    found = []
    for table in tables:
        used = table.used
        low, high = 0, len(blocks)
        # All blocks before a known one are known.
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in used:
                low = middle + 1
            else:
                high = middle
        found.append(low)
    return found
