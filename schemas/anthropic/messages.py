"""Requests of `POST /v1/messages` and `/v1/messages/count_tokens` (contract of messages, 2)."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from .. import limits
from ..openai.chat import InstructAdapter
from ..openai.common import Array, EngineExtras, JsonObject, LogitBias, Penalty, Request, Seed
from ..openai.messages import form_of
from .blocks import Block, CacheControl, TextBlock
from .tools import AnyTool, ToolChoice


class InputMessage(Request):
    """A message; several of one role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("string")] | Annotated[Array[Block], Tag("array")],
        Discriminator(form_of),
    ]


System: TypeAlias = Annotated[
    Annotated[str | None, Tag("string")] | Annotated[Array[TextBlock], Tag("array")],
    Discriminator(form_of),
]


class OutputFormat(Request):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Request):
    """The amount of reasoning, and the format of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(BaseModel):
    """The end user; Claude Code puts JSON into `user_id`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    user_id: str | None = None


def _check_stops(value: list[str] | None) -> list[str] | None:
    if value is not None and not all(value):
        raise PydanticCustomError("stops", "each stop sequence must be non-empty")
    size = sum(map(len, value or ()))
    if size > limits.STOP_TEXT.maximum:
        raise PydanticCustomError(
            "stops",
            "at most {most} characters in all are allowed, not {size}",
            {"most": limits.STOP_TEXT.maximum, "size": size},
        )
    return value


class CountTokensRequest(EngineExtras, defer_build=False):
    """Body of `POST /v1/messages/count_tokens`.

    The first group of fields is Anthropic's. The second has no effect on the answer. The rest are
    fields of chat, which Anthropic's API lacks.
    """

    foreign = frozenset(
        {
            *EngineExtras.model_fields, "adapter", "chat_template_kwargs", "frequency_penalty",
            "logit_bias", "presence_penalty", "seed",
        }
        - {"top_k"}
    )  # fmt: skip
    endpoint: ClassVar[Literal["messages"]] = "messages"  # type: ignore[assignment]

    model: str
    messages: Annotated[Array[InputMessage], Field(max_length=limits.MESSAGES.maximum)]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    system: System = None
    stream: bool | None = None
    stop_sequences: Annotated[
        Annotated[
            list[Annotated[str, Field(max_length=limits.STOP.maximum)]],
            Field(max_length=limits.STOPS.maximum),
        ]
        | None,
        AfterValidator(_check_stops),
    ] = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    thinking: Any = None
    tools: Annotated[list[AnyTool], Field(max_length=limits.TOOLS.maximum)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: Array[Any] | None = None
    context_management: JsonObject | None = None
    thread: Any = None

    cache_control: CacheControl | None = None
    container: str | JsonObject | None = None
    inference_geo: str | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    adapter: InstructAdapter | None = None
    chat_template_kwargs: JsonObject | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens to generate."""
        return self.max_tokens

    @property
    def stop(self) -> list[str] | None:
        """The stop sequences, by chat's name."""
        return self.stop_sequences


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)]
