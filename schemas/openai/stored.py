"""Stored chat completions: queries, updates and responses (contract, section 4)."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import NotRequired, TypedDict

from .chat import AssistantText, ChatLogprobs
from .common import FinishReason, Metadata, ReplyHead, Request, Usage

_NUMBER = re.compile("-?[0-9]{1,100}")


def as_number(value: object) -> object:
    """Return the integer in a query parameter."""
    return int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


Limit = Annotated[Annotated[int, Field(ge=1, le=100)], BeforeValidator(as_number)]


class ListQuery(Request):
    """The query of a list: the page after the item `after`."""

    after: str | None = None
    limit: Limit = 20
    order: Literal["asc", "desc"] = "asc"


class CompletionsQuery(ListQuery):
    """The query of a list of stored chat completions or responses; all filters must match."""

    model: str | None = None
    metadata: Metadata | None = None


class MetadataUpdate(Request):
    """Body of `POST /v1/chat/completions/{id}`; null removes the metadata."""

    metadata: Metadata | None


class StoredMessage(AssistantText):
    """The assistant's message, with the fields that `ChatMessage` may lack."""

    tool_calls: list[Any] | None
    function_call: Any


class StoredChoice(TypedDict):
    """One choice of a stored chat completion."""

    index: int
    message: StoredMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class StoredCompletion(ReplyHead):
    """A stored chat completion with parameters of its request."""

    object: Literal["chat.completion"]
    choices: list[StoredChoice]
    usage: Usage
    service_tier: str
    request_id: str
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    tools: list[Any] | None
    tool_choice: Any
    response_format: Any
    input_user: str | None
    metadata: dict[str, str]


class ListedMessage(TypedDict):
    """A message of a stored chat completion's request, with its calls and results if it has any."""

    id: str
    role: str
    content: str | None
    name: str | None
    content_parts: list[Any] | None
    refusal: NotRequired[str | None]
    audio: NotRequired[Any]
    tool_calls: NotRequired[list[Any] | None]
    function_call: NotRequired[Any]
    tool_call_id: NotRequired[str]


class Deleted(TypedDict):
    """The confirmation of a deletion."""

    object: Literal["chat.completion.deleted"]
    id: str
    deleted: Literal[True]


def _flag(value: object) -> object:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(_flag)]
Event = Annotated[Annotated[int, Field(ge=0)], BeforeValidator(as_number)]


class RetrieveQuery(Request):
    """The query of `GET /v1/responses/{id}`."""

    # The values of `include[]`; what is stored is returned as it was.
    include: Any = None
    include_obfuscation: Flag | None = None
    starting_after: Event | None = None
    stream: Flag = False


class ItemsQuery(ListQuery):
    """The query of `GET /v1/responses/{id}/input_items`; the newest item is the first."""

    # The values of `include[]`; what is stored is returned as it was.
    include: Any = None
    order: Literal["asc", "desc"] = "desc"
