"""The decision which engines of a machine are loaded, without I/O.

Requests of the models that are loaded are served first, so that alternating clients do not swap
models with each request. A request for another model waits for at most `most_wait` until the
engines in its way accept no more requests. An engine that was used a moment ago is kept for as long
as loading the other one takes: often its client sends the next request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .config import MOST_WAIT

# Seconds that a load is expected to take before the first one.
FIRST_LOAD = 2.0
# Begins the names of places, which are no names of memories.
_PLACE = "the place of "


class View(NamedTuple):
    """The facts about a member that `plan` needs.

    Args:
        key: identifies it; a changed engine and its successor have the same name.
        is_loaded: True if it takes memory: it is loaded, or it is being loaded or unloaded.
        is_settled: True if it is neither being loaded nor unloaded.
        is_pinned: as in `EngineLoader`.
        running: the number of requests that use it.
        waited: seconds that its first waiting request has waited; None without one.
        unused: seconds since its last request ended.
        ready_for: seconds since it was loaded.
        idle: as in `EngineLoader`.
        need: its bytes by memory; None if they are unknown.
        load_seconds: the seconds that it takes to load.
        name: its name in messages; by default the key.
        is_missing: True if it has failed, and requests wait that another engine may run, too.
        place: as in `EngineLoader`.
    """

    key: str
    is_loaded: bool = False
    is_settled: bool = True
    is_pinned: bool = False
    running: int = 0
    waited: float | None = None
    unused: float = 0.0
    ready_for: float = 0.0
    idle: float | None = None
    need: Mapping[str, int] | None = None
    load_seconds: float = FIRST_LOAD
    name: str = ""
    is_missing: bool = False
    place: str = ""

    @property
    def is_free(self) -> bool:
        """True if it is loaded, and no request uses it or waits for it."""
        return self.is_loaded and self.is_settled and not self.running and self.waited is None


@dataclass(slots=True)
class Plan:
    """The members to load, to unload and to close now.

    Args:
        load, unload: the keys of the members to load and to unload.
        replaced: by the keys of members to load, those of the members that their load unloads.
        closed: the members that accept no more requests, because others have waited too long.
        room_for: the name of the member that each one of `closed` is unloaded for.
        never: the members that cannot be loaded, with the reason.
        again: seconds until the plan may change by itself; None if it does not.
    """

    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    room_for: dict[str, str] = field(default_factory=dict)
    never: dict[str, str] = field(default_factory=dict)
    again: float | None = None

    def wake(self, seconds: float) -> None:
        """Plan again after some seconds."""
        self.again = seconds if self.again is None else min(self.again, seconds)


def plan(
    views: Sequence[View], memory: Mapping[str, int] | None, most_wait: float = MOST_WAIT
) -> Plan:
    """Decide which members to load and unload.

    Args:
        memory: the bytes of the machine's memories; None if they are not limited.
    """
    made = Plan()
    needs = _needs(views, memory)
    # Each place is like a memory of one byte, of which a member takes all.
    room = {**(memory or {}), **{_PLACE + view.place: 1 for view in views if view.place}}
    pinned = [view for view in views if view.is_loaded and view.is_pinned]
    # What is loaded, and what waits for room: a later one must not take it.
    taken = _sum([needs[view.key] for view in views if view.is_loaded])
    victims: list[View] = []
    # What one of unknown size takes is known when it has loaded.
    fixed = [one for one in pinned if one.need is not None or one.is_settled]
    names = ", ".join(f"'{one.name or one.key}'" for one in fixed)
    for view in views:
        if not view.is_loaded:
            reason = _never(needs[view.key], [needs[one.key] for one in fixed], room)
            if reason:
                made.never[view.key] = reason.format(pinned=names)
    possible = [view for view in views if not view.is_loaded and view.key not in made.never]
    wanted = [view for view in possible if view.waited is not None]
    for view in sorted(wanted, key=_waited, reverse=True):
        need = needs[view.key]
        free = [one for one in views if one.is_loaded and one not in pinned + victims]
        chosen = _victims(need, free, needs, taken, room)
        for victim in chosen:
            taken = _sum([taken, _negative(needs[victim.key])])
            _evict(view, victim, most_wait, made)
        taken = _sum([taken, need])
        victims += chosen
        if not _fits([taken], room):
            continue
        if not victims:
            made.load.append(view.key)
        elif victims == chosen[:1] and _replaces(view, chosen[0], made):
            made.load.append(view.key)
            made.replaced[view.key] = made.unload.pop()
    for view in views:
        # It takes the place of no other one, which would fail the requests of a model in turn.
        if view.is_missing and view.waited is None and not (view.is_loaded or victims):
            taken = _sum([taken, needs[view.key]])
            if _fits([taken], room):
                made.load.append(view.key)
    for view in views:
        if view.is_free and view.idle is not None and view not in pinned + victims:
            if view.unused >= view.idle:
                made.unload.append(view.key)
            else:
                made.wake(view.idle - view.unused)
    return made


def _evict(view: View, victim: View, most_wait: float, made: Plan) -> None:
    """Unload a member for another one, or close it, or wait."""
    if not victim.is_settled:
        return
    # It serves for at least as long as its load took.
    rest = max(most_wait - _waited(view), victim.load_seconds - victim.ready_for)
    if victim.is_free:
        rest = min(rest, view.load_seconds - victim.unused)
    if rest > 0:
        made.wake(rest)
        return
    made.closed.add(victim.key)
    made.room_for[victim.key] = view.name or view.key
    if not victim.running:
        made.unload.append(victim.key)


def _replaces(view: View, victim: View, made: Plan) -> bool:
    """Return True if the load of a member unloads the only victim, which can be unloaded now."""
    return view.place != "" and view.place == victim.place and made.unload == [victim.key]


def _victims(
    need: Mapping[str, int],
    free: Sequence[View],
    needs: Mapping[str, Mapping[str, int]],
    taken: Mapping[str, int],
    room: Mapping[str, int],
) -> list[View]:
    """Return the members to unload for another one: unused ones first, then the least recent."""
    chosen: list[View] = []

    def fits(without: Sequence[View]) -> bool:
        return _fits([taken, need, *(_negative(needs[one.key]) for one in without)], room)

    for one in sorted(free, key=lambda one: (not one.is_free, one.running > 0, -one.unused)):
        if fits(chosen):
            break
        chosen.append(one)
    # A small one that was chosen first may not be in the way any more.
    for one in [*chosen]:
        rest = [each for each in chosen if each is not one]
        if fits(rest):
            chosen = rest
    return chosen


def _never(
    need: Mapping[str, int], pinned: Sequence[Mapping[str, int]], room: Mapping[str, int]
) -> str:
    """Return why a member can never be loaded; an empty text if it can."""
    for name, size in need.items():
        if size > room.get(name, 0):
            most = _gib(room.get(name, 0))
            return f"it needs {_gib(size)} of the memory '{name}', which has {most}"
    if not _fits([need, *pinned], room):
        return "the memory that it needs is taken by pinned engines: {pinned}"
    return ""


def _needs(
    views: Sequence[View], memory: Mapping[str, int] | None
) -> Mapping[str, Mapping[str, int]]:
    """Return what each member takes: of limited memory, where unknown all that pinned ones leave,
    and its place.
    """
    kept = _sum([view.need or {} for view in views if view.is_loaded and view.is_pinned])
    rest = {name: max(size - kept.get(name, 0), 0) for name, size in (memory or {}).items()}
    return {
        view.key: {
            **((rest if view.need is None else view.need) if memory is not None else {}),
            **({_PLACE + view.place: 1} if view.place else {}),
        }
        for view in views
    }


def _fits(sizes: Iterable[Mapping[str, int]], room: Mapping[str, int]) -> bool:
    return all(size <= room.get(name, 0) for name, size in _sum(sizes).items())


def _sum(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for size in sizes:
        for name, value in size.items():
            total[name] = total.get(name, 0) + value
    return total


def _negative(size: Mapping[str, int]) -> Mapping[str, int]:
    return {name: -value for name, value in size.items()}


def _waited(view: View) -> float:
    return view.waited or 0.0


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
