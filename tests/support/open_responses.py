"""The schema of Open Responses (openresponses.org), of what a server sends, in our own words.

It is that of version 2026-04-24. Unknown keys are allowed, as in the validators of its tests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class _Object(BaseModel):
    """An object; a key without a default is required, also if it may be null."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _TextPart(_Object):
    type: Literal["input_text", "text", "summary_text", "reasoning_text"]
    text: str


class _Top(_Object):
    token: str
    logprob: float
    bytes: list[int]


class _Logprob(_Top):
    top_logprobs: list[_Top]


class _Citation(_Object):
    type: Literal["url_citation"]
    url: str
    start_index: int
    end_index: int
    title: str


class _OutputText(_Object):
    type: Literal["output_text"]
    text: str
    annotations: list[_Citation]
    logprobs: list[_Logprob] = []


class _Refusal(_Object):
    type: Literal["refusal"]
    refusal: str


class _Image(_Object):
    type: Literal["input_image"]
    image_url: str | None
    detail: Literal["low", "high", "auto"]


class _File(_Object):
    type: Literal["input_file"]
    filename: str = ""
    file_url: str = ""


_Part = Annotated[_TextPart | _OutputText | _Refusal | _Image | _File, Field(discriminator="type")]


class _Message(_Object):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[_Part]
    phase: Literal["commentary", "final_answer"] = "final_answer"


class _Call(_Object):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class _CallOutput(_Object):
    type: Literal["function_call_output"]
    id: str
    call_id: str
    output: str | list[_Part]
    status: Status


class _Reasoning(_Object):
    type: Literal["reasoning"]
    id: str
    summary: list[_Part]
    content: list[_Part] = []
    encrypted_content: str = ""


class _Compaction(_Object):
    type: Literal["compaction"]
    id: str
    encrypted_content: str


_Item = Annotated[
    _Message | _Call | _CallOutput | _Reasoning | _Compaction, Field(discriminator="type")
]


class _Tool(_Object):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class _NamedTool(_Object):
    type: Literal["function"]
    name: str = ""


class _AllowedTools(_Object):
    type: Literal["allowed_tools"]
    tools: list[_NamedTool]
    mode: Literal["none", "auto", "required"]


class _Format(_Object):
    type: Literal["text", "json_object"]


class _Text(_Object):
    format: _Format
    verbosity: Literal["low", "medium", "high"] = "medium"


class _ReasoningOptions(_Object):
    effort: Literal["none", "low", "medium", "high", "xhigh"] | None
    summary: Literal["concise", "detailed", "auto"] | None


class _Cached(_Object):
    cached_tokens: int


class _Thought(_Object):
    reasoning_tokens: int


class _Usage(_Object):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: _Cached
    output_tokens_details: _Thought


class _Reason(_Object):
    reason: str


class _Error(_Object):
    code: str
    message: str


class OpenResponse(_Object):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    incomplete_details: _Reason | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[_Item]
    error: _Error | None
    tools: list[_Tool]
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | _AllowedTools
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: _Text
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: _ReasoningOptions | None
    # Optional since this version.
    user: str | None = None
    usage: _Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None


class _Event(_Object):
    sequence_number: int


class _ResponseEvent(_Event):
    type: Literal[
        "response.created", "response.queued", "response.in_progress", "response.completed",
        "response.failed", "response.incomplete",
    ]  # fmt: skip
    response: OpenResponse


class _ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: _Item | None


class _InItem(_Event):
    item_id: str
    output_index: int


class _InPart(_InItem):
    content_index: int


class _InSummary(_InItem):
    summary_index: int


class _PartEvent(_InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: _Part


class _SummaryPart(_InSummary):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: _Part


class _TextDelta(_InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[_Logprob] = []
    obfuscation: str = ""


class _TextDone(_InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[_Logprob] = []


class _RefusalDelta(_InPart):
    type: Literal["response.refusal.delta"]
    delta: str


class _RefusalDone(_InPart):
    type: Literal["response.refusal.done"]
    refusal: str


class _ReasoningDelta(_InPart):
    type: Literal["response.reasoning.delta"]
    delta: str
    obfuscation: str = ""


class _ReasoningDone(_InPart):
    type: Literal["response.reasoning.done"]
    text: str


class _SummaryDelta(_InSummary):
    type: Literal["response.reasoning_summary_text.delta"]
    delta: str
    obfuscation: str = ""


class _SummaryDone(_InSummary):
    type: Literal["response.reasoning_summary_text.done"]
    text: str


class _AnnotationAdded(_InPart):
    type: Literal["response.output_text.annotation.added"]
    annotation_index: int
    annotation: _Citation | None


class _ArgumentsDelta(_InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str
    obfuscation: str = ""


class _ArgumentsDone(_InItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


class _ErrorFacts(_Object):
    type: str
    code: str | None
    message: str
    param: str | None


class _ErrorEvent(_Event):
    type: Literal["error"]
    error: _ErrorFacts


OpenEvent = Annotated[
    _ResponseEvent | _ItemEvent | _PartEvent | _SummaryPart | _TextDelta | _TextDone | _RefusalDelta
    | _RefusalDone | _ReasoningDelta | _ReasoningDone | _SummaryDelta | _SummaryDone
    | _AnnotationAdded | _ArgumentsDelta | _ArgumentsDone | _ErrorEvent,
    Field(discriminator="type"),
]  # fmt: skip
_RESPONSE: TypeAdapter[Any] = TypeAdapter(OpenResponse)
_EVENT: TypeAdapter[Any] = TypeAdapter(OpenEvent)


def response_problems(body: Any) -> list[str]:
    """Return the errors in a response, each with its place."""
    return _problems(_RESPONSE, body)


def event_problems(event: Any) -> list[str]:
    """Return the errors in an event of a stream, each with its place."""
    return _problems(_EVENT, event)


def _problems(schema: TypeAdapter[Any], value: Any) -> list[str]:
    try:
        schema.validate_python(value)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors(include_url=False)
        ]
    return []
