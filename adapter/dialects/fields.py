"""A field of another server's API, and the request that results from such fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from ...schemas.openai.common import whole
from ..errors import RESPONSE_NAMES, unsupported, wrong_type, wrong_value

Verdict: TypeAlias = Literal["mapped", "refused", "ignored"]
Where: TypeAlias = Literal["chat", "completions", "responses"]
Apply: TypeAlias = "Callable[[Draft, Any], None]"
Needs: TypeAlias = Callable[[Mapping[str, Any]], bool]

# Integers beyond this are not sent to engines.
_MOST = 2.0**63


class Field(NamedTuple):
    """A field of another server's API, and what happens to it.

    Args:
        name: its name; a dot separates the name of an object from that of a field inside it.
        servers: the servers that define it.
        verdict: `mapped` to a field of Latimer, `refused` with a 400, or `ignored` and listed.
        note: the field that it is mapped to, the hint of the error, or the reason for ignoring it.
        example: a value that has an effect.
        neutral: values without effect, in addition to null; or functions that return True for them.
        apply: writes a mapped value into the request; None for a field of Latimer's own schema.
        on: the only endpoint of the row; None for all. A row of chat is also for Responses,
            which can have a row of its own instead.
        needs: returns False for a request in which no value has an effect; None for all requests.
    """

    name: str
    servers: str
    verdict: Verdict
    note: str
    example: Any
    neutral: tuple[Any, ...] = ()
    apply: Apply | None = None
    on: Where | None = None
    needs: Needs | None = None

    def has_effect(self, value: Any) -> bool:
        """Return True unless the value is neutral."""
        if value is None:
            return False
        return not any(one(value) if callable(one) else one == value for one in self.neutral)


class Draft:
    """A request body in which fields of other servers are replaced by Latimer's own.

    Args:
        body: the body of the request.
        fields: the fields of other servers, by name.
        where: the endpoint.

    Attributes:
        given: the body of the request, unchanged.
        names: the client's field for each field that was set.
        ignored: the known fields that have no effect.
        unknown: unknown fields inside known objects.
        origin: the client's field that is being replaced.
    """

    def __init__(self, body: Mapping[str, Any], fields: Mapping[str, Field], where: Where) -> None:
        self.given = body
        self.body = dict(body)
        self.fields = fields
        self.where = where
        self.names: dict[str, str] = {}
        self.ignored: list[str] = []
        self.unknown: list[str] = []
        self.origin = ""

    def take(self, name: str, value: Any) -> None:
        """Replace a field, or list it.

        Raises:
            InvalidRequest: the field is refused, or contradicts another one.
        """
        field = self.fields.get(name)
        if field is None:
            self.unknown.append(name)
        elif not field.has_effect(value) or (field.needs and not field.needs(self.given)):
            pass
        elif field.verdict == "refused":
            raise unsupported(name, self._worded(field.note))
        elif field.verdict == "ignored":
            self.ignored.append(name)
        else:
            self.origin = name
            (field.apply or renamed(name.rpartition(".")[2]))(self, value)

    def set(self, name: str, value: Any) -> None:
        """Set a field to the value of the client's field.

        Raises:
            InvalidRequest: it has another value already.
        """
        name = self._own(name)
        outer, _, inner = name.partition(".")
        before = self.body.get(outer)
        if inner:
            before = before.get(inner) if isinstance(before, dict) else None
        if before is not None and before != value:
            raise wrong_value(
                self.origin,
                f"it differs from '{self.names.get(name, name)}', which has the same meaning. Omit "
                "one of them.",
            )
        self.replace(name, value)

    def replace(self, name: str, value: Any) -> None:
        """Set a field, and replace any earlier value; a whole number is set as an integer."""
        if isinstance(value, float) and abs(value) < _MOST:
            value = whole(value)
        name = self._own(name)
        self.names[name] = self.origin
        outer, _, inner = name.partition(".")
        if inner:
            given = self.body.get(outer)
            value = {**(given if isinstance(given, dict) else {}), inner: value}
        self.body[outer] = value

    def _own(self, name: str) -> str:
        """Return the endpoint's name of a field of chat."""
        return RESPONSE_NAMES.get(name, name) if self.where == "responses" else name

    def _worded(self, hint: str) -> str:
        """Return a hint with the endpoint's names of fields."""
        for name, own in RESPONSE_NAMES.items() if self.where == "responses" else ():
            hint = hint.replace(f"'{name}'", f"'{own}'")
        return hint

    def default(self, name: str, value: Any) -> None:
        """Set a field that the request does not have."""
        if self.body.get(name) is None:
            self.body[name] = value


def renamed(name: str) -> Apply:
    """Return a function that sets a field of another name to the same value."""

    def apply(draft: Draft, value: Any) -> None:
        draft.set(name, value)

    return apply


def inside(draft: Draft, value: Any) -> None:
    """Replace each field of an object, under its path."""
    path = draft.origin
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    for name, one in value.items():
        draft.take(f"{path}.{name}", one)


def same(name: str, servers: str, example: Any, on: Where | None = None) -> Field:
    """Return a field that has the same name and meaning in Latimer."""
    return Field(name, servers, "mapped", f"`{name.rpartition('.')[2]}`", example, on=on)


def mapped(
    name: str,
    servers: str,
    note: str,
    example: Any,
    apply: Apply | None = None,
    *neutral: Any,
    on: Where | None = None,
) -> Field:
    """Return a field that is mapped to others; without `apply`, to the one that `note` names."""
    return Field(
        name, servers, "mapped", note, example, neutral, apply or renamed(note.strip("`")), on
    )


def refused(
    name: str,
    servers: str,
    hint: str,
    example: Any,
    *neutral: Any,
    on: Where | None = None,
    needs: Needs | None = None,
) -> Field:
    """Return a field that is refused unless its value is neutral."""
    return Field(name, servers, "refused", hint, example, neutral, on=on, needs=needs)


def ignored(name: str, servers: str, reason: str, example: Any, on: Where | None = None) -> Field:
    """Return a field that is listed as ignored."""
    return Field(name, servers, "ignored", reason, example, on=on)
