"""The queue of choices that wait for a sequence; requests take turns, large or small."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from .tasks import TaskChoice


class Line:
    """A queue of choices.

    A choice gets the number after its request's last one, or after the number served last if that
    is larger. The choice with the smallest number is next. So one choice of every request comes
    before the second choice of any.
    """

    def __init__(self) -> None:
        self._choices: list[TaskChoice] = []
        self._served = 0

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[TaskChoice]:
        return iter(self._choices)

    def __getitem__(self, place: int) -> TaskChoice:
        return self._choices[place]

    def add(self, choice: TaskChoice) -> None:
        """Queue a choice for its request's next turn."""
        party = choice.task.party
        party.turn = choice.turn = max(party.turn, self._served) + 1
        insort(self._choices, choice, key=lambda other: other.turn)

    def put_first(self, choice: TaskChoice) -> None:
        """Queue a choice before all others, because it has had its turn already."""
        choice.turn = self._choices[0].turn if self._choices else self._served
        self._choices.insert(0, choice)

    def take(self, place: int) -> None:
        """Remove the choice at a place from the queue and count its turn as served."""
        self._served = max(self._served, self._choices.pop(place).turn)

    def keep(self, wanted: Callable[[TaskChoice], bool]) -> None:
        """Keep only the wanted choices in the queue."""
        self._choices = [choice for choice in self._choices if wanted(choice)]

    def clear(self) -> None:
        """Remove all choices from the queue."""
        self._choices.clear()
