"""The tools of a Responses request, and the choice among them (contract of responses, 2.6)."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from .common import Array, JsonObject, Request, type_of, without_nulls, wrong_type, wrong_value
from .messages import TextInput

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$", min_length=1, max_length=128)]


class _Offered(Request):
    """The members of a tool that only matter where OpenAI runs or searches tools."""

    defer_loading: Any = None
    allowed_callers: Any = None
    # `async` is a keyword in Python.
    async_: Any = Field(None, alias="async")

    @property
    def inert(self) -> list[str]:
        """The names of members whose value asks for what this server does not do."""
        callers = self.allowed_callers
        asked = {
            "allowed_callers": isinstance(callers, list) and callers and "direct" not in callers,
            "async": self.async_,
            "defer_loading": self.defer_loading,
        }
        return [name for name, value in asked.items() if value]


class FlatFunction(_Offered):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    output_schema: Any = None


class FlatGrammarInput(Request):
    """Text that matches a grammar as the input of a custom tool."""

    type: Literal["grammar"]
    definition: str
    syntax: Literal["lark", "regex"]


FlatInputFormat = Annotated[TextInput | FlatGrammarInput, Field(discriminator="type")]


class FlatCustom(_Offered):
    """A tool whose input is text; `format` may constrain it."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: FlatInputFormat | None = None


class HostedTool(BaseModel):
    """A tool that OpenAI runs, or for which it has a protocol of its own."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str


# The types of tools in OpenAI's error, and the beginnings of the names of their versions.
TOOLS = (
    "function", "custom", "namespace", "apply_patch", "code_interpreter", "computer",
    "computer_use_preview", "file_search", "image_generation", "local_shell", "mcp",
    "programmatic_tool_calling", "shell", "tool_search", "web_search", "web_search_preview",
)  # fmt: skip
_VERSIONS = ("web_search", "computer")
_OWN = ("function", "custom", "namespace")
_HOSTED = TOOLS[len(_OWN) :]


def is_hosted(kind: object) -> bool:
    """Return True for the type of a tool that this server does not run."""
    if not isinstance(kind, str) or kind in _OWN:
        return False
    return kind in TOOLS or kind.startswith(_VERSIONS)


def _one_of(own: Sequence[str]) -> Callable[[object], object]:
    """Return a check of what has one of these types, or that of a hosted tool."""

    def check(value: object) -> object:
        one, kind = type_of(value)
        if kind not in own and not is_hosted(kind):
            raise wrong_value(kind, (*own, *_HOSTED), ".type")
        return without_nulls(one)

    return check


_check_tool = _one_of(_OWN)
# A namespace has no other one in it, and a list of allowed tools no other list.
_check_inner = _one_of(("function", "custom"))


def _tool_tag(value: object) -> str:
    kind = value["type"] if isinstance(value, dict) else getattr(value, "type", "")
    return kind if kind in _OWN else "hosted"


InnerTool = Annotated[
    Annotated[FlatFunction, Tag("function")]
    | Annotated[FlatCustom, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_tag),
    BeforeValidator(_check_inner),
]


class Namespace(Request):
    """Several tools under a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Array[InnerTool]


AnyTool = Annotated[
    Annotated[FlatFunction, Tag("function")]
    | Annotated[FlatCustom, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_tag),
    BeforeValidator(_check_tool),
]


class FlatChoice(Request):
    """The name of a function or of a custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class HostedChoice(BaseModel):
    """The type of a hosted tool that must be called; other members identify it."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str


_WORDS = ("none", "auto", "required")
_check_object = _one_of(("function", "custom", "allowed_tools"))


def _check_choice(value: object) -> object:
    if isinstance(value, str):
        if value in _WORDS:
            return value
        raise wrong_value(value, _WORDS)
    if not isinstance(value, dict):
        raise wrong_type(value, "one of a string or object")
    return _check_object(value)


def _choice_tag(value: object) -> str:
    if isinstance(value, str):
        return "word"
    kind = value["type"] if isinstance(value, dict) else getattr(value, "type", "")
    return {"function": "flat", "custom": "flat", "allowed_tools": "allowed"}.get(kind, "hosted")


ToolReference = Annotated[
    Annotated[FlatChoice, Tag("flat")] | Annotated[HostedChoice, Tag("hosted")],
    Discriminator(_choice_tag),
    BeforeValidator(_check_inner),
]


class AllowedChoice(Request):
    """Some of the tools; with the mode `required`, one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Array[ToolReference], Field(min_length=1)]


FlatToolChoice = Annotated[
    Annotated[str, Tag("word")]
    | Annotated[FlatChoice, Tag("flat")]
    | Annotated[AllowedChoice, Tag("allowed")]
    | Annotated[HostedChoice, Tag("hosted")],
    Discriminator(_choice_tag),
    BeforeValidator(_check_choice),
]
