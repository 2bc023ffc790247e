"""Faults as data: edits of JSON at a path, and the server's hooks that make them.

A path names keys and, with `*`, all elements: `choices.*.message.tool_calls.*[type=custom].id`.
`[key]` restricts it to objects with a value of that key, `[key=word]` to those with that word.
What a path does not find stays as it is. No edit but `keep` changes the value that it gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from suite.rules import Refused
from suite.server import Fault

Edit: TypeAlias = Callable[[Any], Any]
When: TypeAlias = Callable[[Any], Any]
Steps: TypeAlias = Sequence[tuple[str, Sequence[tuple[str, str]]]]
_STEP = re.compile(r"([\w-]+|\*)((?:\[[^\]]*\])*)")
_FILTER = re.compile(r"\[(\w+)=?([^\]]*)\]")
_GONE = object()

# Edits.


def put(path: str, value: Any) -> Edit:
    """Return an edit that sets a key, which need not be there."""
    *parents, (key, _) = _steps(path)

    def change(parent: Any) -> Any:
        return {**parent, key: value} if isinstance(parent, dict) else parent

    return lambda given: _edited(given, parents, change)


def keep(path: str, value: Any) -> Edit:
    """Return an edit that sets a key in the object itself, and thus in what the server stores."""
    *parents, (key, _) = _steps(path)

    def change(given: Any) -> Any:
        _edited(given, parents, lambda parent: parent.update({key: value}))
        return given

    return change


def turn(path: str, change: Edit) -> Edit:
    """Return an edit that replaces each value at a path by a function of it."""
    return lambda given: _edited(given, _steps(path), change)


def drop(path: str) -> Edit:
    """Return an edit that removes keys or elements."""
    return turn(path, lambda value: _GONE)


def swap(path: str, value: Any, other: Any) -> Edit:
    """Return an edit that replaces one value by another."""
    return turn(path, lambda found: other if found == value else found)


def values(path: str, given: Any) -> list[Any]:
    """Return the values at a path."""
    found: list[Any] = []
    _edited(given, _steps(path), lambda value: found.append(value) or value)  # type: ignore[func-returns-value]
    return found


@cache
def _steps(path: str) -> Steps:
    return [(key, _FILTER.findall(filters)) for key, filters in _STEP.findall(path)]


def _edited(value: Any, steps: Steps, change: Edit) -> Any:
    if not steps:
        return change(value)
    (key, filters), *rest = steps

    def edit(name: str, one: Any) -> Any:
        chosen = key in ("*", name) and all(_passes(one, *wanted) for wanted in filters)
        return _edited(one, rest, change) if chosen else one

    if isinstance(value, list) and key == "*":
        return [new for one in value if (new := edit("*", one)) is not _GONE]
    if isinstance(value, dict) and (key == "*" or key in value):
        return {name: new for name, one in value.items() if (new := edit(name, one)) is not _GONE}
    return value


def _passes(value: Any, key: str, word: str) -> bool:
    return isinstance(value, dict) and bool(value.get(key)) and word in ("", value[key])


# Conditions: of a request, or of an error (see `error`).


def has(path: str, wanted: Any = ...) -> When:
    """Return a condition that a value at a path is there, and is as wanted.

    Args:
        wanted: a value, a type, or a test.
    """
    test: When = lambda value: wanted is ... or value == wanted  # noqa: E731
    if isinstance(wanted, type):
        test = lambda value: isinstance(value, wanted)  # noqa: E731
    elif callable(wanted):
        test = wanted
    return lambda given: any(test(value) for value in values(path, given))


def given(*names: str) -> When:
    """Return a condition that fields are given, and not empty."""
    return lambda body: all(body.get(name) for name in names)


def lacks(*names: str) -> When:
    """Return a condition that fields are omitted or empty."""
    return lambda body: not any(body.get(name) for name in names)


def omits(name: str) -> When:
    """Return a condition that a field is omitted."""
    return lambda body: name not in body


def saying(*words: str) -> When:
    """Return a test for values that contain one of the words."""
    return lambda value: any(word in str(value) for word in words)


def longer(low: int, high: float = float("inf")) -> When:
    """Return a test for lists with more than `low` and less than `high` elements."""
    return lambda value: isinstance(value, list | dict) and low < len(value) < high


def says(*words: str) -> When:
    """Return a condition that the message of an error contains one of the words."""
    return has("error.message", saying(*words))


# Faults, each with one hook.


def _always(value: Any) -> bool:
    return True


def _hook(edits: Sequence[Edit], at: str | None, when: When) -> Callable[..., Any]:
    def hook(path: str, value: Any, *sent: Any) -> Any:
        if at in (None, path) and when(*sent or (value,)):
            return all_edits(edits, value)
        return value

    return hook


def all_edits(edits: Sequence[Edit], value: Any) -> Any:
    """Return a value after several edits."""
    for edit in edits:
        value = edit(value)
    return value


def request(*edits: Edit, at: str | None = None, when: When = _always) -> Fault:
    """Return a fault that changes requests before their validation."""
    return Fault(request=_hook(edits, at, when))


def valid(*edits: Edit, at: str | None = None, when: When = _always) -> Fault:
    """Return a fault that changes valid requests."""
    return Fault(valid=_hook(edits, at, when))


def ignores(*names: str, at: str | None = None) -> Fault:
    """Return a fault that ignores fields."""
    return valid(*map(drop, names), at=at)


def takes(when: When, at: str, **instead: Any) -> Fault:
    """Return a fault that replaces fields the contract rejects with valid ones."""
    return request(*(put(name, value) for name, value in instead.items()), at=at, when=when)


def refuses(when: When, at: str | None = None, status: int = 500) -> Fault:
    """Return a fault that rejects requests the contract allows."""

    def refuse(body: Any) -> Any:
        raise Refused("Not taken.", status=status)

    return request(refuse, at=at, when=when)


def reply(*edits: Edit, at: str | None = None, when: When = _always) -> Fault:
    """Return a fault that changes plain replies."""
    return Fault(reply=_hook(edits, at, when))


def chunks(*edits: Edit, at: str | None = None, when: When = _always) -> Fault:
    """Return a fault that changes the list of a stream's chunks."""
    return Fault(chunks=_hook(edits, at, when))


def both(*edits: Edit) -> Fault:
    """Return a fault that changes plain replies and each chunk of a stream."""
    each = [turn("*", edit) for edit in edits]
    return Fault(reply=_hook(edits, None, _always), chunks=_hook(each, None, _always))


def events(*edits: Edit) -> Fault:
    """Return a fault that changes the list of a streamed response's events."""
    return Fault(events=lambda found: all_edits(edits, found))


def query(*edits: Edit) -> Fault:
    """Return a fault that changes queries."""
    return Fault(query=lambda found: all_edits(edits, found))


def error(*edits: Edit, status: int | None = None, when: When = _always) -> Fault:
    """Return a fault that changes the status or the body of rejections.

    Args:
        when: a condition of an object with the `error`, its `status`, and the request as `sent`.
    """

    def hook(found: int, error: Any, sent: Mapping[str, Any]) -> tuple[int, Any]:
        if not when({"status": found, "error": error, "sent": sent}):
            return found, {"error": error}
        return status or found, all_edits(edits, {"error": error})

    return Fault(error=hook)


def headers(*edits: Edit, when: When = _always) -> Fault:
    """Return a fault that changes headers.

    Args:
        when: a condition of an object with the headers and the `status`.
    """
    return Fault(headers=lambda status, found: (
        all_edits(edits, found) if when({**found, "status": status}) else found))  # fmt: skip


def rejects(when: Callable[[str, str, dict[str, str]], bool], status: int = 500) -> Fault:
    """Return a fault that rejects requests for their method, path or headers."""

    def hook(method: str, path: str, headers: dict[str, str]) -> None:
        if when(method, path, headers):
            raise Refused("Not taken.", status=status)

    return Fault(head=hook)
