"""The queue of choices that wait for a sequence; requests take turns, large or small.

Here the scheduler decides in its own thread which choice fits into the KV cache, so the places of
`AdmissionQueue`, which the event loop gives away, would leave sequences idle between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from typing_extensions import override

from ..queue import FairQueue
from .tasks import Run, TaskChoice


class ChoiceQueue(FairQueue[TaskChoice]):
    """A queue of choices; preempted ones are before all others, because they had their turn."""

    def __init__(self) -> None:
        super().__init__()
        self._preempted: list[TaskChoice] = []

    @override
    def __bool__(self) -> bool:
        return bool(self.requests or self._preempted)

    @override
    def __len__(self) -> int:
        return len(self._preempted) + super().__len__()

    @override
    def __iter__(self) -> Iterator[TaskChoice]:
        return chain(self._preempted, super().__iter__())

    @property
    def preempted(self) -> list[Run]:
        """The runs of preempted choices, which keep their samplers."""
        return [one.preempted for one in self._preempted if one.preempted is not None]

    def put_first(self, choice: TaskChoice) -> None:
        """Queue a preempted choice."""
        self._preempted.insert(0, choice)

    @override
    def in_turn(self) -> Iterator[TaskChoice]:
        yield from (*self._preempted,)
        yield from super().in_turn()

    @override
    def take(self, call: TaskChoice) -> None:
        if call in self._preempted:
            self._preempted.remove(call)
        else:
            super().take(call)

    def keep(self, wanted: Callable[[TaskChoice], bool]) -> None:
        """Keep only the wanted choices in the queue."""
        self._preempted = [*filter(wanted, self._preempted)]
        for choice in [*super().__iter__()]:
            if not wanted(choice):
                self.remove(choice)

    @override
    def clear(self) -> None:
        super().clear()
        self._preempted.clear()
