"""Faults in routes, errors, headers and the list of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from latimer.conformance.checks.errors import INVALID
from latimer.conformance.checks.hosted import BEYOND, STRONG
from suite.faults.base import (
    as_body,
    broken,
    fail,
    header,
    in_stream,
    only,
    says,
    status,
    without,
)
from suite.rules import Refused
from suite.server import COMPLETIONS
from suite.work import CHAT


def _refuse_charset(method: str, path: str, headers: Mapping[str, str]) -> None:
    if "charset" in headers.get("content-type", ""):
        raise Refused("Unsupported content type.", code="unsupported_content_type", status=415)


def _break_empty_bearer(method: str, path: str, headers: Mapping[str, str]) -> None:
    if headers.get("authorization", "x").strip() == "Bearer":
        raise Refused("No key.", status=500)


def _refuse_apps(method: str, path: str, headers: Mapping[str, str]) -> None:
    if not headers.get("origin", "http").startswith("http"):
        raise Refused("This origin is not allowed.", code="origin_not_allowed", status=403)


broken("refuses-charset", head=_refuse_charset)
broken("refuses-apps", head=_refuse_apps)
broken("500-for-empty-bearer", head=_break_empty_bearer)
broken("500-for-content-type", error=status(500, says("content type")))
broken("500-for-bad-json", error=status(500, says("could not parse", "no JSON")))
broken("500-for-infinity", error=status(500, says("not finite")))
broken("500-for-no-object", error=status(500, says("must be an object")))
broken("404-for-method", error=status(404, says("Not allowed")))
broken("405-without-allow", headers=header("allow"))
broken(
    "html-for-unknown-path",
    error=lambda found, error, sent: (
        found,
        b"<h1>Not Found</h1>" if "Invalid URL" in error["message"] else {"error": error},
    ),
)
broken(
    "first-key-wins", raw=lambda body: body.replace(b'"prompt": 5, "prompt": "a"', b'"prompt": 5')
)
broken(
    "422-for-invalid",
    error=lambda found, error, sent: (
        422 if found == 400 and error["param"] else found,
        {"error": error},
    ),
)
broken("detail-errors", error=as_body(lambda error: {"detail": error["message"]}))
broken("string-errors", error=as_body(lambda error: {"error": error["message"]}))
broken(
    "errors-without-param",
    error=as_body(lambda error: {"error": {k: v for k, v in error.items() if k != "param"}}),
)
broken(
    "errors-with-numbers",
    error=lambda found, error, sent: (found, {"error": {**error, "code": found}}),
)
broken("other-error-type", error=as_body(lambda error: {"error": {**error, "type": "bad"}}))
broken(
    "errors-name-nothing",
    error=as_body(lambda error: {"error": {**error, "message": "Bad request.", "param": None}}),
)
broken("500-for-missing-model", error=status(500, says("model parameter")))
broken("400-for-unknown-model", error=status(400, says("model does not exist")))
broken("422-for-missing-messages", error=status(422, says("Missing required")))
broken(
    "context-without-code",
    error=as_body(
        lambda error: {
            "error": {
                **error,
                "code": None if error["code"] == "context_length_exceeded" else error["code"],
            }
        }
    ),
)
broken(
    "context-in-other-words",
    error=as_body(
        lambda error: {
            "error": {
                **error,
                "message": error["message"].replace("maximum context length is", "context is"),
            }
        }
    ),
)
broken(
    "context-shortened",
    request=lambda path, body: (
        {**body, "max_tokens": 16} if body.get("max_tokens") == 100_000_000 else body
    ),
)
broken("500-for-unknown-field", error=status(500, says("Unknown parameter")))
broken(
    "streams-errors",
    headers=lambda found, headers: (
        {**headers, "content-type": "text/event-stream"} if found == 400 else headers
    ),
)
broken(
    "ignores-stream-options",
    request=lambda path, body: (
        body if body.get("stream") else without("stream_options")(path, body)
    ),
)
broken(
    "ignores-top-logprobs-alone",
    request=lambda path, body: (
        body if body.get("logprobs") else without("top_logprobs")(path, body)
    ),
)
broken("ignores-metadata", request=without("metadata"))


def _accepts(path: str, changes: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a request hook that ignores invalid values."""

    def hook(at: str, body: dict[str, Any]) -> dict[str, Any]:
        if at != path or any(body.get(name) != value for name, value in changes.items()):
            return body
        if any(type(body[name]) is not type(value) for name, value in changes.items()):
            return body
        body = without(*changes)(at, body)
        return {"messages": [{"role": "user", "content": "Hello"}], **body} if at == CHAT else body

    return hook


for _name, _path, _changes in (
    *((name, path, changes) for name, path, changes, _, _ in (*INVALID, *STRONG)),
    *((name, COMPLETIONS, changes) for name, changes, _, _ in BEYOND),
):
    broken(f"accepts-{_name}", request=_accepts(_path, _changes))

# Headers.

for _header in ("x-request-id", "openai-processing-ms", "openai-version",
                "access-control-allow-origin"):  # fmt: skip
    broken(f"no-{_header}", headers=header(_header))
broken("same-request-id", headers=header("x-request-id", "req_1"))
broken("no-stream-request-id", headers=in_stream("x-request-id"))
broken("streams-cached", headers=header("cache-control"))
broken(
    "text-replies",
    headers=lambda found, headers: (
        {**headers, "content-type": "text/plain"}
        if found == 200 and "json" in headers["content-type"]
        else headers
    ),
)
broken(
    "html-errors",
    headers=lambda found, headers: (
        {**headers, "content-type": "text/html"} if found >= 400 else headers
    ),
)
broken(
    "streams-as-text",
    headers=lambda found, headers: {
        **headers,
        "content-type": headers["content-type"].replace("event-stream", "plain"),
    },
)

# Models.

broken("models-no-object", reply=only("/models", lambda body: {**body, "object": "models"}))
broken("models-empty", reply=only("/models", lambda body: {**body, "data": []}))
broken(
    "models-created-float",
    reply=only(
        "/models", lambda body: {**body, "data": [{**one, "created": 1.5} for one in body["data"]]}
    ),
)
broken(
    "models-no-owner",
    reply=only(
        "/models",
        lambda body: {
            **body,
            "data": [{k: v for k, v in one.items() if k != "owned_by"} for one in body["data"]],
        },
    ),
)
broken(
    "models-no-slash",
    head=lambda method, path, headers: (
        fail(Refused("Not found.", status=500)) if "%2F" in path else None
    ),
)
broken("models-unknown-200", error=status(500, says("model does not exist")))
broken(
    "models-other-id",
    reply=only(
        "/models", lambda body: {**body, "data": [{**one, "id": one["id"]} for one in body["data"]]}
    ),
    request=lambda path, body: (
        {**body, "model": "x"}
        if body.get("model") == "org/toy"
        and body.get("max_tokens") == 1
        and body.get("prompt") == "Hello"
        and len(body) == 3
        else body
    ),
)

broken("wrong-key-403", wrong_key=403)
broken(
    "500-for-chat-context",
    error=lambda status, error, sent: (
        500 if "maximum context" in error["message"] and error["param"] == "messages" else status,
        {"error": error},
    ),
)
broken("500-for-delete", head=lambda method, path, headers: (
    fail(Refused("No.", status=500)) if method == "DELETE" and path.startswith("/models")
    else None))  # fmt: skip
