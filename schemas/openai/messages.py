"""Messages, tools and tool calls of a chat request (contract 3.2), and `response_format` (3.7)."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidatorFunctionWrapHandler, WrapValidator

from .common import Array, JsonObject, Request, invalid, unexpected

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$", min_length=1, max_length=64)]


class CacheBreakpoint(Request):
    """The end of a prefix that OpenAI caches; it has no effect here."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(Request):
    """A text part of a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(Request):
    """A refusal that the assistant gave earlier."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(Request):
    """The URL of an image, and its level of detail."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Request):
    """An image in a user message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputAudio(Request):
    """Audio in base64."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(Request):
    """Audio in a user message."""

    type: Literal["input_audio"]
    input_audio: InputAudio
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class File(Request):
    """A file in base64, or the id of an uploaded one."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(Request):
    """A file in a user message."""

    type: Literal["file"]
    file: File
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Part = Annotated[
    TextPart | RefusalPart | ImagePart | AudioPart | FilePart, Field(discriminator="type")
]


# OpenAI's error for `"content": null`.
NO_CONTENT = "Invalid value for 'content': expected a string, got null."


def _check_content(value: object, read_parts: ValidatorFunctionWrapHandler) -> object:
    # Most contents are strings, which this one call checks.
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return read_parts(value)
    if value is None:
        raise invalid(NO_CONTENT, None, dotted=True)
    raise unexpected(value, "one of a string or array of objects")


def form_of(value: object) -> str:
    """Return the tag of a field that is one text or a list."""
    return "array" if isinstance(value, list) else "string"


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[Array[Part], Tag("array")],
    Discriminator(form_of),
    WrapValidator(_check_content),
]


class FunctionCall(Request):
    """A function's name, and its arguments as a JSON string.

    OpenAI's clients add `parsed_arguments`, which have no effect.
    """

    name: str
    arguments: str
    parsed_arguments: Any = None


class CustomCall(Request):
    """A custom tool's name and its input."""

    name: str
    input: str


class FunctionToolCall(Request):
    """A function call that the assistant made."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class CustomToolCall(Request):
    """A custom tool call that the assistant made."""

    id: str
    type: Literal["custom"]
    custom: CustomCall
    index: int | None = None


ToolCall = Annotated[FunctionToolCall | CustomToolCall, Field(discriminator="type")]


class SystemMessage(Request):
    """A message with instructions; `developer` is the newer name of the role."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Request):
    """A message from the user."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class ReasoningDetail(Request):
    """A part of earlier reasoning, as OpenRouter sends it.

    Only text can be shown to a model. Encrypted data and summaries are unknown fields.
    """

    type: str
    text: str | None = None
    signature: str | None = None
    id: str | None = None
    format: str | None = None
    index: int | None = None


class EarlierAudio(Request):
    """An earlier spoken answer; clients also send the rest of the response's object."""

    id: str
    data: str | None = None
    expires_at: int | None = None
    transcript: str | None = None


class AssistantMessage(Request):
    """A message from the assistant; `content` may be missing if there are tool calls or audio.

    Clients send earlier reasoning in one of four fields, or the same in several. They also send a
    response's message unchanged. Its `annotations`, the `index` of its calls and what OpenAI's
    clients have parsed in it have no effect.
    """

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    audio: EarlierAudio | None = None
    tool_calls: Array[ToolCall] | None = None
    function_call: FunctionCall | None = None
    annotations: Array[JsonObject] | None = None
    parsed: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    reasoning_details: Array[ReasoningDetail] | None = None

    @property
    def earlier_reasoning(self) -> str | None:
        """The earlier reasoning; None if no field has it."""
        if self.__pydantic_fields_set__.isdisjoint(_REASONING):
            return None
        texts = [getattr(self, name) for name in REASONING_FIELDS]
        if not any(texts) and self.reasoning_details:
            return "".join([detail.text or "" for detail in self.reasoning_details])
        given = [text for text in texts if text is not None]
        return max(given, key=bool) if given else None


# The fields of earlier reasoning: those of DeepSeek, OpenRouter and Ollama.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_REASONING = frozenset({*REASONING_FIELDS, "reasoning_details"})


class ToolMessage(Request):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


class FunctionMessage(Request):
    """The result of a function call (deprecated)."""

    role: Literal["function"]
    content: str | None
    name: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


_ROLE_AND_CONTENT = frozenset({"role", "content"})


def are_plain(messages: Sequence[Message]) -> bool:
    """Return True if each message is a role and a text, and nothing else.

    Most are, and need none of the checks of other messages.
    """
    for message in messages:
        if (
            type(message.content) is not str
            or message.__pydantic_fields_set__ != _ROLE_AND_CONTENT
            or message.__pydantic_extra__
        ):
            return False
    return True


class Function(Request):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(Request):
    """A tool that is a function."""

    type: Literal["function"]
    function: Function


class TextInput(Request):
    """Any text as the input of a custom tool."""

    type: Literal["text"]


class InputGrammar(Request):
    """A grammar in one of OpenAI's two languages."""

    definition: str
    syntax: Literal["lark", "regex"]


class GrammarInput(Request):
    """Text that matches a grammar as the input of a custom tool."""

    type: Literal["grammar"]
    grammar: InputGrammar


InputFormat = Annotated[TextInput | GrammarInput, Field(discriminator="type")]


class Custom(Request):
    """The definition of a custom tool; `format` may constrain its input."""

    name: Name
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(Request):
    """A tool whose input is text."""

    type: Literal["custom"]
    custom: Custom


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


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
    """One JSON object; `schema` is llama.cpp's, and `value` TGI's name for it."""

    type: Literal["json_object"]
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    value: JsonObject | None = None


class JsonSchemaFormat(Request):
    """JSON that follows a schema; `schema` next to `type` is llama.cpp's."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
