"""Building blocks of faults: hooks of the correct server, each with one change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from suite.expected import EXPECTED
from suite.rules import Refused
from suite.server import Fault
from suite.work import CHAT

FAULTS: dict[str, Fault] = {}


def broken(name: str, **hooks: Any) -> None:
    """Register a fault that overrides some of the server's hooks and flags."""
    assert name not in FAULTS, name
    plain = {"stays", "lingers", "buffers", "crowded", "mixes", "down", "wrong_key", "comment",
             "late", "keeps_aborted", "refuses_cancel", "no_socket", "no_compact"}  # fmt: skip
    body = {key: hook if key in plain else staticmethod(hook) for key, hook in hooks.items()}
    made: Fault = type(name, (Fault,), {**body, "fails": EXPECTED.get(name, frozenset())})()
    FAULTS[name] = made


def without(*names: str) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Return a request hook that drops fields."""
    return lambda path, body: {k: v for k, v in body.items() if k not in names}


def only(path: str, change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that changes values of one endpoint only."""
    return lambda at, value, *rest: change(value) if at == path else value


def choices(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """Return a hook for replies or chunks that changes each choice in place."""

    def hook(path: str, found: Any, sent: Mapping[str, Any]) -> Any:
        for body in found if isinstance(found, list) else [found]:
            for choice in body.get("choices", ()):
                change(choice)
        return found

    return hook


def arrays(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """Return a hook that changes legacy log-probabilities in place."""

    def one(choice: dict[str, Any]) -> None:
        if isinstance(choice.get("logprobs"), dict) and "tokens" in choice["logprobs"]:
            change(choice["logprobs"])

    return choices(one)


def content(change: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """Return a hook that replaces the entries of chat's log-probabilities."""

    def one(choice: dict[str, Any]) -> None:
        if isinstance(choice.get("logprobs"), dict) and "content" in choice["logprobs"]:
            choice["logprobs"]["content"] = change(choice["logprobs"]["content"])

    return choices(one)


def header(name: str, value: str | None = None) -> Callable[[int, dict[str, str]], dict[str, str]]:
    """Return a hook that drops a header, or gives it another value."""

    def hook(status: int, headers: dict[str, str]) -> dict[str, str]:
        rest = {key: one for key, one in headers.items() if key != name}
        return rest if value is None else {**rest, name: value}

    return hook


def in_stream(name: str) -> Callable[[int, dict[str, str]], dict[str, str]]:
    """Return a hook that drops a header from streams."""
    drop = header(name)
    return lambda status, headers: (
        drop(status, headers) if headers["content-type"].startswith("text/event") else headers
    )


def status(code: int, when: Callable[[Mapping[str, Any], int], bool]) -> Callable[..., Any]:
    """Return an error hook that gives some rejections another status."""
    return lambda found, error, sent: ((code if when(error, found) else found), {"error": error})


def as_body(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return an error hook that gives errors another body."""
    return lambda found, error, sent: (found, change(error))


def says(*words: str) -> Callable[[Mapping[str, Any], int], bool]:
    """Return a condition for error messages that contain one of the words."""
    return lambda error, found: any(word in error["message"] for word in words)


def fail(error: Exception) -> Any:
    """Raise an exception where only an expression is allowed."""
    raise error


def usage(usage: dict[str, int], more: int) -> dict[str, int]:
    """Return a usage with a different number of prompt tokens."""
    prompt = usage["prompt_tokens"] + more
    return {**usage, "prompt_tokens": prompt,
            "total_tokens": prompt + usage["completion_tokens"]}  # fmt: skip


def in_message(body: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Change the messages of a chat completion in place, and return its body."""
    for choice in body["choices"]:
        change(choice["message"])
    return body


def messages(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a reply hook that changes each chat message in place."""

    def hook(path: str, body: dict[str, Any], sent: Mapping[str, Any]) -> Any:
        return in_message(body, change) if path == CHAT else body

    return hook


def calls(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a reply hook that changes each tool call of a chat completion in place."""

    def each(message: dict[str, Any]) -> None:
        for call in message.get("tool_calls") or ():
            change(call)

    return messages(each)


def deltas(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a chunks hook that changes each delta of a chat completion in place."""

    def hook(path: str, chunks: list[Any], sent: Mapping[str, Any]) -> list[Any]:
        for chunk in chunks if path == CHAT else ():
            for choice in chunk.get("choices", ()):
                change(choice["delta"])
        return chunks

    return hook


def parts(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a chunks hook that changes each part of a tool call in place."""

    def each(delta: dict[str, Any]) -> None:
        for part in delta.get("tool_calls") or ():
            change(part)

    return deltas(each)


def refuse(when: Callable[[Mapping[str, Any]], Any], path: str, code: int = 500) -> Any:
    """Return a request hook that rejects requests that the contract allows."""

    def hook(at: str, body: dict[str, Any]) -> dict[str, Any]:
        if at == path and when(body):
            raise Refused("Not taken.", status=code)
        return body

    return hook


def take(when: Callable[[Mapping[str, Any]], Any], path: str, **instead: Any) -> Any:
    """Return a request hook that replaces fields the contract rejects with valid ones."""

    def hook(at: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, **instead} if at == path and when(body) else body

    return hook
