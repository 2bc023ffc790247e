"""Values of engine extras that llama.cpp and its clients spell in more than one way.

Each type accepts the spellings and has one value for each meaning, which is llama.cpp's own.
"""

from __future__ import annotations

import json
import re
from typing import Annotated

import orjson
from pydantic import AfterValidator, BeforeValidator, Field

from .. import limits

_MOST = 2**31 - 1
# The beginning of a JSON array of strings.
_ARRAY = re.compile(r'\s*\[\s*["\]]')


def whole(value: object) -> object:
    """Return a whole number such as 20.0 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_schema(text: str) -> object:
    """Return the schema that a text contains as JSON; None for an empty text.

    Raises:
        ValueError: it is too long, or not JSON.
    """
    if not text:
        return None
    if len(text) > limits.SCHEMA.most:
        raise ValueError(f"it has {len(text)} characters; {limits.SCHEMA.most} are allowed")
    try:
        found: object = orjson.loads(text)
    except ValueError:
        raise ValueError("it is not valid JSON") from None
    return found


def _listed(value: object) -> object:
    """Return the list in a string: a JSON array, or one sequence breaker."""
    if not isinstance(value, str):
        return value
    if _ARRAY.match(value):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            # A string is not a list: the error names the field.
            return value
    return [value] if value else None


Whole = BeforeValidator(whole)
# Zero and below switch it off.
TopK = Annotated[
    int, Field(ge=-_MOST, le=_MOST), Whole, AfterValidator(lambda value: max(value, 0))
]
# A number of tokens; -1 is the context length.
Window = Annotated[int, Field(ge=-1, le=_MOST), Whole]
# 0 switches it off, like 1.
RepeatPenalty = Annotated[float, Field(ge=0), AfterValidator(lambda value: value or 1.0)]
# An empty grammar means no grammar.
Gbnf = Annotated[str | None, AfterValidator(lambda value: value or None)]
Breakers = Annotated[
    Annotated[
        list[Annotated[str, Field(max_length=limits.BREAKER.most)]],
        Field(max_length=limits.BREAKERS.most),
    ]
    | None,
    BeforeValidator(_listed),
]
