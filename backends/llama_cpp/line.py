"""The order in which choices wait for a sequence: requests in turn, whatever each comes to."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from .tasks import TaskChoice


class Line:
    """Choices that wait.

    Each request's choices are numbered, from the number that is being served when its first comes;
    the smallest number is next. So one choice of every request comes before the second of any.
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
        """Let a choice wait for its request's next turn."""
        party = choice.task.party
        party.turn = choice.turn = max(party.turn, self._served) + 1
        insort(self._choices, choice, key=lambda other: other.turn)

    def put_first(self, choice: TaskChoice) -> None:
        """Let a choice go on before all others: it had its turn already."""
        choice.turn = self._choices[0].turn if self._choices else self._served
        self._choices.insert(0, choice)

    def take(self, place: int) -> None:
        """Take the choice at a place out of the line: it is its turn."""
        self._served = max(self._served, self._choices.pop(place).turn)

    def keep(self, wanted: Callable[[TaskChoice], bool]) -> None:
        """Let only some wait on."""
        self._choices = [choice for choice in self._choices if wanted(choice)]

    def clear(self) -> None:
        """Let nobody wait any more."""
        self._choices.clear()
