"""Faults in the log-probabilities of both endpoints, in echo, and in stop sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from suite.faults.base import (
    arrays,
    broken,
    choices,
    content,
    only,
    without,
)
from suite.server import COMPLETIONS
from suite.work import CHAT


def _each(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def one(found: dict[str, Any]) -> None:
        if found.get(name) is not None:
            found[name] = [change(value) for value in found[name]]

    return arrays(one)


def _both(hook: Callable[..., Any]) -> dict[str, Any]:
    return {"reply": hook, "chunks": hook}


def _from_zero(found: dict[str, Any]) -> None:
    first = found["text_offset"][0] if found["text_offset"] else 0
    found["text_offset"] = [offset - first for offset in found["text_offset"]]


def _by_bytes(found: dict[str, Any]) -> None:
    found["text_offset"] = [offset + 4 * (offset > 12) for offset in found["text_offset"]]


def _replaced(token: str) -> str:
    return "\ufffd" if token.startswith("bytes:") else token


def _drop(found: dict[str, Any], at: slice) -> None:
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        if found.get(name):
            del found[name][at]


def _rounded(found: dict[str, Any]) -> None:
    found["token_logprobs"] = [p and round(p, 2) for p in found["token_logprobs"]]


def _null_to(value: float) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        found["token_logprobs"] = [value if p is None else p for p in found["token_logprobs"]]

    return change


def _top_one(top: Any) -> Any:
    return dict(list(top.items())[:1]) if top else top


def _without_own(found: dict[str, Any]) -> None:
    if found.get("top_logprobs"):
        for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
            if top and len(top) > 1 and list(top)[-1] == token:
                del top[token]


def _each_choice(body: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    for choice in body["choices"]:
        change(choice)
    return body


def _shorten(found: dict[str, Any]) -> None:
    if found["top_logprobs"]:
        found["top_logprobs"] = found["top_logprobs"][:-1]


def _lose_spaces(found: dict[str, Any]) -> None:
    if found["tokens"][:1] == [" "]:
        _drop(found, slice(0, 1))


def _lose_end(choice: dict[str, Any]) -> None:
    found = choice["logprobs"]
    if found and found.get("tokens") and found["tokens"][-1] == "<|im_end|>":
        _drop(found, slice(-1, None))


def _add_end(choice: dict[str, Any]) -> None:
    found = choice["logprobs"]
    ended = found and found.get("tokens") and choice["finish_reason"] == "stop"
    if ended and found["text_offset"][0] > 0:
        found["tokens"].append("<|im_end|>")


broken("offsets-from-zero", reply=arrays(_from_zero))
broken("offsets-by-bytes", reply=arrays(_by_bytes))
broken("offsets-all-alike", reply=_each("text_offset", lambda offset: 11))
broken("tokens-replaced", **_both(_each("tokens", _replaced)))
broken("tokens-with-marks", **_both(_each("tokens", lambda token: token.replace(" ", "Ġ"))))
broken("positive-logprobs", reply=_each("token_logprobs", lambda p: p and -p))
broken("rounded-logprobs", reply=arrays(_rounded))
broken("zeros-for-null", reply=arrays(_null_to(0.0)))
broken("one-alternative", **_both(_each("top_logprobs", _top_one)))
broken("sampled-left-out", reply=arrays(_without_own))
broken("all-logprobs-alike", reply=_each("token_logprobs", lambda p: p and -1.5))
broken("infinite-logprobs", reply=_each("token_logprobs", lambda p: p and -99999.0))
broken("zero-is-off", valid=lambda path, body: (
    without("logprobs")(path, body) if body.get("logprobs") == 0 and path == COMPLETIONS
    else body))  # fmt: skip
broken("short-top", reply=arrays(_shorten))
broken("stream-loses-a-token", chunks=arrays(_lose_spaces))
broken("logprobs-after-bias", reply=_each("token_logprobs", lambda p: p and max(p, -0.001)))
broken("end-token-left-out", reply=only(COMPLETIONS, lambda body: _each_choice(body, _lose_end)))
broken("end-token-without-echo", reply=only(COMPLETIONS, lambda body: _each_choice(body, _add_end)))
broken("logprobs-with-temperature", reply=lambda path, body, sent: (
    _each("top_logprobs", lambda top: top and {k: v - 2 for k, v in top.items()})(path, body, sent)
    if sent.get("temperature") == 2 else body))  # fmt: skip
broken(
    "other-prompts-numbers",
    reply=lambda path, body, sent: _each(
        "token_logprobs", lambda p: p and p - len(str(sent.get("prompt")))
    )(path, body, sent),
)
broken("bos-in-echo", reply=lambda path, body, sent: (
    arrays(lambda found: found["tokens"].insert(0, "<s>"))(path, body, sent)
    if sent.get("echo") else body))  # fmt: skip
broken(
    "stop-in-prompt",
    valid=lambda path, body: (
        {**body, "max_tokens": 0}
        if isinstance(body.get("stop"), str)
        and path == COMPLETIONS
        and body["stop"] in str(body.get("prompt"))
        and body["stop"].startswith("1, 2")
        else body
    ),
)
broken(
    "stop-kept",
    reply=lambda path, body, sent: choices(lambda choice: _append(choice, sent))(path, body, sent),
)
broken("stop-is-length", reply=lambda path, body, sent: (
    choices(lambda choice: choice.update(finish_reason="length"))(path, body, sent)
    if sent.get("stop") else body))  # fmt: skip
broken(
    "held-text-lost",
    chunks=lambda path, chunks, sent: (
        [c for i, c in enumerate(chunks) if i != len(chunks) - 2] if sent.get("stop") else chunks
    ),
)
broken(
    "stop-streamed",
    chunks=lambda path, chunks, sent: (
        [
            *chunks[:-1],
            {**chunks[-1], "choices": [{**chunks[-1]["choices"][0], "text": sent["stop"]}]},
        ]
        if sent.get("stop") and path == COMPLETIONS and isinstance(sent["stop"], str)
        else chunks
    ),
)


def _append(choice: dict[str, Any], sent: Mapping[str, Any]) -> None:
    if choice["finish_reason"] == "stop" and isinstance(sent.get("stop"), str):
        if "text" in choice:
            choice["text"] += sent["stop"]
        else:
            choice["message"]["content"] += sent["stop"]


# Chat's log-probabilities.

broken("chat-logprobs-legacy", reply=only(CHAT, lambda body: _legacy(body)))
broken("chat-logprobs-no-refusal", **_both(choices(
    lambda choice: choice["logprobs"].pop("refusal", None)
    if isinstance(choice.get("logprobs"), dict) else None)))  # fmt: skip
broken("chat-bytes-null", **_both(content(lambda one: [{**e, "bytes": None} for e in one])))
broken("chat-bytes-of-text", **_both(content(
    lambda one: [{**e, "bytes": list(e["token"].encode())} for e in one])))  # fmt: skip
broken("chat-top-always", **_both(content(lambda one: [
    {**e, "top_logprobs": e["top_logprobs"] or [{k: e[k] for k in ("token", "logprob", "bytes")}]}
    for e in one])))  # fmt: skip
broken(
    "chat-top-unsorted",
    reply=content(lambda one: [{**e, "top_logprobs": e["top_logprobs"][::-1]} for e in one]),
)
broken(
    "chat-top-five",
    reply=content(lambda one: [{**e, "top_logprobs": e["top_logprobs"][:5]} for e in one]),
)
broken(
    "chat-positive-logprobs",
    reply=content(lambda one: [{**e, "logprob": -e["logprob"] + 0.1} for e in one]),
)
broken(
    "chat-entries-without-bytes",
    reply=content(lambda one: [{k: v for k, v in e.items() if k != "bytes"} for e in one]),
)
broken("chat-entries-doubled", reply=content(lambda one: [e for e in one for _ in range(2)]))
broken("chat-stream-logprobs-null", chunks=lambda path, chunks, sent: (
    choices(lambda choice: choice.update(logprobs=None))(path, chunks, sent)
    if path == CHAT else chunks))  # fmt: skip
broken(
    "chat-stream-logprobs-late",
    chunks=lambda path, chunks, sent: (
        _late(chunks) if path == CHAT and sent.get("logprobs") else chunks
    ),
)


def _legacy(body: dict[str, Any]) -> dict[str, Any]:
    for choice in body["choices"]:
        if choice["logprobs"]:
            choice["logprobs"] = {"tokens": [], "token_logprobs": []}
    return body


def _late(chunks: list[Any]) -> list[Any]:
    told: list[Any] = []
    for chunk in chunks[1:-1]:
        logprobs = chunk["choices"][0]["logprobs"]
        told += logprobs["content"]
        logprobs["content"] = []
    if len(chunks) > 2:
        chunks[-2]["choices"][0]["logprobs"]["content"] = told
    return chunks
