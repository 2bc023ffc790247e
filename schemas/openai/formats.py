"""`response_format` (contract 3.7)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .common import JsonObject, Request
from .messages import Name


class JsonSchema(Request):
    """A schema that the answer must follow."""

    name: Name
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(Request):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Request):
    """One JSON object; `schema` is llama.cpp's."""

    type: Literal["json_object"]
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


class JsonSchemaFormat(Request):
    """JSON that follows a schema; `schema` next to `type` is llama.cpp's."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
