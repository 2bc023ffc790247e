"""Tests of the in-process engine's queue of choices."""

from __future__ import annotations

import asyncio

from latimer.backends.base import Generation, Prompt
from latimer.backends.llama_cpp.line import ChoiceQueue
from latimer.backends.llama_cpp.tasks import Task, TaskChoice
from latimer.backends.queue import MOST_PASSED, Ticket, Tier


class Box:
    """A mailbox of a task that never runs."""

    loop: asyncio.AbstractEventLoop

    def deliver(self, events: object) -> None:
        """Fail, since no task runs."""
        raise AssertionError(events)


def choices(count: int = 1, tier: Tier = Tier.DEFAULT) -> list[TaskChoice]:
    """Return the choices of one request."""
    task = Task(Generation(Prompt((1,)), 1), (1,), 1, (), 1, {}, {}, Box(), ticket=Ticket.of(tier))  # type: ignore[arg-type]
    return [TaskChoice(task, index) for index in range(count)]


def line_of(*waiting: TaskChoice) -> ChoiceQueue:
    """Return a queue of choices."""
    line = ChoiceQueue()
    for choice in waiting:
        line.add(choice)
    return line


def taken(line: ChoiceQueue) -> list[TaskChoice]:
    """Take every choice and return them in their order."""
    found = []
    for choice in line.in_turn():
        line.take(choice)
        found.append(choice)
    assert not line
    return found


def test_requests_take_turns_inside_a_tier() -> None:
    """One choice of every request comes before the second choice of any."""
    large, small = choices(4), choices(2)
    found = taken(line_of(*large, *small))
    assert found == [large[0], small[0], large[1], small[1], large[2], large[3]]


def test_tiers_go_first() -> None:
    """Every choice of a higher tier comes first, whenever it was queued."""
    flex, default = choices(2, Tier.FLEX), choices(2)
    priority = choices(2, Tier.PRIORITY)
    assert taken(line_of(*flex, *default, *priority)) == [*priority, *default, *flex]


def test_turns_of_other_tiers_do_not_count() -> None:
    """A request of a tier takes turns with a larger one, also after many turns of other tiers."""
    large = choices(5, Tier.FLEX)
    line = line_of(*large)
    for _ in range(MOST_PASSED // 2):
        (one,) = choices(1, Tier.PRIORITY)
        line.add(one)
        line.take(one)
    (late,) = choices(1, Tier.FLEX)
    line.add(late)
    assert taken(line)[:3] == [large[0], late, large[1]]


def test_a_preempted_choice_is_before_all_others() -> None:
    """A preempted choice has had its turn, so it precedes every tier and takes no turn of them."""
    (flex,), (other,), (priority,) = (
        choices(1, tier) for tier in (Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY)
    )
    line = line_of(priority)
    line.put_first(flex)
    line.put_first(other)
    assert [*line] == [other, flex, priority]
    assert taken(line) == [other, flex, priority]


def test_a_tier_has_its_turn_within_the_bound() -> None:
    """A flex choice is taken while choices with priority never end."""
    (flex,), (default,) = choices(1, Tier.FLEX), choices(1)
    line = line_of(flex, default)
    found: list[TaskChoice] = []
    while flex not in found:
        line.add(choices(1, Tier.PRIORITY)[0])
        line.add(choices(1, Tier.PRIORITY)[0])
        choice = next(line.in_turn())
        line.take(choice)
        found.append(choice)
    assert default in found
    assert found.index(flex) <= MOST_PASSED


def test_a_skipped_choice_keeps_its_turn() -> None:
    """Choices behind one that cannot be taken yet follow, and it is the first again afterwards."""
    (first,), (second,), (flex,) = choices(), choices(), choices(1, Tier.FLEX)
    line = line_of(first, second, flex)
    seen = []
    for choice in line.in_turn():
        seen.append(choice)
        if choice is second:
            line.take(choice)
    assert seen == [first, second, flex]
    assert [*line.in_turn()] == [first, flex]


def test_unwanted_choices_leave() -> None:
    """Cancelled choices leave every part of the queue."""
    (one,), (other,), (flex,) = choices(), choices(), choices(1, Tier.FLEX)
    line = line_of(one, flex)
    line.put_first(other)
    line.keep(lambda choice: choice is one)
    assert [*line] == [one]
    line.clear()
    assert not line
