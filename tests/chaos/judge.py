"""Checks of a reply: that it is whole, of OpenAI's format, and the right one for its request."""

from __future__ import annotations

import json
from typing import Any

from latimer.schemas.openai.chat import ChatChunk, ChatCompletion
from latimer.schemas.openai.common import ErrorReply
from latimer.schemas.openai.completions import Completion, CompletionChunk
from latimer.schemas.openai.embeddings import EmbeddingList, Reranking
from latimer.schemas.openai.models import Detokenized, Tokenized
from pydantic import TypeAdapter

from chaos.client import Reply, Request

# Statuses that a request can get from a server and an engine that are well, and from a server
# whose engine fails.
WELL = frozenset(range(200, 500))
FAILING = WELL | {502, 503, 504}
WHOLE: dict[str, TypeAdapter[Any]] = {
    "/completions": TypeAdapter(Completion),
    "/chat/completions": TypeAdapter(ChatCompletion),
    "/embeddings": TypeAdapter(EmbeddingList),
    "/rerank": TypeAdapter(Reranking),
    "/tokenize": TypeAdapter(Tokenized),
    "/detokenize": TypeAdapter(Detokenized),
}
CHUNK: dict[str, TypeAdapter[Any]] = {
    "/completions": TypeAdapter(CompletionChunk),
    "/chat/completions": TypeAdapter(ChatChunk),
}
_ERROR = TypeAdapter(ErrorReply)
# Replies that uvicorn sends itself, before there is a request.
UVICORN = (b"Invalid HTTP request received.", b"Unsupported upgrade request.")
_STATUS = {
    "engine_error": 502, "engine_unavailable": 503, "engine_timeout": 504,
    "rate_limit_exceeded": 429, "server_shutting_down": 503,
}  # fmt: skip
_CODE = {502: "engine_error", 504: "engine_timeout", 429: "rate_limit_exceeded"}


def judge(reply: Reply, expect: frozenset[int] = WELL, says: str = "") -> list[str]:
    """Return a sentence for each violation in a reply.

    Args:
        expect: the allowed statuses; an error event of a stream counts as one.
        says: a word that an error's message, param or code must contain.
    """
    request = reply.request
    if reply.problem == "left":
        return []
    if reply.problem:
        return _unfinished(reply, expect)
    if request.head is not None and reply.status != 500 and _is_not_for(reply):
        return []
    try:
        error = error_of(reply)
        status = reply.status if error is None else error[0]
        found = [] if status in expect else [f"expected {_listed(expect)}, got {reply}"]
        if _is_native(reply):
            return found
        if error is None:
            if request.head is None:
                _check(reply)
            return found
        if request.head is None or reply.body:
            found += shape(reply, *error)
        if says and says not in json.dumps(error[1], ensure_ascii=False):
            found.append(f"the error does not say {says!r}: {reply}")
    except (ValueError, AssertionError, LookupError, TypeError, RecursionError) as why:
        return [f"status {reply.status}, not of OpenAI's format: {str(why)[:300]}: {reply}"]
    return found


def error_of(reply: Reply) -> tuple[int, Any] | None:
    """Return the status and body of an error or an error event, or None without an error."""
    if reply.status >= 300 or reply.status < 200:
        return reply.status, reply.json()
    if reply.streamed:
        for event in reply.events():
            if event.startswith('{"error"'):
                body = json.loads(event)
                return _STATUS.get(body["error"].get("code"), 400), body
    return None


def shape(reply: Reply, status: int, body: Any) -> list[str]:
    """Check that an error is OpenAI's error object with the right code for its status."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return [f"no error object of OpenAI's: {reply}"]
    found = []
    _ERROR.validate_python(body, strict=True)
    if not error["message"]:
        found.append(f"an error without a message: {reply}")
    if len(error["message"]) > 4096:
        found.append(f"an error's message has {len(error['message'])} characters")
    if status == 500:
        found.append(f"an unhandled exception: {reply}")
    if status in _CODE and error["code"] != _CODE[status]:
        found.append(f"status {status} with the code {error['code']}: {reply}")
    if not reply.streamed:
        kind = reply.headers.get("content-type")
        if kind != "application/json":
            found.append(f"an error of type {kind}: {reply}")
        if status in (429, 503) and "retry-after-ms" not in reply.headers:
            found.append(f"no retry-after-ms: {reply}")
    return found


def _listed(statuses: frozenset[int]) -> str:
    known = {WELL: "no error of the server", FAILING: "no unhandled error"}
    return known.get(statuses) or " or ".join(map(str, sorted(statuses)))


def _unfinished(reply: Reply, expect: frozenset[int]) -> list[str]:
    if reply.request.head is not None:
        return []
    if expect >= FAILING and reply.request.fields().get("oai_compat") is False:
        # A native reply breaks off where the engine's does.
        return []
    return [f"no whole reply: {reply}"]


def _is_not_for(reply: Reply) -> bool:
    """Return True if a reply to raw bytes is uvicorn's own, or not to the first request in them."""
    if reply.replies > 1 or reply.body.startswith(UVICORN):
        return True
    # A reply to HEAD has no body; these bytes belong to the reply after it.
    is_head = (reply.request.head or b"").startswith(b"HEAD ")
    return is_head and (not reply.body or reply.body.startswith(b"HTTP/1.1 "))


def _is_native(reply: Reply) -> bool:
    """Return True if a reply is the engine's own."""
    if reply.request.head is not None or reply.request.fields().get("oai_compat") is not False:
        return False
    return reply.status == 200 or reply.headers.get("content-type") != "application/json"


def _check(reply: Reply) -> None:
    """Check a successful reply.

    Raises:
        ValueError: it is not of OpenAI's format.
        AssertionError: it is of another format, or not what the request asks for.
    """
    path, body = reply.request.path.removeprefix("/v1"), reply.request.fields()
    kind = reply.headers.get("content-type", "")
    if path in CHUNK and (body.get("stream") or (reply.streamed and not body)):
        assert kind == "text/event-stream; charset=utf-8", kind
        _check_stream(reply, CHUNK[path], body)
    elif path in WHOLE and reply.request.method == "POST":
        assert kind == "application/json", kind
        value = _json(reply.body.decode())
        WHOLE[path].validate_python(value, strict=True)
        if path in CHUNK:
            _check_whole(value, body, reply.wanted)
    if reply.wanted is not None:
        for text in reply.texts().values():
            assert text == reply.wanted, f"the answer is {text[:200]!r}, not {reply.wanted!r}"


def _finite(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_finite)


def prompts(body: dict[str, Any]) -> int:
    """Return the number of prompts in a body."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def _choices(body: dict[str, Any], found: int) -> int:
    """Return the number of choices that a body asks for, or those found if it is not known."""
    return prompts(body) * (body.get("n") or 1) if body else found


def _check_whole(value: Any, body: dict[str, Any], wanted: str | None) -> None:
    choices, usage = value["choices"], value["usage"]
    assert [one["index"] for one in choices] == list(range(_choices(body, len(choices)))), "indices"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
    assert min(usage["prompt_tokens"], usage["completion_tokens"]) >= 0, usage
    for one in choices:
        assert one["finish_reason"] is not None, "a choice without a finish_reason"
        logprobs = one["logprobs"]
        if logprobs is not None and "tokens" in logprobs:
            names = ("tokens", "token_logprobs", "text_offset")
            assert len({len(logprobs[name]) for name in names}) == 1, "lengths of logprobs"
    if wanted is not None:
        # The engines that are asked for a text have a token for each byte.
        size = len(wanted.encode())
        counted = usage["completion_tokens"]
        assert not counted % max(size, 1), f"an answer of {size} tokens is counted as {counted}"


def _check_stream(reply: Reply, chunk_of: TypeAdapter[Any], body: dict[str, Any]) -> None:
    *events, done, rest = reply.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), f"the end is {done[:100]!r}, {rest[:100]!r}"
    assert events, "a stream without events"
    ended = set()
    for event in events:
        assert event.startswith("data: "), "an event without data"
        chunk = _json(event[6:])
        chunk_of.validate_python(chunk, strict=True)
        for one in chunk["choices"]:
            assert one["index"] not in ended, "a choice is continued after its end"
            if one["finish_reason"] is not None:
                ended.add(one["index"])
    assert ended == set(range(_choices(body, len(ended)))), (
        f"choices that ended: {sorted(ended)[:10]}"
    )


def work(request: Request, context: int) -> int:
    """Return an estimate of the tokens that a request asks an engine for."""
    body = request.fields()

    def number(name: str, default: int) -> int:
        value = body.get(name)
        return int(value) if isinstance(value, int | float) and 0 <= value < 1e9 else default

    default = 16 if "prompt" in body else context
    tokens = number("max_completion_tokens", number("max_tokens", default))
    choices = max(number("n", 1), number("best_of", 1), 1)
    read = len(str(body.get("prompt"))) // 8 if body.get("echo") else 0
    return prompts(body) * (choices * min(tokens, context) + read)
