"""Queries about stored responses (contract of the Responses API, section 1)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .common import Request
from .stored import ListQuery, as_number


def _flag(value: object) -> object:
    """Return the boolean in a query parameter."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(_flag)]
Event = Annotated[Annotated[int, Field(ge=0)], BeforeValidator(as_number)]


class RetrieveQuery(Request):
    """The query of `GET /v1/responses/{id}`."""

    # The values of `include[]`; what is stored is returned as it was.
    include: Any = None
    include_obfuscation: Flag | None = None
    starting_after: Event | None = None
    stream: Flag = False


class ItemsQuery(ListQuery):
    """The query of `GET /v1/responses/{id}/input_items`; the newest item is the first."""

    # The values of `include[]`; what is stored is returned as it was.
    include: Any = None
    order: Literal["asc", "desc"] = "desc"
