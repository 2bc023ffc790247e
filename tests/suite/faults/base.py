"""How a fault is made: the hooks of the right server, with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from suite.expected import EXPECTED
from suite.rules import Refused
from suite.server import Fault
from suite.work import CHAT

FAULTS: dict[str, Fault] = {}


def broken(name: str, **hooks: Any) -> None:
    """A fault that overrides some of the server's hooks."""
    assert name not in FAULTS, name
    plain = {"stays", "lingers", "buffers", "crowded", "mixes", "down", "wrong_key"}
    body = {key: hook if key in plain else staticmethod(hook) for key, hook in hooks.items()}
    made: Fault = type(name, (Fault,), {**body, "fails": EXPECTED.get(name, frozenset())})()
    FAULTS[name] = made


def without(*names: str) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """A request hook that overlooks fields."""
    return lambda path, body: {k: v for k, v in body.items() if k not in names}


def only(path: str, change: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for one endpoint."""
    return lambda at, value, *rest: change(value) if at == path else value


def choices(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """A hook for replies or chunks that changes each choice in its place."""

    def hook(path: str, found: Any, sent: Mapping[str, Any]) -> Any:
        for body in found if isinstance(found, list) else [found]:
            for choice in body.get("choices", ()):
                change(choice)
        return found

    return hook


def arrays(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """A hook that changes legacy log-probabilities in their place."""

    def one(choice: dict[str, Any]) -> None:
        if isinstance(choice.get("logprobs"), dict) and "tokens" in choice["logprobs"]:
            change(choice["logprobs"])

    return choices(one)


def content(change: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """A hook that changes the entries of chat's log-probabilities."""

    def one(choice: dict[str, Any]) -> None:
        if isinstance(choice.get("logprobs"), dict) and "content" in choice["logprobs"]:
            choice["logprobs"]["content"] = change(choice["logprobs"]["content"])

    return choices(one)


def header(name: str, value: str | None = None) -> Callable[[int, dict[str, str]], dict[str, str]]:
    """A hook that leaves a header out, or gives it another value."""

    def hook(status: int, headers: dict[str, str]) -> dict[str, str]:
        rest = {key: one for key, one in headers.items() if key != name}
        return rest if value is None else {**rest, name: value}

    return hook


def in_stream(name: str) -> Callable[[int, dict[str, str]], dict[str, str]]:
    """A hook that leaves a header out of streams."""
    drop = header(name)
    return lambda status, headers: (
        drop(status, headers) if headers["content-type"].startswith("text/event") else headers
    )


def status(code: int, when: Callable[[Mapping[str, Any], int], bool]) -> Callable[..., Any]:
    """An error hook that answers some refusals with another status."""
    return lambda found, error, sent: ((code if when(error, found) else found), {"error": error})


def as_body(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """An error hook that makes another body of an error."""
    return lambda found, error, sent: (found, change(error))


def says(*words: str) -> Callable[[Mapping[str, Any], int], bool]:
    """Whether an error's message has one of some words."""
    return lambda error, found: any(word in error["message"] for word in words)


def fail(error: Exception) -> Any:
    """Raise, where only an expression may stand."""
    raise error


def usage(usage: dict[str, int], more: int) -> dict[str, int]:
    """A usage with more prompt tokens, or fewer."""
    prompt = usage["prompt_tokens"] + more
    return {**usage, "prompt_tokens": prompt,
            "total_tokens": prompt + usage["completion_tokens"]}  # fmt: skip


def in_message(body: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A chat reply whose messages are changed in their place."""
    for choice in body["choices"]:
        change(choice["message"])
    return body


def messages(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A reply hook that changes each chat message in its place."""

    def hook(path: str, body: dict[str, Any], sent: Mapping[str, Any]) -> Any:
        return in_message(body, change) if path == CHAT else body

    return hook


def calls(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A reply hook that changes each call of a chat in its place."""

    def each(message: dict[str, Any]) -> None:
        for call in message.get("tool_calls") or ():
            change(call)

    return messages(each)


def deltas(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A chunks hook that changes each delta of a chat in its place."""

    def hook(path: str, chunks: list[Any], sent: Mapping[str, Any]) -> list[Any]:
        for chunk in chunks if path == CHAT else ():
            for choice in chunk.get("choices", ()):
                change(choice["delta"])
        return chunks

    return hook


def parts(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A chunks hook that changes each part of a call in its place."""

    def each(delta: dict[str, Any]) -> None:
        for part in delta.get("tool_calls") or ():
            change(part)

    return deltas(each)


def refuse(when: Callable[[Mapping[str, Any]], Any], path: str, code: int = 500) -> Any:
    """A request hook that refuses what the contract does not."""

    def hook(at: str, body: dict[str, Any]) -> dict[str, Any]:
        if at == path and when(body):
            raise Refused("Not taken.", status=code)
        return body

    return hook


def take(when: Callable[[Mapping[str, Any]], Any], path: str, **instead: Any) -> Any:
    """A request hook that lets through what the contract refuses, with good values instead."""

    def hook(at: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, **instead} if at == path and when(body) else body

    return hook
