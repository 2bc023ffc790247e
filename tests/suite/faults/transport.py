"""Faults in routes, errors, headers and models, under load, and after the death of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latimer.conformance.checks.errors import INVALID
from latimer.conformance.checks.hosted import BEYOND, STRONG
from suite.faults.edits import (
    drop,
    error,
    has,
    headers,
    lacks,
    put,
    rejects,
    reply,
    request,
    saying,
    says,
    swap,
    turn,
)
from suite.rules import Refused
from suite.server import COMPLETIONS, GONE, Fault
from suite.work import CHAT


def _accepts(path: str, changes: Mapping[str, Any]) -> Fault:
    """Return a fault that ignores invalid values."""

    def invalid(body: dict[str, Any]) -> bool:
        return all(
            body.get(name) == value and type(body[name]) is type(value)
            for name, value in changes.items()
        )

    def without(body: dict[str, Any]) -> dict[str, Any]:
        hello = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {}
        return {**hello, **{name: one for name, one in body.items() if name not in changes}}

    return request(without, at=path, when=invalid)


class _Names(Fault):
    """A fault that writes the names of unknown fields into a header."""

    names: Any = ()

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Keep the names with line breaks, which only this fault's check sends."""
        self.names = [name for name in body if "\n" in name]
        return {name: value for name, value in body.items() if name not in self.names}

    def headers(self, status: int, headers: dict[str, str]) -> dict[str, str]:
        """Return headers with a name."""
        return {**headers, "x-ignored": self.names.pop()} if self.names else headers


def _no_deep(body: bytes) -> bytes:
    if body.count(b"[") > 5000:
        raise Refused("Too deep.", status=500)
    return body


ERRORS = {
    "refuses-charset": rejects(lambda method, path, found: (
        "charset" in found.get("content-type", "")), 415),
    "refuses-apps": rejects(lambda method, path, found: (
        not found.get("origin", "http").startswith("http")), 403),
    "500-for-empty-bearer": rejects(lambda method, path, found: (
        found.get("authorization", "x").strip() == "Bearer")),
    "500-for-content-type": error(status=500, when=says("content type")),
    "500-for-bad-json": error(status=500, when=says("could not parse", "no JSON")),
    "500-for-infinity": error(status=500, when=says("not finite")),
    "500-for-no-object": error(status=500, when=says("must be an object")),
    "404-for-method": error(status=404, when=says("Not allowed")),
    "405-without-allow": headers(drop("allow")),
    "html-for-unknown-path": error(lambda body: b"<h1>Not Found</h1>", when=says("Invalid URL")),
    "first-key-wins": Fault(raw=lambda body: (
        body.replace(b'"prompt": 5, "prompt": "a"', b'"prompt": 5'))),
    "422-for-invalid": error(status=422, when=lambda one: (
        one["status"] == 400 and one["error"]["param"])),
    "detail-errors": error(lambda body: {"detail": body["error"]["message"]}),
    "string-errors": error(lambda body: {"error": body["error"]["message"]}),
    "errors-without-param": error(drop("error.param")),
    "errors-with-numbers": Fault(error=lambda status, one, sent: (
        status, {"error": {**one, "code": status}})),
    "other-error-type": error(put("error.type", "bad")),
    "errors-name-nothing": error(put("error.message", "Bad request."), put("error.param", None)),
    "500-for-missing-model": error(status=500, when=says("model parameter")),
    "400-for-unknown-model": error(status=400, when=says("model does not exist")),
    "422-for-missing-messages": error(status=422, when=says("Missing required")),
    "context-without-code": error(swap("error.code", "context_length_exceeded", None)),
    "context-in-other-words": error(turn("error.message", lambda text: (
        text.replace("maximum context length is", "context is")))),
    "context-shortened": request(swap("max_tokens", 100_000_000, 16)),
    "500-for-unknown-field": error(status=500, when=says("Unknown parameter")),
    "ignores-stream-options": request(drop("stream_options"), when=lacks("stream")),
    "ignores-top-logprobs-alone": request(drop("top_logprobs"), when=lacks("logprobs")),
    "ignores-metadata": request(drop("metadata")),
    "500-for-ids": error(status=500, when=says("beyond the vocabulary")),
    "500-for-chat-context": error(status=500, when=lambda one: (
        says("maximum context")(one) and one["error"]["param"] == "messages")),
    "500-for-depth": Fault(raw=_no_deep),
    "accepts-broken-utf8": Fault(raw=lambda body: body.decode("utf-8", "replace").encode()),
    "accepts-nan": Fault(raw=lambda body: body.replace(b"NaN", b"1").replace(b"Infinity", b"1")),
    "wrong-key-403": Fault(wrong_key=403),
    **{f"accepts-{name}": _accepts(path, changes)
       for name, path, changes, _, _ in (*INVALID, *STRONG)},
    **{f"accepts-{name}": _accepts(COMPLETIONS, changes) for name, changes, _, _ in BEYOND},
}  # fmt: skip
HEADERS = {
    **{f"no-{name}": headers(drop(name)) for name in (
        "x-request-id", "openai-processing-ms", "openai-version", "access-control-allow-origin")},
    "same-request-id": headers(put("x-request-id", "req_1")),
    "no-stream-request-id": headers(drop("x-request-id"),
                                    when=has("content-type", saying("text/event"))),
    "streams-cached": headers(drop("cache-control")),
    "streams-errors": headers(put("content-type", "text/event-stream"), when=has("status", 400)),
    "text-replies": headers(put("content-type", "text/plain"), when=lambda found: (
        found["status"] == 200 and "json" in found["content-type"])),
    "html-errors": headers(put("content-type", "text/html"),
                           when=has("status", lambda status: status >= 400)),
    "streams-as-text": headers(turn("content-type", lambda kind: (
        kind.replace("event-stream", "plain")))),
    "field-names-in-headers": _Names(),
}  # fmt: skip
MODELS = {
    "models-no-object": reply(put("object", "models"), at="/models"),
    "models-empty": reply(put("data", []), at="/models"),
    "models-twice": reply(turn("data", lambda data: data * 2), at="/models"),
    "models-created-float": reply(put("data.*.created", 1.5), at="/models"),
    "models-no-owner": reply(drop("data.*.owned_by"), at="/models"),
    "models-no-slash": rejects(lambda method, path, found: "%2F" in path),
    "models-unknown-200": error(status=500, when=says("model does not exist")),
    "models-other-id": request(swap("model", "org/toy", "x"), when=lambda body: (
        {**body, "model": 0} == {"model": 0, "max_tokens": 1, "prompt": "Hello"})),
    "models-no-context": reply(drop("data.*.context_length"), drop("context_length")),
    "models-other-context": reply(turn("data.*.context_length", lambda size: 4096),
                                  turn("context_length", lambda size: 4096)),
    "500-for-delete": rejects(lambda method, path, found: (
        method == "DELETE" and path.startswith("/models"))),
}  # fmt: skip
LOAD = {
    "stays-after-disconnect": Fault(stays=5.0),
    "429-after-cancelled": Fault(after_cancelled=429),
    "lingers": Fault(lingers=True),
    "waits-till-the-end": Fault(buffers=True),
    "load-is-500": Fault(crowded=500),
    "load-without-retry": Fault(crowded=503),
    "answers-mixed": Fault(mixes=True),
    "keepalive-none": Fault(comment=b""),
    "keepalive-joined": Fault(comment=b": keep-alive "),
    "keepalive-events": Fault(comment=b"data: {}\n\n"),
    "break-silent": Fault(on_break=lambda chunk: None),
    "break-text": Fault(on_break=lambda chunk: {"error": "The engine is gone."}),
    "break-finish": Fault(on_break=put("choices", [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}])),
    "break-usage": Fault(on_break=lambda chunk: {
        "error": GONE,
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}),
    "break-400": Fault(down=400),
    "break-response-silent": Fault(on_failure=lambda found: []),
    "break-response-completed": Fault(on_failure=lambda found: [
        {**found[-1], "type": "response.completed"}]),
    "break-response-text": Fault(on_failure=lambda found: [
        {**found[0], "error": "The engine is gone."}, found[1]]),
}  # fmt: skip
FAULTS = ERRORS | HEADERS | MODELS | LOAD
