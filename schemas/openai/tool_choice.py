"""The tools that a model must or may call: `tool_choice` and `function_call` (contract 3.1)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .common import Request, invalid, kind_of


class NamedTool(Request):
    """The name of a tool."""

    name: str


class FunctionChoice(Request):
    """The name of a function, in the format of `tools`."""

    type: Literal["function"]
    function: NamedTool


class CustomChoice(Request):
    """The name of a custom tool, in the format of `tools`."""

    type: Literal["custom"]
    custom: NamedTool


ToolName = Annotated[FunctionChoice | CustomChoice, Field(discriminator="type")]


class AllowedTools(Request):
    """Some of the tools; with the mode `required`, one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(min_length=1)]


class AllowedToolsChoice(Request):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _check_word_or_object(*words: str) -> BeforeValidator:
    """Return a validator of a field that is one of several words, or an object."""
    listed = ", ".join(f"'{word}'" for word in words[:-1]) + f", and '{words[-1]}'"

    def check(value: object) -> object:
        if isinstance(value, dict) or value in words:
            return value
        if isinstance(value, str):
            raise invalid(
                f"Invalid value: '{value:.200}'. Supported values are: {listed}.", "invalid_value"
            )
        raise invalid(
            "Invalid type for '{param}': expected one of a string or object, but got "
            f"{kind_of(value)} instead.",
            "invalid_type",
        )

    return BeforeValidator(check)


def _kind(value: object) -> str:
    return "object" if isinstance(value, dict) else "word"


ToolChoice = Annotated[
    Annotated[str, Tag("word")]
    | Annotated[
        Annotated[FunctionChoice | CustomChoice | AllowedToolsChoice, Field(discriminator="type")],
        Tag("object"),
    ],
    Discriminator(_kind),
    _check_word_or_object("none", "auto", "required"),
]
LegacyChoice = Annotated[
    Annotated[str, Tag("word")] | Annotated[NamedTool, Tag("object")],
    Discriminator(_kind),
    _check_word_or_object("none", "auto"),
]
