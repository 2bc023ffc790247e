"""`POST /v1/responses`: the request (contract of responses, 2.1)."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from .. import limits
from .chat import InstructAdapter
from .common import (
    MOVED,
    Array,
    EngineExtras,
    JsonObject,
    LogitBias,
    MaxTokens,
    Metadata,
    Request,
    Seed,
    Stop,
    invalid,
    without_nulls,
    wrong_type,
)
from .messages import Name, TextFormat, form_of
from .response_items import Item
from .response_tools import AnyTool, FlatToolChoice

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Fields of which a request may have one only.
_ALONE = frozenset(("previous_response_id", "conversation"))
# Fields that can take the place of `input`.
CONTEXTS = ("previous_response_id", "conversation", "prompt")


class FlatObjectFormat(Request):
    """One JSON object."""

    type: Literal["json_object"]


class FlatSchemaFormat(Request):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


def _drop_nulls(value: object) -> object:
    return without_nulls(value) if isinstance(value, dict) else value


FlatFormat = Annotated[
    Annotated[FlatObjectFormat | TextFormat | FlatSchemaFormat, Field(discriminator="type")],
    BeforeValidator(_drop_nulls),
]


class TextOptions(Request):
    """The format and the length of the text."""

    format: FlatFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def _check_reasoning(value: object) -> object:
    if isinstance(value, dict) and value.get("generate_summary") is not None:
        raise invalid(
            "Unknown parameter: '{param}'. Did you mean 'reasoning.summary'?",
            "unknown_parameter",
            ".generate_summary",
        )
    return _drop_nulls(value)


class ReasoningOptions(Request):
    """The amount of reasoning, and the form in which it is returned."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None
    mode: str | None = None


class ResponseCacheOptions(Request):
    """The way in which OpenAI caches a prompt; it has no effect here."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class ResponseStreamOptions(Request):
    """Options of a stream; without `include_obfuscation: true` no event is padded."""

    include_obfuscation: bool | None = None


class ConversationId(Request):
    """The id of a conversation."""

    id: str


Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


def _check_input(value: object) -> object:
    if not isinstance(value, str | list):
        raise wrong_type(value, "one of a string or array of input items")
    return value


Input = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[Annotated[Array[Item], Field(max_length=limits.MESSAGES.maximum)], Tag("array")],
    Discriminator(form_of),
    BeforeValidator(_check_input),
]


def _check_conversation(value: object) -> object:
    if not isinstance(value, str | dict | None):
        raise wrong_type(value, "one of a string or object")
    return {"id": value} if isinstance(value, str) else value


def _missing(name: str) -> Exception:
    return invalid(f"Missing required parameter: '{name}'.", "missing_required_parameter", name)


class ResponseRequest(EngineExtras, defer_build=False):
    """Body of `POST /v1/responses`.

    Null is the same as no field, except for `model` and `input`.
    """

    foreign = frozenset(
        {
            *EngineExtras.model_fields, "adapter", "add_generation_prompt", "chat_template_kwargs",
            "continue_final_message", "enable_thinking", "logit_bias", "seed", "stop",
        }
    )  # fmt: skip
    endpoint = "responses"
    is_stored_by_default: ClassVar[bool] = True

    model: str
    input: Input = ""
    access_programs: Any = None
    adapter: InstructAdapter | None = None
    add_generation_prompt: bool | None = None
    background: bool | None = None
    background_options: Any = None
    chat_template_kwargs: JsonObject | None = None
    client_metadata: Any = None
    context_management: Any = None
    continue_final_message: bool | None = None
    conversation: Annotated[ConversationId | None, BeforeValidator(_check_conversation)] = None
    enable_thinking: bool | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    image: Any = None
    include: Array[Include] | None = None
    instructions: str | None = None
    logit_bias: LogitBias = None
    max_output_tokens: MaxTokens = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    metadata: Metadata | None = None
    moderation: JsonObject | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    previous_response_id: str | None = None
    prompt: JsonObject | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    reasoning: Annotated[ReasoningOptions | None, BeforeValidator(_check_reasoning)] = None
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    seed: Seed | None = None
    service_tier: (
        Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None
    ) = None
    stop: Stop = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    text: Annotated[TextOptions | None, BeforeValidator(_drop_nulls)] = None
    tool_choice: FlatToolChoice | None = None
    tools: Annotated[list[AnyTool], Field(max_length=limits.TOOLS.maximum)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens to generate; None if there is no limit."""
        return self.max_output_tokens

    @property
    def logprobs(self) -> int | None:
        """The number of likely tokens at each position; None if no log-probabilities are asked."""
        asked = self.include is not None and "message.output_text.logprobs" in self.include
        return self.top_logprobs or 0 if asked or self.top_logprobs else None

    @property
    def effort(self) -> Effort | None:
        """The amount of reasoning that the request asks for."""
        return None if self.reasoning is None else self.reasoning.effort

    @model_validator(mode="before")
    @classmethod
    def _check_presence(cls, value: Any) -> Any:
        """Check the fields that OpenAI checks before all others, and drop null fields."""
        if not isinstance(value, dict):
            return value
        return _present(value)


def _present(body: dict[str, Any]) -> dict[str, Any]:
    if "model" not in body:
        raise _missing("model")
    if not MOVED.keys().isdisjoint(body):
        _check_moved(body)
    # Most bodies have no null, and need no copy.
    found = without_nulls(body) if None in body.values() else body
    if found.keys() >= _ALONE:
        raise invalid(
            "Mutually exclusive parameters: ''. Ensure you are only providing one of: "
            "'previous_response_id' or 'conversation'.",
            "mutually_exclusive_parameters",
        )
    if "input" not in body and not any(name in found for name in CONTEXTS):
        raise _missing("input")
    if found is body:
        return body
    if body["model"] is None:
        raise invalid(
            "Invalid type for '{param}': expected a string, but got an object instead.",
            "invalid_type",
            "model",
        )
    if "input" in body:
        found["input"] = body["input"]
    return found


def _check_moved(body: dict[str, Any]) -> None:
    for name, moved in MOVED.items():
        if body.get(name) is not None:
            raise invalid(
                f"Unsupported parameter: '{name}'. In the Responses API, this parameter has moved "
                f"to '{moved}'. Try again with the new parameter.",
                "unsupported_parameter",
            )


class InputTokensRequest(ResponseRequest):
    """Body of `POST /v1/responses/input_tokens`; a server of one model needs no `model`."""

    # A count has no defaults, and takes no fields of other servers.
    endpoint = None  # type: ignore[assignment]
    is_stored_by_default: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _check_presence(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return _present({**value, "model": value.get("model") or ""})
