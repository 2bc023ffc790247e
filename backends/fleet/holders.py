"""The engines that have the beginning of a prompt, in a fleet that is too large to compare all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from .affinity import Blocks
from .place import Place
from .replica import Replica

# The engines that are compared for a call. A pool of no more than these compares all. An engine
# takes about two microseconds, and a call that waits can be looked at for every call that ends.
MOST_COMPARED = 32
# The blocks that are noted at most; each takes about 200 bytes.
MOST_NOTED = 2**19
# The first of the blocks of a prompt that are noted: 256 tokens. Less is quickly evaluated.
_FIRST = 16


class Holders:
    """An index of the engines of a pool by the beginnings of prompts that they have.

    Of a prompt, the last block is noted, and those whose numbers are powers of two. So an engine is
    found for a prompt that continues one of its prompts, and for one of which it has a beginning,
    by at least half of that beginning. How much it has of a prompt is in its own table
    (`Prefixes`), so what it has forgotten does no harm here.

    Args:
        replicas: the engines of the pool.
        most: the largest number of noted blocks; the least recently used are forgotten first.
    """

    def __init__(self, replicas: Sequence[Replica], most: int = MOST_NOTED) -> None:
        self._most = most
        self._start = 0
        self.engines: OrderedDict[int, tuple[Replica, ...]] = OrderedDict()
        self.use(replicas)

    def use(self, replicas: Sequence[Replica]) -> None:
        """Find only these engines from now on."""
        self._members = frozenset(replicas)
        self._count = len(replicas)
        # A window that begins at any engine is a slice.
        self._ring = [*replicas, *replicas]

    def add(self, blocks: Blocks, replica: Replica) -> None:
        """Note that an engine evaluates a prompt of at least one block."""
        engines = self.engines
        number, last = _FIRST, len(blocks)
        while True:
            block = blocks[min(number, last) - 1]
            have = engines.get(block, ())
            if replica not in have and len(have) <= MOST_COMPARED:
                engines[block] = (*have, replica)
            engines.move_to_end(block)
            if number >= last:
                break
            number *= 2
        while len(engines) > self._most:
            engines.popitem(last=False)

    def compared(self, place: Place, home: Replica | None) -> Collection[Replica]:
        """Return the engines that are compared for a call.

        They are the home of its session, those that have more of its prompt than many have, and a
        window of the others with a free place. The window moves with every call.
        """
        engines, found = self.engines, dict[Replica, None]()
        if home is not None:
            found[home] = None
        for block in filter(engines.__contains__, reversed(place.blocks)):
            have = engines[block]
            if len(have) + len(found) > MOST_COMPARED:
                # Engines that have this much are in the window.
                break
            for replica in have:
                found[replica] = None
        members, failed = self._members, place.failed
        if found and not members.issuperset(found):
            found = {one: None for one in found if one in members}
        first = self._start = (self._start + MOST_COMPARED) % self._count
        for start in range(first, first + self._count, MOST_COMPARED):
            free = [
                one
                for one in self._ring[start : start + MOST_COMPARED]
                if one.running < one.room and one.state == "ready" and one not in failed
            ]
            if free:
                found.update(dict.fromkeys(free))
                break
        return found
