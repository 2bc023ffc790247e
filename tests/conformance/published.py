"""Strict validation of replies by the published types of OpenAI's `openai` package.

Two exceptions apply where the published types contradict OpenAI's replies. The first entry of
echoed log-probabilities may be null. `finish_reason` may be null in all chunks of a completion
except the last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, get_args

from openai.pagination import SyncPage
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ValidationError

REPLIES: Mapping[str, type[BaseModel]] = {
    "/completions": Completion,
    "/chat/completions": ChatCompletion,
    "/embeddings": CreateEmbeddingResponse,
    "/models": SyncPage[Model],
    "/responses": Response,
}
# The types of a streamed response's events, by their `type`.
EVENTS: Mapping[str, type[BaseModel]] = {
    get_args(event.model_fields["type"].annotation)[0]: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
}


def problem(path: str, body: Any, sent: Mapping[str, Any]) -> str | None:
    """Return the first error in a reply, or None if it is valid."""
    model = REPLIES.get(path)
    if model is None:
        return None
    if sent.get("echo") and isinstance(body, dict):
        body = _without_nulls(copy.deepcopy(body))
    return first_wrong(model, body)


def chunk_problem(path: str, chunk: Any) -> str | None:
    """Return the first error in a chunk of a stream, or None if it is valid."""
    if path == "/chat/completions":
        return first_wrong(ChatCompletionChunk, chunk)
    chunk = _without_nulls(copy.deepcopy(chunk))
    for choice in chunk.get("choices", ()):
        choice["finish_reason"] = choice.get("finish_reason") or "stop"
    return first_wrong(Completion, chunk)


def _without_nulls(body: Any) -> Any:
    """Replace null in the first entries of log-probabilities with values that the types accept."""
    for choice in body.get("choices", ()):
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            for name, neutral in (("token_logprobs", 0.0), ("top_logprobs", {})):
                values = logprobs.get(name)
                if isinstance(values, list) and values and values[0] is None:
                    values[0] = neutral
    return body


def event_problem(event: Any) -> str | None:
    """Return the first error in an event of a streamed response, or None if it is valid."""
    kind = str(event.get("type")) if isinstance(event, dict) else ""
    if kind not in EVENTS:
        return f"type: there is no event {kind!r}"
    return first_wrong(EVENTS[kind], event)


def first_wrong(model: type[BaseModel], body: Any) -> str | None:
    """Return the first error in a body of a published type, or None if it is valid."""
    return _first(lambda: model.model_validate(body, strict=True))


def _first(validate: Callable[[], Any]) -> str | None:
    try:
        validate()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}, but got {str(first['input'])[:100]!r}"
    return None
