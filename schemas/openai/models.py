"""`GET /v1/models` and `GET /v1/models/{model}` (contract, section 5)."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class ModelObject(TypedDict):
    """One model; `created` is in seconds since 1970."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """A list of all models; it is never paged."""

    object: Literal["list"]
    data: list[ModelObject]
