"""The items of a Responses request and their content parts (contract of responses, 2.3 and 2.4).

Null members are the same as absent ones. What replayed output items also have (`id`, `status`,
`annotations` and others) is accepted and has no effect.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from .common import Array, Request, type_of, without_nulls, wrong_type, wrong_value
from .messages import CacheBreakpoint, InputAudio, RefusalPart, form_of
from .response_tools import AnyTool

Detail: TypeAlias = Literal["auto", "low", "high", "original"]


class InputTextPart(Request):
    """Text in a message that the client wrote, or in the output of a call."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class OutputTextPart(Request):
    """Text that the model generated."""

    type: Literal["output_text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class InputImagePart(Request):
    """An image, as a URL or as the id of an uploaded file."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputFilePart(Request):
    """A file, as base64, as a URL, or as the id of an uploaded file."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None
    detail: Any = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputAudioPart(Request):
    """Audio in base64; `audio_url` is a data URL, as Codex sends it."""

    type: Literal["input_audio"]
    input_audio: InputAudio | None = None
    audio_url: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class UnservedPart(BaseModel):
    """A part of a type that no model here reads."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str


class SummaryPart(Request):
    """A part of the summary of earlier reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(Request):
    """A part of earlier reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


# The types of parts in OpenAI's errors, in its order.
PARTS = (
    "input_text", "input_image", "input_audio", "output_text", "refusal", "input_file",
    "computer_screenshot", "summary_text", "encrypted_content",
)  # fmt: skip
USER_PARTS = ("input_text", "input_image", "input_file", "scoped_content", "input_audio")
ASSISTANT_PARTS = ("output_text", "refusal")
OUTPUT_PARTS = ("input_text", "input_image", "input_file")
_KNOWN_PARTS = frozenset((*PARTS, *USER_PARTS))


def _part_of(types: Sequence[str]) -> BeforeValidator:
    """Return a validator of the parts that one place may have."""

    def check(value: object) -> object:
        part, kind = type_of(value)
        if kind not in types:
            if not isinstance(kind, str) or kind not in _KNOWN_PARTS:
                raise wrong_value(kind, PARTS, ".type")
            raise wrong_value(kind, types)
        return without_nulls(part)

    return BeforeValidator(check)


def _part_tag(value: object) -> str:
    kind = value["type"] if isinstance(value, dict) else getattr(value, "type", "")
    return kind if kind in _SERVED_PARTS else "unserved"


_SERVED_PARTS = frozenset(("input_text", "input_image", "input_file", "input_audio"))

UserPart = Annotated[
    Annotated[InputTextPart, Tag("input_text")]
    | Annotated[InputImagePart, Tag("input_image")]
    | Annotated[InputFilePart, Tag("input_file")]
    | Annotated[InputAudioPart, Tag("input_audio")]
    | Annotated[UnservedPart, Tag("unserved")],
    Discriminator(_part_tag),
    _part_of(USER_PARTS),
]
AssistantPart = Annotated[
    Annotated[OutputTextPart | RefusalPart, Field(discriminator="type")],
    _part_of(ASSISTANT_PARTS),
]
OutputPart = Annotated[
    Annotated[InputTextPart | InputImagePart | InputFilePart, Field(discriminator="type")],
    _part_of(OUTPUT_PARTS),
]


def _check_content(value: object) -> object:
    if not isinstance(value, str | list):
        raise wrong_type(value, "one of a string or array of objects")
    return value


_CONTENT = (Discriminator(form_of), BeforeValidator(_check_content))
UserContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[Array[UserPart], Tag("array")], *_CONTENT
]
AssistantContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[Array[AssistantPart], Tag("array")], *_CONTENT
]
OutputContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[Array[OutputPart], Tag("array")], *_CONTENT
]


# OpenAI's limit for the characters of an item's id.
LONGEST_ID = 64


class _Replayed(Request):
    """The members of output items that have no effect when they are sent back."""

    id: Any = None
    status: Any = None
    phase: Any = None
    created_by: Any = None
    caller: Any = None
    async_: Any = Field(None, alias="async")


class InputMessage(_Replayed):
    """A message of the user, or with instructions."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: UserContent


class OutputMessage(_Replayed):
    """A message of the assistant."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: AssistantContent


class ReasoningItem(_Replayed):
    """Earlier reasoning; `encrypted_content` is opaque to clients."""

    type: Literal["reasoning"]
    summary: Array[SummaryPart] | None = None
    content: Array[ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def is_named(self) -> bool:
        """True if the item has nothing but the id under which it may be stored."""
        return isinstance(self.id, str) and not self.text and self.encrypted_content is None

    @property
    def text(self) -> str:
        """The reasoning, as far as the item has it."""
        return "".join([part.text for part in self.content or ()])


class FunctionCallItem(_Replayed):
    """A function call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionOutputItem(_Replayed):
    """The result of a function call; some clients send the name of the function only."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: OutputContent
    name: str | None = None
    namespace: Any = None


class CustomCallItem(_Replayed):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CustomOutputItem(_Replayed):
    """The result of a custom tool call."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: OutputContent
    name: str | None = None
    namespace: Any = None


class ItemReference(_Replayed):
    """The id of a stored item."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class CompactionItem(_Replayed):
    """A compacted beginning of a conversation, which only its maker can read."""

    type: Literal["compaction"]
    encrypted_content: str


class ToolsItem(_Replayed):
    """Tools that the model gets in addition to those of the request."""

    type: Literal["additional_tools", "tool_search_output"]
    tools: Array[AnyTool]
    role: Any = None
    call_id: Any = None
    execution: Any = None


class UnservedItem(BaseModel):
    """An item of a tool that this server does not run; it is listed as ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str


# The types of items in OpenAI's error.
ITEMS = (
    "additional_tools", "agent_message", "apply_patch_call", "apply_patch_call_output",
    "code_interpreter_call", "compaction", "compaction_trigger", "computer_call",
    "computer_call_output", "configuration_update", "custom_tool_call", "custom_tool_call_output",
    "file_search_call", "function_call", "function_call_output", "image_generation_call",
    "item_reference", "local_shell_call", "local_shell_call_output", "mcp_approval_request",
    "mcp_approval_response", "mcp_call", "mcp_list_tools", "message", "multi_agent_call",
    "multi_agent_call_output", "program", "program_output", "reasoning", "shell_call",
    "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
)  # fmt: skip
ROLES = ("assistant", "system", "developer", "user")
_SERVED = frozenset(
    {
        "reasoning", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output", "item_reference", "compaction",
    }
)  # fmt: skip
_WITH_TOOLS = ("additional_tools", "tool_search_output")
# Items of hosted tools have many names, also in the histories of older clients.
_FAMILIES = (
    "apply_patch_", "computer_", "local_shell_", "mcp_", "multi_agent_", "program", "shell_",
)  # fmt: skip
_TYPES = frozenset((*ITEMS, "ghost_snapshot", "compaction_summary", "context_compaction"))


def _check_item(value: object) -> object:
    """Check the type and the role of an item, and drop its null members."""
    if not isinstance(value, dict):
        if isinstance(value, BaseModel):
            return value
        raise wrong_type(value, "an input item")
    kind = value.get("type")
    if kind is None:
        role = value.get("role")
        if role is None and value.get("id") is not None:
            return {"type": "item_reference", "id": value["id"]}
        kind = "message"
    if not isinstance(kind, str) or not (kind in _TYPES or kind.startswith(_FAMILIES)):
        raise wrong_value(kind, ITEMS)
    if kind == "message" and value.get("role") not in ROLES:
        raise wrong_value(value.get("role") or "", ROLES)
    return {**without_nulls(value), "type": kind}


def _item_tag(value: object) -> str:
    if isinstance(value, dict):
        kind, role = value["type"], value.get("role")
    else:
        kind, role = getattr(value, "type", ""), getattr(value, "role", None)
    if kind == "message":
        return "output_message" if role == "assistant" else "input_message"
    if kind in _WITH_TOOLS:
        return "tools"
    return kind if kind in _SERVED else "unserved"


Item = Annotated[
    Annotated[InputMessage, Tag("input_message")]
    | Annotated[OutputMessage, Tag("output_message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ToolsItem, Tag("tools")]
    | Annotated[UnservedItem, Tag("unserved")],
    Discriminator(_item_tag),
    BeforeValidator(_check_item),
]
