"""`POST /v1/chat/completions` (contract, section 3)."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from typing_extensions import NotRequired, TypedDict

from .. import limits
from .common import (
    Array,
    Count,
    EngineExtras,
    FinishReason,
    JsonObject,
    LogitBias,
    MaxTokens,
    Metadata,
    Penalty,
    ReplyHead,
    Request,
    Seed,
    Stop,
    StreamOptions,
    Temperature,
    TokenIds,
    Usage,
    VoiceName,
    invalid,
    unexpected,
)
from .messages import Content, Function, Message, ResponseFormat, Tool


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
    tools: Annotated[Array[ToolName], Field(min_length=1)]


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
        raise unexpected(value, "one of a string or object")

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


class Audio(Request):
    """The voice and the format of a spoken answer."""

    voice: VoiceName
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


class Prediction(Request):
    """Text that the answer is expected to repeat; it changes the speed only."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The text of its text parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(getattr(part, "text", "") for part in self.content)


class WebSearchOptions(Request):
    """Options of a web search."""

    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: JsonObject | None = None


class CacheOptions(Request):
    """The way in which OpenAI caches a prompt; it has no effect here."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class InstructTurn(Request):
    """The text before and after a message."""

    start: str | None = None
    end: str | None = None


class InstructTurns(Request):
    """The text before and after the messages of each role."""

    system: InstructTurn | None = None
    user: InstructTurn | None = None
    assistant: InstructTurn | None = None


class InstructAdapter(Request):
    """An instruct format as koboldcpp takes it, flat or by role; not a field of OpenAI's."""

    templates: InstructTurns | None = None
    system_start: str | None = None
    system_end: str | None = None
    user_start: str | None = None
    user_end: str | None = None
    assistant_start: str | None = None
    assistant_end: str | None = None
    assistant_gen: str | None = None


class ChatRequest(EngineExtras, defer_build=False):
    """Body of `POST /v1/chat/completions`.

    `logprobs_token_ids` and `reply_token_ids` are Latimer's own. The first adds the model's ids to
    `logprobs`. The reply begins with the tokens of the second.
    """

    endpoint = "chat"

    model: str | None = None
    messages: Annotated[Array[Message], Field(min_length=1, max_length=limits.MESSAGES.maximum)]
    adapter: InstructAdapter | None = None
    audio: Audio | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    frequency_penalty: Penalty | None = None
    function_call: LegacyChoice | None = None
    functions: Annotated[list[Function], Field(max_length=limits.TOOLS.maximum)] | None = None
    logit_bias: LogitBias = None
    logprobs: bool | None = None
    logprobs_token_ids: bool | None = None
    max_completion_tokens: MaxTokens = None
    max_tokens: MaxTokens = None
    metadata: Metadata | None = None
    modalities: Array[Literal["text", "audio"]] | None = None
    moderation: JsonObject | None = None
    n: Count | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    presence_penalty: Penalty | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    reply_token_ids: TokenIds | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    seed: Seed | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    stop: Stop = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.TOOLS.maximum)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    web_search_options: WebSearchOptions | None = None

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens to generate; None if there is no limit."""
        return self.max_tokens or self.max_completion_tokens


class SpokenAnswer(TypedDict):
    """A spoken answer: a file in base64, and its text; the id stands for it in later requests."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AssistantText(TypedDict):
    """The assistant's message without calls; `refusal` is always present, and null.

    A spoken answer has `audio`, and its `content` is null.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    audio: NotRequired[SpokenAnswer]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatMessage(AssistantText):
    """The assistant's message."""

    tool_calls: NotRequired[list[Any]]
    function_call: NotRequired[Any]


class TopLogprob(TypedDict):
    """A possible token and its log-probability; `bytes` is null for a control token.

    The id is present only if `logprobs_token_ids` asks for it.
    """

    token: str
    logprob: float
    bytes: list[int] | None
    id: NotRequired[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the message, and the most likely tokens at its position.

    With `logprobs_token_ids`, `hidden_token_ids` has the tokens that were generated before it and
    have no entry: reasoning, and markers.
    """

    top_logprobs: list[TopLogprob]
    hidden_token_ids: NotRequired[list[int]]


class ChatLogprobs(TypedDict):
    """The tokens of a message with their log-probabilities."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatChoice(TypedDict):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ReplyHead):
    """The response to a request without streaming."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    service_tier: NotRequired[str]


class SpokenDelta(TypedDict, total=False):
    """A part of a spoken answer; `data` is samples in base64, whole ones in each delta."""

    id: str
    transcript: str
    data: str
    expires_at: int


class ChatDelta(TypedDict, total=False):
    """A delta of a choice; only the keys that change are present."""

    role: Literal["assistant"]
    content: str | None
    audio: SpokenDelta
    reasoning_content: str
    reasoning: str
    tool_calls: list[Any]
    function_call: Any
    refusal: None


class ChatChunkChoice(TypedDict):
    """The part of a choice in one chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(ReplyHead):
    """One chunk of a streamed response."""

    object: Literal["chat.completion.chunk"]
    service_tier: NotRequired[str]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    obfuscation: NotRequired[str]
