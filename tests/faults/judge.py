"""Checks on a reply that apply to every case."""

from __future__ import annotations

import json
from typing import Any

from faults.case import Case
from faults.client import Reply

_STATUS = {
    "engine_error": 502, "engine_unavailable": 503, "engine_timeout": 504,
    "rate_limit_exceeded": 429, "server_shutting_down": 503,
}  # fmt: skip
_REASONS = {"stop", "length", "tool_calls", "function_call"}


def judged(reply: Reply, case: Case) -> list[str]:
    """Return a sentence for each violation in a reply."""
    if reply.problem:
        return [f"no whole reply: {reply}"]
    error = error_of(reply)
    if error is None:
        found = (
            [] if 200 in case.expect else [f"expected {_listed(case)}, not a right answer: {reply}"]
        )
        found += complete(reply, reply.wanted)
        return found + (case.check(reply) if case.check is not None else [])
    status, body = error
    found = shape(reply, status, body)
    if status not in case.expect:
        found.append(f"expected {_listed(case)}, got {reply}")
    if case.says and case.says not in json.dumps(body, ensure_ascii=False):
        found.append(f"the error does not say {case.says!r}: {reply}")
    return found


def _listed(case: Case) -> str:
    return " or ".join(map(str, sorted(case.expect)))


def error_of(reply: Reply) -> tuple[int, Any] | None:
    """Return the status and body of an error or an error event, or None without an error."""
    if reply.status >= 300 or reply.status < 200:
        return reply.status, reply.json()
    if reply.streamed:
        for event in reply.events():
            if event.startswith('{"error"'):
                body = json.loads(event)
                code = body["error"].get("code")
                return _STATUS.get(code, 400), body
    return None


def shape(reply: Reply, status: int, body: Any) -> list[str]:
    """Check that an error is OpenAI's error object with the right code for its status."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return [f"no error object of OpenAI's: {reply}"]
    found = []
    if not isinstance(error["message"], str) or not error["message"]:
        found.append(f"an error without a message: {reply}")
    if not isinstance(error["type"], str):
        found.append(f"an error without a type: {reply}")
    if any(not isinstance(error[name], str | None) for name in ("param", "code")):
        found.append(f"an error's param or code is no string: {reply}")
    if len(error["message"]) > 4096:
        found.append(f"an error's message has {len(error['message'])} characters")
    if status == 500:
        found.append(f"an unhandled exception: {reply}")
    code = {502: "engine_error", 504: "engine_timeout", 429: "rate_limit_exceeded"}.get(status)
    if code is not None and error["code"] != code:
        found.append(f"status {status} with the code {error['code']}: {reply}")
    if status in (429, 503) and not reply.streamed and "retry-after-ms" not in reply.headers:
        found.append(f"no retry-after-ms: {reply}")
    return found


def complete(reply: Reply, text: str | None) -> list[str]:
    """Check that a completion is complete and has the requested text."""
    if reply.streamed:
        return _complete_stream(reply, text)
    body = reply.json()
    if not isinstance(body, dict):
        return [f"a reply that is no object: {reply}"]
    found = []
    for choice in body.get("choices", ()):
        if choice.get("finish_reason") not in _REASONS:
            found.append(f"a choice without a finish_reason: {reply}")
        shown = choice.get("text", (choice.get("message") or {}).get("content"))
        if text is not None and shown != text:
            found.append(f"the answer is {str(shown)[:200]!r}, not {text!r}")
    return found + _counted(body.get("usage"), text)


def _complete_stream(reply: Reply, text: str | None) -> list[str]:
    events = reply.events()
    if not events or events[-1] != "[DONE]":
        return [f"a stream that ends without [DONE] or an error: …{reply.body[-200:]!r}"]
    found: list[str] = []
    texts: dict[int, str] = {}
    ended: set[int] = set()
    for chunk in reply.chunks():
        for choice in chunk["choices"]:
            index = choice["index"]
            shown = choice.get("text", (choice.get("delta") or {}).get("content")) or ""
            texts[index] = texts.get(index, "") + shown
            if choice["finish_reason"] is not None:
                ended.add(index)
    if ended != set(texts):
        found.append(f"a choice without a finish_reason: …{reply.body[-200:]!r}")
    found += [
        f"the answer is {shown[:200]!r}, not {text!r}"
        for shown in texts.values()
        if text is not None and shown != text
    ]
    return found


def _counted(usage: Any, text: str | None) -> list[str]:
    """Check that the token count fits the completion, at one token for each byte."""
    if text is None or not isinstance(usage, dict):
        return []
    count = usage["completion_tokens"]
    if not isinstance(count, int) or count % max(len(text.encode()), 1):
        return [f"an answer of {len(text.encode())} tokens is counted as {count}"]
    return []
