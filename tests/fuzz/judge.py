"""Checks of a response against OpenAI's format, and estimates of a request's work."""

from __future__ import annotations

import json
from typing import Any

from fuzz.cases import Request
from fuzz.client import Answer
from latimer.schemas.openai.chat import ChatChunk, ChatCompletion
from latimer.schemas.openai.common import ErrorReply
from latimer.schemas.openai.completions import Completion, CompletionChunk
from latimer.schemas.openai.embeddings import EmbeddingList, Reranking
from latimer.schemas.openai.models import Detokenized, Tokenized
from pydantic import TypeAdapter, ValidationError

WHOLE: dict[str, TypeAdapter[Any]] = {
    "/v1/completions": TypeAdapter(Completion),
    "/v1/chat/completions": TypeAdapter(ChatCompletion),
    "/v1/embeddings": TypeAdapter(EmbeddingList),
    "/v1/rerank": TypeAdapter(Reranking),
    "/tokenize": TypeAdapter(Tokenized),
    "/detokenize": TypeAdapter(Detokenized),
}
CHUNK: dict[str, TypeAdapter[Any]] = {
    "/v1/completions": TypeAdapter(CompletionChunk),
    "/v1/chat/completions": TypeAdapter(ChatChunk),
}
_ERROR = TypeAdapter(ErrorReply)
# Responses that uvicorn sends itself, before there is a request.
UVICORN = (b"Invalid HTTP request received.", b"Unsupported upgrade request.")
# Number of tokens that an engine generates well within the time limit of a response.
MUCH = 2_000
CONTEXT = 512


def fields(request: Request) -> dict[str, Any]:
    """Return a request's body, or an empty object if it is not an object."""
    try:
        value = json.loads(request.body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def work(request: Request) -> int:
    """Return an estimate of the tokens that a request asks an engine for."""
    body = fields(request)

    def number(name: str, default: int) -> int:
        value = body.get(name)
        return int(value) if isinstance(value, int | float) and 0 <= value < 1e9 else default

    prompts = _prompts(body)
    default = 16 if "prompt" in body else CONTEXT
    tokens = number("max_completion_tokens", number("max_tokens", default))
    choices = max(number("n", 1), number("best_of", 1), 1)
    read = len(str(body.get("prompt"))) // 8 if body.get("echo") else 0
    return prompts * (choices * min(tokens, CONTEXT) + read)


def _prompts(body: dict[str, Any]) -> int:
    """Return the number of prompts in a body."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def problem(request: Request, answer: Answer, edited: bool) -> str | None:
    """Return a description of the fault of a response, or None.

    Args:
        edited: True if the engine sends invalid responses, so that its errors are allowed.
    """
    if answer.ended == "left":
        return None
    if answer.status is None or answer.ended != "whole":
        return _unanswered(request, answer, edited)
    if answer.status == 500:
        return "status 500"
    if answer.status > 500 and not edited:
        return f"status {answer.status} though the engine is well"
    if request.head is not None and (answer.body.startswith(UVICORN) or answer.replies > 1):
        return None
    is_head = request.head is not None and request.head.startswith(b"HEAD ")
    if is_head and (not answer.body or answer.body.startswith(b"HTTP/1.1 ")):
        # A response to HEAD has no body; these bytes belong to the response after it.
        return None
    try:
        _check(request, answer, edited)
    except (
        ValueError,
        ValidationError,
        AssertionError,
        KeyError,
        TypeError,
        RecursionError,
    ) as why:
        return f"status {answer.status}, not of OpenAI's format: {str(why)[:300]}"
    return None


def _unanswered(request: Request, answer: Answer, edited: bool) -> str | None:
    if request.head is not None:
        return None
    if answer.ended == "timeout":
        # A request for very many tokens need not end in time.
        return None if work(request) > MUCH else f"no answer within {answer.seconds:.0f} s"
    if edited and fields(request).get("oai_compat") is False:
        # A native response breaks off where the engine's does.
        return None
    return f"the connection was closed before the answer's end, status {answer.status}"


def _finite(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _json(text: bytes) -> Any:
    return json.loads(text.decode(), parse_constant=_finite)


def _check(request: Request, answer: Answer, edited: bool) -> None:
    kind = answer.headers.get("content-type", "")
    path, status = request.path, answer.status
    body = fields(request)
    native = request.head is None and body.get("oai_compat") is False
    if native and (status == 200 or kind != "application/json"):
        # A native response is the engine's own.
        return
    if status != 200:
        head_only = request.head is not None and not answer.body
        if not head_only:
            assert kind == "application/json", kind
            _check_error(_json(answer.body))
        return
    if request.head is not None:
        return
    if path in CHUNK and body.get("stream"):
        assert kind == "text/event-stream; charset=utf-8", kind
        _check_stream(path, answer.body, body, edited)
        return
    assert kind == "application/json", kind
    value = _json(answer.body)
    WHOLE[path].validate_python(value, strict=True)
    if path in CHUNK:
        _check_whole(value, body)


def _check_error(value: Any) -> None:
    _ERROR.validate_python(value, strict=True)
    assert value["error"].keys() == {"message", "type", "param", "code"}, value
    assert value["error"]["message"], "an error without a message"


def _expected(body: dict[str, Any]) -> int:
    return _prompts(body) * (body.get("n") or 1)


def _check_whole(value: Any, body: dict[str, Any]) -> None:
    choices = value["choices"]
    assert [one["index"] for one in choices] == list(range(_expected(body))), "indices"
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
    assert min(usage["prompt_tokens"], usage["completion_tokens"]) >= 0, usage
    for one in choices:
        logprobs = one["logprobs"]
        if logprobs is not None and "tokens" in logprobs:
            names = ("tokens", "token_logprobs", "text_offset")
            assert len({len(logprobs[name]) for name in names}) == 1, "lengths of logprobs"


def _check_stream(path: str, data: bytes, body: dict[str, Any], edited: bool) -> None:
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), f"the end is {done[:100]!r}, {rest[:100]!r}"
    assert all(event.startswith("data: ") for event in events), "an event without data"
    chunks = [_json(event[6:].encode()) for event in events]
    assert chunks, "a stream without events"
    if "error" in chunks[-1]:
        _check_error(chunks[-1])
        asked = chunks[-1]["error"]["type"] == "invalid_request_error"
        assert edited or asked, f"the stream ends with {chunks[-1]} though the engine is well"
        return
    ended = set()
    for chunk in chunks:
        CHUNK[path].validate_python(chunk, strict=True)
        for one in chunk["choices"]:
            assert one["index"] not in ended, "a choice goes on after its end"
            if one["finish_reason"] is not None:
                ended.add(one["index"])
    assert ended == set(range(_expected(body))), f"choices that ended: {sorted(ended)[:10]}"
