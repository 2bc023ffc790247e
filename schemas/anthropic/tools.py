"""The tools of a Messages request, and the choice among them (contract of messages, section 4)."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ..openai.common import JsonObject, Request, kind_of
from ..openai.response_tools import ToolName
from .blocks import CacheControl

# Tools that the client runs, and whose schemas Anthropic's models know. Their types end with a
# date, also of versions that are newer than this list.
BUILT_IN = ("bash_20", "text_editor_20", "memory_20")
# Tools that Anthropic runs, and one that needs a model trained for it.
_SERVER = (
    "web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset",
)  # fmt: skip
EXPECTED = (
    "'custom', 'bash_20250124', 'text_editor_20250124', 'text_editor_20250429', "
    "'text_editor_20250728', 'memory_20250818'"
)


class _Offered(Request):
    """The members that have no effect on what the model sees."""

    cache_control: CacheControl | None = None
    eager_input_streaming: Any = None
    defer_loading: bool | None = None


class CustomTool(_Offered):
    """A tool with its own schema."""

    name: ToolName
    input_schema: JsonObject
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class BuiltInTool(_Offered):
    """A tool of `BUILT_IN`."""

    type: str
    name: ToolName
    strict: bool | None = None
    max_characters: Any = None


class ServerTool(BaseModel):
    """A tool that Anthropic runs."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    name: Any = None


def wrong_tag(kind: object) -> str:
    """Return Anthropic's message for a tool of an unknown type; clients read the type in it."""
    return (
        f"Input tag '{kind!s:.200}' found using 'type' does not match any of the expected tags: "
        f"{EXPECTED}"
    )


def _check(value: object) -> object:
    if not isinstance(value, dict):
        raise PydanticCustomError(
            "tool", "Input should be a valid dictionary, not {kind}", {"kind": kind_of(value)}
        )
    kind = value.get("type")
    if kind is not None and _tag(value) == "unknown":
        raise PydanticCustomError("tool", "{text}", {"text": wrong_tag(kind)})
    return value


def _tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in (None, "custom"):
        return "custom"
    if isinstance(kind, str) and kind.startswith(BUILT_IN):
        return "built-in"
    return "server" if isinstance(kind, str) and kind.startswith(_SERVER) else "unknown"


AnyTool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("custom")]
    | Annotated[BuiltInTool, Tag("built-in")]
    | Annotated[ServerTool, Tag("server")],
    Discriminator(_tag),
    BeforeValidator(_check),
]


class _Choice(Request):
    disable_parallel_tool_use: bool | None = None


class FreeChoice(_Choice):
    """A choice that names no tool: `any` is chat's `required`."""

    type: Literal["auto", "any", "none"]


class NamedChoice(_Choice):
    """The choice of one tool."""

    type: Literal["tool"]
    name: str


ToolChoice: TypeAlias = Annotated[FreeChoice | NamedChoice, Field(discriminator="type")]
