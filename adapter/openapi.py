"""The API as an OpenAPI document, from the routes and the schemas of requests and replies.

The document describes what this server does, also for fields that OpenAI's own document lacks.
Client generators read it, and so does the reference of the documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict, override

from ..schemas.anthropic.messages import CountTokensRequest, MessagesRequest
from ..schemas.openai import (
    audio,
    chat,
    completions,
    conversations,
    embeddings,
    models,
    responses,
    stored,
    transcriptions,
)
from ..schemas.openai import response_objects as objects
from ..schemas.openai.common import ErrorReply, JsonObject, Request
from .endpoints.operations import metrics
from .routes import CLOSED_ROUTES, METRICS, OPEN_ROUTES, ROUTES, Endpoint, Later, refuse

Document: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["validation", "serialization"]


class Page(TypedDict):
    """A page of a list; `last_id` is the `after` of the next page."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompletionPage(Page):
    """A page of stored chat completions."""

    data: list[stored.StoredCompletion]


class ResponsePage(Page):
    """A page of stored responses."""

    data: list[objects.ResponseObject]


class MessagePage(Page):
    """A page of the messages of a stored chat completion."""

    data: list[stored.ListedMessage]


class ItemPage(Page):
    """A page of the items of a conversation, or of the input of a response."""

    data: list[JsonObject]


class Status(TypedDict):
    """The status of a server that works."""

    status: str


class Operation(NamedTuple):
    """The body, the query and the reply of a method of a path.

    Args:
        tag: the subject, as the documentation groups them.
        reply: the type of the reply; `str` for text that is not JSON, and `bytes` for audio.
        body: the type of the request's body, if it has one.
        query: the model of the query's parameters.
        event: the type of the data of a stream's events.
        is_form: True if the body is a form, not JSON.
    """

    tag: str
    reply: Any
    body: Any = None
    query: type[Request] | None = None
    event: Any = None
    is_form: bool = False


OPERATIONS: Mapping[str, Operation] = {
    "create_chat_completion": Operation(
        "Chat", chat.ChatCompletion, chat.ChatRequest, event=chat.ChatChunk
    ),
    "list_chat_completions": Operation(
        "Stored chat completions", CompletionPage, query=stored.CompletionsQuery
    ),
    "retrieve_chat_completion": Operation("Stored chat completions", stored.StoredCompletion),
    "update_chat_completion": Operation(
        "Stored chat completions", stored.StoredCompletion, stored.MetadataUpdate
    ),
    "delete_chat_completion": Operation("Stored chat completions", stored.Deleted),
    "list_messages": Operation("Stored chat completions", MessagePage, query=stored.ListQuery),
    "create_completion": Operation(
        "Completions",
        completions.Completion,
        completions.CompletionRequest,
        event=completions.CompletionChunk,
    ),
    "create_response": Operation(
        "Responses",
        objects.ResponseObject,
        responses.ResponseRequest,
        event=objects.ResponseEvent,
    ),
    "list_responses": Operation("Responses", ResponsePage, query=stored.CompletionsQuery),
    "count_input_tokens": Operation("Responses", objects.InputTokens, responses.InputTokensRequest),
    "retrieve_response": Operation(
        "Responses",
        objects.ResponseObject,
        query=stored.RetrieveQuery,
        event=objects.ResponseEvent,
    ),
    "delete_response": Operation("Responses", objects.DeletedResponse),
    "cancel_response": Operation("Responses", objects.ResponseObject),
    "list_input_items": Operation("Responses", ItemPage, query=stored.ItemsQuery),
    "create_conversation": Operation(
        "Conversations", conversations.Conversation, conversations.CreateConversation
    ),
    "retrieve_conversation": Operation("Conversations", conversations.Conversation),
    "update_conversation": Operation(
        "Conversations", conversations.Conversation, stored.MetadataUpdate
    ),
    "delete_conversation": Operation("Conversations", conversations.DeletedConversation),
    "list_items": Operation("Conversations", ItemPage, query=stored.ItemsQuery),
    "append_items": Operation("Conversations", ItemPage, conversations.AddItems),
    "retrieve_item": Operation("Conversations", JsonObject),
    "delete_item": Operation("Conversations", conversations.Conversation),
    "create_message": Operation("Messages", JsonObject, MessagesRequest, event=JsonObject),
    "count_message_tokens": Operation("Messages", JsonObject, CountTokensRequest),
    "create_embeddings": Operation(
        "Embeddings", embeddings.EmbeddingList, embeddings.EmbeddingRequest
    ),
    "rerank": Operation("Embeddings", embeddings.Reranking, embeddings.RerankRequest),
    "create_transcription": Operation(
        "Audio",
        transcriptions.Transcript,
        transcriptions.TranscriptionForm,
        event=transcriptions.TranscriptEvent,
        is_form=True,
    ),
    "create_translation": Operation(
        "Audio", transcriptions.Transcript, transcriptions.TranslationForm, is_form=True
    ),
    "create_speech": Operation("Audio", bytes, audio.SpeechRequest, event=audio.SpeechEvent),
    "list_voices": Operation("Audio", audio.VoiceList),
    "list_models": Operation("Models", models.ModelList),
    "retrieve_model": Operation("Models", models.ModelObject),
    "tokenizer_info": Operation("Tokenizer", models.TokenizerInfo),
    "tokenize": Operation("Tokenizer", models.Tokenized, models.TokenizeRequest),
    "detokenize": Operation("Tokenizer", models.Detokenized, models.DetokenizeRequest),
    "health": Operation("Operation", Status),
    "ready": Operation("Operation", Status),
    "metrics": Operation("Operation", str),
    "openapi": Operation("Operation", JsonObject),
}

# Request headers that have an effect, and those of replies. Each is shown in the documentation.
REQUEST_HEADERS: Mapping[str, str] = {
    "authorization": "`Bearer KEY`, if the server has keys.",
    "x-api-key": "The key, as clients of Anthropic's API send it.",
    "anthropic-version": "Asks for Anthropic's form of the list of models and of errors.",
    "content-type": "`application/json`, of requests with a body.",
    "x-client-request-id": "The client's own id of the request, for the log and the engine.",
    "traceparent": "The span that is the parent of the request's span.",
    "tracestate": "Further data of the trace, sent on to the engine.",
    "x-session-id": "The session of the request: its requests go to the same engine of a fleet.",
    "x-session-affinity": "The same, as other clients name it.",
    "x-claude-code-session-id": "The same, as Claude Code names it.",
}
REPLY_HEADERS: Mapping[str, str] = {
    "x-request-id": "The id of the request, which the log has too.",
    "request-id": "The same, in Anthropic's API.",
    "openai-processing-ms": "Milliseconds from the request to the head of the reply.",
    "openai-version": "The version of OpenAI's API.",
    "x-latimer-ignored": "Fields of the request that had no effect.",
    "x-latimer-inexact": "Fields of the request that the engine only approximates.",
    "x-latimer-model": "The model that served the request, if it is a fallback.",
    "x-latimer-engine": "The engine of a fleet that served the request.",
    "x-latimer-affinity": "`hit` or `miss`: if the engine had a part of the prompt, or `none`.",
    "retry-after": "Seconds to wait before the request is sent again.",
    "retry-after-ms": "The same in milliseconds.",
    "x-ratelimit-limit-requests": "Requests that the key may send in a minute.",
    "x-ratelimit-remaining-requests": "Requests that are left.",
    "x-ratelimit-reset-requests": "Time until all requests are available again.",
    "x-ratelimit-limit-tokens": "Tokens that the key may use in a minute.",
    "x-ratelimit-remaining-tokens": "Tokens that are left.",
    "x-ratelimit-reset-tokens": "Time until all tokens are available again.",
}

# The headers that the document has with each reply.
_HEADS = ("x-request-id", "x-latimer-ignored", "x-latimer-inexact")

SERVER = "http://127.0.0.1:8000"
_REFERENCE = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")


class _Schemas(GenerateJsonSchema):
    """JSON schemas without a `default` of null, which generators take for a value to send."""

    @override
    def default_schema(self, schema: Any) -> Any:
        found = super().default_schema(schema)
        if found.get("default", ...) is None:
            del found["default"]
        return found

    @override
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def endpoints() -> Iterator[tuple[str, str, Endpoint]]:
    """Yield the path, the method and the endpoint of each operation."""
    own = {**OPEN_ROUTES, **CLOSED_ROUTES, METRICS: {"GET": metrics}}
    for path, methods in {**ROUTES, **own}.items():
        for method, endpoint in methods.items():
            if endpoint is not refuse:
                yield path, method, endpoint.load() if isinstance(endpoint, Later) else endpoint


@cache
def as_json() -> bytes:
    """Return the document of an app as JSON.

    Its addresses are relative to its own, also below a mount, or a prefix that a proxy strips.
    """
    return orjson.dumps(document("."))


def document(server: str = SERVER) -> Document:
    """Return the OpenAPI document, version 3.1; it takes about 0.5 s.

    Args:
        server: the address of the server, without `/v1`.
    """
    found = [*endpoints()]
    schemas, definitions = _schemas_of(
        [OPERATIONS[name] for *_, one in found if (name := one.__name__) in OPERATIONS]
    )
    paths: Document = {}
    seen: set[str] = set()
    for path, method, endpoint in found:
        item = paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})
        if path not in ROUTES:
            item["servers"] = [{"url": server}]
        names = _PARAMETER.findall(path)
        if names:
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        name = endpoint.__name__
        # Ids of operations are unique; `/v2/rerank` is `/rerank`.
        unique = name if name not in seen else f"{name}_{path.split('/')[1]}"
        seen.add(unique)
        item[method.lower()] = {
            "operationId": unique,
            **_described(endpoint, schemas),
            **({"security": []} if path in OPEN_ROUTES else {}),
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Latimer",
            "version": version("latimer"),
            "description": "OpenAI's API over local LLM engines.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": f"{server}/v1"}],
        # A server without keys needs none.
        "security": [{"key": []}, {}],
        "tags": [{"name": tag} for tag in dict.fromkeys(one.tag for one in OPERATIONS.values())],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(definitions.items())),
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in REPLY_HEADERS.items()
            },
            "responses": {
                "error": {
                    "description": "An error.",
                    "content": {"application/json": {"schema": schemas[ErrorReply, _REPLY]}},
                }
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


# The media types of replies that are not JSON.
_KINDS: Mapping[Any, str] = {str: "text/plain", bytes: "audio/*"}
_BODY: Mode = "validation"
_REPLY: Mode = "serialization"


def _schemas_of(
    found: list[Operation],
) -> tuple[Mapping[tuple[Any, Mode], Document], Document]:
    """Return the schema of each type of some operations, and the definitions they refer to."""
    types: list[tuple[Any, Mode]] = [(ErrorReply, _REPLY)]
    for one in found:
        if one.body is not None:
            types.append((one.body, _BODY))
        types += [(each, _REPLY) for each in (one.reply, one.event) if each is not None]
    unique = [*dict.fromkeys(types)]
    schemas, rest = TypeAdapter.json_schemas(
        [(index, mode, TypeAdapter(each)) for index, (each, mode) in enumerate(unique)],
        ref_template=_REFERENCE,
        schema_generator=_Schemas,
    )
    for one in rest["$defs"].values():
        # Generators make the name of a class from it, and the key is the name.
        one.pop("title", None)
    by_type = {key: schemas[index, key[1]] for index, key in enumerate(unique)}
    return by_type, rest["$defs"]


def _described(endpoint: Endpoint, schemas: Mapping[tuple[Any, Mode], Document]) -> Document:
    """Return what an operation's docstring says, and its parameters, body and replies."""
    summary, _, rest = (endpoint.__doc__ or "").partition("\n\n")
    found: Document = {"summary": " ".join(summary.split()).rstrip(".")}
    text = " ".join(rest.partition("Raises:")[0].split())
    if text:
        found["description"] = text
    one = OPERATIONS.get(endpoint.__name__)
    reply: Document = {"description": "The reply."}
    if one is not None:
        found["tags"] = [one.tag]
        if one.query is not None:
            found["parameters"] = [*_parameters(one.query)]
        if one.body is not None:
            form = "multipart/form-data" if one.is_form else "application/json"
            content = {form: {"schema": schemas[one.body, _BODY]}}
            found["requestBody"] = {"required": True, "content": content}
        kind = _KINDS.get(one.reply, "application/json")
        reply["content"] = {kind: {"schema": schemas[one.reply, _REPLY]}}
        if one.event is not None:
            reply["description"] = "The reply; with `stream`, events with this data each."
            reply["content"]["text/event-stream"] = {"schema": schemas[one.event, _REPLY]}
    reply["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in _HEADS}
    error = {"$ref": "#/components/responses/error"}
    found["responses"] = {"200": reply, "4XX": error, "5XX": error}
    return found


def _parameters(query: type[Request]) -> Iterator[Document]:
    """Yield the parameters of a query; `metadata[key]=value` filters by metadata."""
    properties = TypeAdapter(query).json_schema(schema_generator=_Schemas)["properties"]
    for name, found in properties.items():
        style = {"style": "deepObject", "explode": True} if name == "metadata" else {}
        yield {"name": name, "in": "query", **style, "schema": found}
