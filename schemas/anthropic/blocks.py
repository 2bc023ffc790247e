"""The content blocks of a Messages request (contract of messages, section 3).

`null` is the same as an absent member. Members that only matter at Anthropic have no effect, and
most have any type. The messages of errors are pydantic's, as at Anthropic.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ..openai.common import Array, JsonObject, Request
from ..openai.messages import form_of


class CacheControl(BaseModel):
    """The end of a prefix that Anthropic caches; it has no effect, because each one is cached."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["ephemeral"]
    ttl: str | None = None


class _Block(Request):
    """The members that every block may have."""

    cache_control: CacheControl | None = None
    citations: Any = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class Base64Source(Request):
    """A file in base64; its bytes decide, not its media type."""

    type: Literal["base64"]
    data: str
    media_type: str | None = None


class UrlSource(Request):
    """The URL of a file."""

    type: Literal["url"]
    url: str


class FileSource(Request):
    """The id of an uploaded file."""

    type: Literal["file"]
    file_id: str


class TextSource(Request):
    """A text file."""

    type: Literal["text"]
    data: str
    media_type: str | None = None


class ImageBlock(_Block):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class ContentSource(Request):
    """A document that consists of blocks."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[
            Array[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], Tag("array")
        ],
        Discriminator(form_of),
    ]


class DocumentBlock(_Block):
    """A document: a PDF file, a text, or blocks."""

    type: Literal["document"]
    source: Annotated[
        Base64Source | UrlSource | FileSource | TextSource | ContentSource,
        Field(discriminator="type"),
    ]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Block):
    """A result of the client's own search."""

    type: Literal["search_result"]
    content: Array[TextBlock]
    source: str
    title: str


class ThinkingBlock(_Block):
    """Earlier reasoning: its text, or the same sealed in the signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: Any = None


class ToolUseBlock(_Block):
    """A call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    caller: Any = None
    toolset_name: Any = None


class ToolReferenceBlock(_Block):
    """The name of a tool that a search has found."""

    type: Literal["tool_reference"]
    tool_name: str


class CompactionBlock(_Block):
    """A summary of earlier messages."""

    type: Literal["compaction"]
    content: Any = None


class ServerBlock(BaseModel):
    """A block about tools that only Anthropic's models have, in a conversation that began there."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal[
        "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
        "code_execution_tool_result", "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result", "tool_search_tool_result", "mcp_tool_use",
        "mcp_tool_result", "mcp_tool_listing", "container_upload", "advisor_tool_result",
        "tool_addition", "tool_removal", "fallback", "browser_state",
    ]  # fmt: skip


ResultPart: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ServerBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Annotated[str | None, Tag("string")] | Annotated[Array[ResultPart], Tag("array")],
        Discriminator(form_of),
    ] = None
    is_error: bool | None = None
    toolset_name: Any = None


class MidConversationSystemBlock(_Block):
    """Instructions inside a message."""

    type: Literal["mid_conv_system"]
    content: Array[TextBlock]


Block: TypeAlias = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | MidConversationSystemBlock
    | CompactionBlock
    | ServerBlock,
    Field(discriminator="type"),
]
