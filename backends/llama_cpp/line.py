"""The queue of choices that wait for a sequence; requests take turns, large or small."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter

from ..queue import FairOrder, Tier
from .tasks import Run, TaskChoice

_TURN = attrgetter("turn")


class ChoiceQueue:
    """A queue of choices; those of a higher tier go first (`FairOrder`).

    A choice gets the number after its request's last one, or after the number that its tier served
    last if that is larger. The choice with the smallest number is the next of its tier. So one
    choice of every request of a tier comes before the second choice of any.
    """

    def __init__(self) -> None:
        # Preempted choices, which have had their turn already.
        self._preempted: list[TaskChoice] = []
        # The other choices of each tier by their numbers; only tiers with choices.
        self._waiting: dict[Tier, list[TaskChoice]] = {}
        self._served = dict.fromkeys(Tier, 0)
        self._order = FairOrder()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._preempted)

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[TaskChoice]:
        return chain(self._preempted, *self._waiting.values())

    @property
    def preempted(self) -> list[Run]:
        """The runs of preempted choices, which keep their samplers."""
        return [choice.begun for choice in self._preempted if choice.begun is not None]

    def add(self, choice: TaskChoice) -> None:
        """Queue a choice for its request's next turn."""
        party = choice.task.party
        party.turn = choice.turn = max(party.turn, self._served[party.tier]) + 1
        insort(self._waiting.setdefault(party.tier, []), choice, key=_TURN)

    def put_first(self, choice: TaskChoice) -> None:
        """Queue a choice before all others, because it has had its turn already."""
        self._preempted.insert(0, choice)

    def in_turn(self) -> Iterator[TaskChoice]:
        """Yield the choices in the order of their turns.

        The caller may take each choice before it asks for the next. A choice that it does not take
        keeps its turn, and those behind it follow.
        """
        yield from (*self._preempted,)
        skipped = dict.fromkeys(Tier, 0)
        while left := [tier for tier, its in self._waiting.items() if skipped[tier] < len(its)]:
            tier = self._order.next(left)
            choices = self._waiting[tier]
            before = len(choices)
            yield choices[skipped[tier]]
            if len(choices) == before:
                skipped[tier] += 1

    def take(self, choice: TaskChoice) -> None:
        """Remove a choice from the queue and count its turn as served."""
        if choice in self._preempted:
            self._preempted.remove(choice)
            return
        tier = choice.task.party.tier
        choices = self._waiting[tier]
        choices.remove(choice)
        if not choices:
            del self._waiting[tier]
        self._served[tier] = max(self._served[tier], choice.turn)
        self._order.count(tier, self._waiting)

    def keep(self, wanted: Callable[[TaskChoice], bool]) -> None:
        """Keep only the wanted choices in the queue."""
        self._preempted = [*filter(wanted, self._preempted)]
        kept = {tier: [*filter(wanted, choices)] for tier, choices in self._waiting.items()}
        self._waiting = {tier: choices for tier, choices in kept.items() if choices}

    def clear(self) -> None:
        """Remove all choices from the queue."""
        self.keep(lambda _choice: False)
