"""Chained hashes of the blocks of prompts, and a table of them for each engine.

A prompt is cut into blocks of 64 bytes: of its text, or of 16 token ids. The hash of a block covers
all blocks before it, so that equal hashes mean equal prefixes. Python's hash of bytes has a random
secret, so that no client can choose prompts whose hashes are equal.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from ..base import Content, Text

# The bytes and the tokens of a block; on average four bytes of text are a token.
BLOCK, TOKENS = 64, 16
# The blocks of a prompt that are hashed, which takes about a millisecond: 65,536 tokens.
MOST_BLOCKS = 4_096
# The blocks that a table has at most; each takes about 150 bytes.
MOST_KNOWN = 65_536
# The sessions that a table has at most.
MOST_SESSIONS = 10_000

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
    """The prefixes that an engine probably has in its prompt cache, and the sessions that it has.

    Args:
        most: the largest number of blocks; the least recently used are forgotten first.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        # The number of the last use of each block. A block is used after those that follow it, so
        # that the beginning of a prompt is never forgotten before its end.
        self._used: OrderedDict[int, int] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._uses = 0

    def __len__(self) -> int:
        return len(self._used) + len(self._sessions)

    def resize(self, most: int) -> None:
        """Set the largest number of blocks."""
        self._most = min(max(most, 1), MOST_KNOWN)
        self._shrink()

    def match(self, blocks: Blocks) -> int:
        """Return the number of leading blocks that the engine has."""
        used = self._used
        low, high = 0, len(blocks)
        # All blocks before a known one are known.
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in used:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, blocks: Blocks) -> int:
        """Note that the engine evaluates a prompt; return the number of this use."""
        self._uses += 1
        used, number = self._used, self._uses
        for block in reversed(blocks):
            used[block] = number
            used.move_to_end(block)
        self._shrink()
        return number

    def last_use(self, blocks: Blocks, matched: int) -> int:
        """Return the number of the last use of the last block that matched; 0 if none did."""
        return self._used.get(blocks[matched - 1], 0) if matched and blocks else 0

    def forget_before(self, number: int) -> None:
        """Forget what was not used since a use; the engine has forgotten what it had then."""
        used = self._used
        while used and next(iter(used.values())) <= number:
            used.popitem(last=False)

    def has_session(self, session: tuple[str, str]) -> bool:
        """Return True if the engine ran the last request of a session."""
        return session in self._sessions

    def add_session(self, session: tuple[str, str]) -> None:
        """Note that the engine runs a request of a session."""
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def drop_session(self, session: tuple[str, str]) -> None:
        """Note that another engine runs the session from now on."""
        self._sessions.pop(session, None)

    def clear(self) -> None:
        """Forget everything, since the engine has started again."""
        self._used.clear()
        self._sessions.clear()

    def _shrink(self) -> None:
        while len(self._used) > self._most:
            self._used.popitem(last=False)
