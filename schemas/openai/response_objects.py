"""The response object of `/v1/responses`, the items of its output, and its other replies."""

from typing import Any, Literal, TypeAlias

from typing_extensions import NotRequired, TypedDict

from .chat import ChatTokenLogprob

Status: TypeAlias = Literal["completed", "incomplete", "in_progress"]


class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessageItem(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    """The text of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningOutputItem(TypedDict):
    """Reasoning; `encrypted_content` only if `include` asks for it."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[ReasoningText]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class FunctionCallOutputItem(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[str]


class CustomCallOutputItem(TypedDict):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    input: str
    namespace: NotRequired[str]


OutputItem: TypeAlias = (
    OutputMessageItem | ReasoningOutputItem | FunctionCallOutputItem | CustomCallOutputItem
)


class InputTokensDetails(TypedDict):
    """A breakdown of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """A breakdown of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(TypedDict):
    """A response; the parameters of its request are those that applied."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: dict[str, str] | None
    frequency_penalty: float
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    conversation: NotRequired[dict[str, str]]


class ResponseEvent(TypedDict):
    """An event of a stream; its type decides which of the other fields it has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    summary_index: NotRequired[int]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[list[ChatTokenLogprob]]
    code: NotRequired[str | None]
    message: NotRequired[str]
    param: NotRequired[str | None]


class InputTokens(TypedDict):
    """The number of input tokens of a request."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    """The confirmation of a deletion."""

    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]
