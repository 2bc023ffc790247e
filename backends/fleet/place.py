"""A call that waits for a place on an engine, and what makes two engines different models."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import TypeAlias

from ..base import Embedding, Finish, Generation, Ranking, Text
from ..queue import Ticket
from .affinity import Blocks, blocks_of
from .config import Affinity
from .replica import Replica

# What evaluating a prompt costs that another engine has, as a multiple of the time that it takes.
# With less, `benchmarks/fleet.py` evaluates more, and answers no sooner.
COPY = 4.0
# The sessions that a pool knows at most, or for each engine if that is more.
MOST_SESSIONS, SESSIONS_AN_ENGINE = 10_000, 50

Job: TypeAlias = Generation | Embedding | Ranking


class Place:
    """A call that waits for a place, or has one.

    Args:
        job: what it runs; None for a place without a job.
        name: the name of its model.
        affinity: how its engine is chosen.

    Attributes:
        ticket: its request.
        width: the places that it takes: one for each choice.
        tokens: the approximate number of tokens in its prompt.
        blocks: the hashes of its prompt.
        session: the key and the name of its session; None if it has none.
        fingerprint: the pool's model for which it was made; empty if any will do.
        failed: the engines that have failed it.
        is_reloaded: True if an engine on demand has ended with it, and is loaded for it again.
        replica: the engine that it runs on.
        taken: the places that it has taken there.
        matched: the blocks of its prompt that the engine had.
        charged: the cost that its key was charged.
        until: the time until which it waits for a busy engine that has its prompt, or 0.
        awaited: that engine.
        since: the time at which it began to wait.
        future: done when it has a place, if it had to wait.
        begun, first: the times at which its engine got it, and sent its first event.
        finishes: the ends of its choices.
    """

    failed: Set[Replica] = frozenset()
    is_reloaded = False
    replica: Replica | None = None
    awaited: Replica | None = None
    session: tuple[str, str] | None = None
    blocks: Blocks = ()
    width = 1
    tokens = taken = matched = 0
    charged = until = since = begun = first = 0.0
    finishes: Sequence[Finish] = ()
    fingerprint = ""
    future: asyncio.Future[Replica] | None = None

    def __init__(self, job: Job | None, name: str, affinity: Affinity) -> None:
        self.ticket = ticket = (job and job.ticket) or Ticket()
        if job is None:
            return
        self.fingerprint = job.fingerprint
        if affinity != "none" and ticket.session:
            self.session = ticket.key, ticket.session
        if isinstance(job, Generation):
            content = job.prompt.content
            self.width = len(job.seeds)
            self.tokens = len(content.text) // 4 if isinstance(content, Text) else len(content)
            if affinity == "prefix":
                self.blocks = blocks_of(content, (name, job.owner))


class Sessions:
    """The engines that run sessions.

    Attributes:
        homes: the engine of each session, by its key and its name; the last one used at the end.
        most: the largest number of sessions; the least recently used are forgotten first.
    """

    def __init__(self) -> None:
        self.homes: OrderedDict[tuple[str, str], Replica] = OrderedDict()
        self.most = MOST_SESSIONS

    def resize(self, engines: int) -> None:
        """Know as many sessions as this number of engines needs."""
        self.most = max(MOST_SESSIONS, SESSIONS_AN_ENGINE * engines)

    def move(self, session: tuple[str, str], replica: Replica) -> None:
        """Note that an engine runs a request of a session."""
        before = self.homes.pop(session, None)
        if before is not None:
            before.sessions -= 1
        self.homes[session] = replica
        replica.sessions += 1
        if len(self.homes) > self.most:
            _, oldest = self.homes.popitem(last=False)
            oldest.sessions -= 1

    def forget(self, replica: Replica) -> None:
        """Forget the sessions of an engine, which has started again or runs no more."""
        for session in [one for one, home in self.homes.items() if home is replica]:
            del self.homes[session]
            replica.sessions -= 1


def worth_waiting(
    place: Place,
    busy: Iterable[tuple[Replica, int]],
    matched: int,
    best: Replica,
    waiting: Iterable[Place],
) -> tuple[float, Replica | None]:
    """Return the seconds for which a call waits for a busy engine that has its prompt, and that.

    An engine that evaluates a prompt delays the other calls that it runs by the same time, and the
    copy takes the place of other prompts in its cache.

    Args:
        busy: the busy engines, each with the blocks of the prompt that it has.
        matched: the blocks that the best engine with a free place has.
        best: that engine.
        waiting: the calls that wait for a busy engine already.
    """
    most, awaited, longest = 0.0, None, 0.0
    # A session without blocks has all of its prompt.
    seconds = place.tokens / max(len(place.blocks), 1) * best.speed.slope
    for replica, has in busy:
        if has > matched:
            gain = COPY * (has - matched) * seconds * replica.trust * (1 + best.running)
            before = sum(place.awaited is replica for place in waiting)
            wait = replica.call_seconds * (1 + before) / replica.places
            if gain > max(wait, most):
                # Calls of usual length end before that.
                most, awaited = gain, replica
                longest = max(gain, replica.call_seconds * (1 + before))
    return longest, awaited
