"""Faults that ignore request fields, or reject valid ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from suite.faults.base import (
    broken,
    fail,
    in_message,
    only,
    says,
    status,
    usage,
    without,
)
from suite.rules import Refused
from suite.server import COMPLETIONS
from suite.work import CHAT

broken(
    "ignores-max-tokens",
    valid=lambda path, body: (
        {**body, "max_tokens": 40} if (body.get("max_tokens") or 50) < 40 else body
    ),
)
broken("ignores-max-completion-tokens", valid=without("max_completion_tokens"))
broken(
    "completion-unlimited",
    valid=lambda path, body: (
        {"max_tokens": 60, **body}
        if path == COMPLETIONS
        and body.get("max_tokens") is None
        and not body.pop("max_tokens", None)
        else body
    ),
)
broken(
    "chat-limited",
    valid=lambda path, body: (
        {**body, "max_tokens": 16}
        if path == CHAT and not body.get("max_tokens") and not body.get("max_completion_tokens")
        else body
    ),
)
broken(
    "zero-is-one",
    valid=lambda path, body: {**body, "max_tokens": 1} if body.get("max_tokens") == 0 else body,
)
broken(
    "refuses-nulls",
    request=lambda path, body: (
        _refuse("null") if any(value is None for value in body.values()) else body
    ),
)
broken(
    "refuses-empty-stop",
    request=lambda path, body: _refuse("stop") if body.get("stop") == [] else body,
)
broken(
    "ids-with-bos",
    valid=lambda path, body: (
        {**body, "prompt": _with_bos(body.get("prompt"))} if path == COMPLETIONS else body
    ),
)
broken(
    "first-prompt-only",
    valid=lambda path, body: (
        {**body, "prompt": body["prompt"][:1]}
        if isinstance(body.get("prompt"), list)
        and body["prompt"]
        and not isinstance(body["prompt"][0], int)
        else body
    ),
)
broken(
    "one-id-list-only",
    valid=lambda path, body: (
        {**body, "prompt": [[token] for token in body["prompt"]]}
        if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], int)
        else body
    ),
)
broken("ignores-suffix", valid=without("suffix"))
broken(
    "needs-a-prompt",
    request=lambda path, body: (
        _refuse("prompt", 500) if path == COMPLETIONS and "prompt" not in body else body
    ),
)
broken("ignores-stop", valid=without("stop"))
broken(
    "first-stop-only",
    valid=lambda path, body: (
        {**body, "stop": body["stop"][:1]} if isinstance(body.get("stop"), list) else body
    ),
)
broken(
    "refuses-stop-strings",
    request=lambda path, body: _refuse("stop", 500) if isinstance(body.get("stop"), str) else body,
)
broken(
    "refuses-four-stops",
    request=lambda path, body: (
        _refuse("stops", 500)
        if isinstance(body.get("stop"), list) and len(body["stop"]) == 4
        else body
    ),
)
broken("ignores-seed", valid=without("seed"))
broken("one-seed", valid=lambda path, body: {**body, "seed": 1})
broken(
    "warm-at-zero",
    valid=lambda path, body: (
        {**body, "temperature": 2}
        if (body.get("prompt"), body.get("max_tokens")) == ("1, 2, 3,", 8)
        and not body.get("stream")
        else body
    ),
)
broken("greedy-by-default", valid=lambda path, body: {"temperature": 0, **body})
broken("ignores-top-p", valid=without("top_p"))
broken("ignores-bias", valid=without("logit_bias"))
broken(
    "bans-force",
    valid=lambda path, body: {
        **body,
        "logit_bias": {token: abs(bias) for token, bias in (body.get("logit_bias") or {}).items()},
    },
)
broken(
    "refuses-fractions",
    request=lambda path, body: (
        _refuse("bias", 500)
        if any(isinstance(bias, float) for bias in (body.get("logit_bias") or {}).values())
        else body
    ),
)
broken("ignores-frequency-penalty", valid=without("frequency_penalty"))
broken("ignores-presence-penalty", valid=without("presence_penalty"))
broken("ignores-best-of", valid=without("best_of"))
broken(
    "refuses-best-of",
    request=lambda path, body: (
        _refuse("best", 500)
        if body.get("best_of") is not None and body["best_of"] >= (body.get("n") or 1)
        else body
    ),
)
broken(
    "streams-best-of",
    request=lambda path, body: without("best_of")(path, body) if body.get("stream") else body,
)
broken("ignores-echo", valid=without("echo"))
broken("ignores-logprobs", valid=without("logprobs"))
broken("ignores-first-part", request=lambda path, body: _parts(body))
broken("refuses-developer", request=lambda path, body: _refuse_role(body, "developer"))
broken("refuses-system-parts", request=lambda path, body: _refuse_system_parts(body))
broken(
    "last-message-only",
    valid=lambda path, body: {**body, "messages": body["messages"][-1:]} if path == CHAT else body,
)
broken("500-for-same-role", request=lambda path, body: _refuse_same_role(body))
broken(
    "refuses-names",
    request=lambda path, body: (
        _refuse("name", 500) if any("name" in m for m in _messages(body)) else body
    ),
)
broken(
    "refuses-without-effect",
    request=lambda path, body: _refuse("field", 500) if "verbosity" in body else body,
)
broken(
    "tier-untold",
    reply=lambda path, body, sent: {k: v for k, v in body.items() if k != "service_tier"},
)
broken(
    "audio-ignored",
    request=lambda path, body: {k: v for k, v in body.items() if k != "modalities"},
)
broken(
    "refuses-last-assistant",
    request=lambda path, body: (
        _refuse("role", 500) if _messages(body)[-1:] == [
            {"role": "assistant", "content": "Hi, I"}] else body
    ),
)  # fmt: skip
broken(
    "refuses-empty-parts",
    request=lambda path, body: (
        _refuse("parts", 500) if any(m.get("content") == [] for m in _messages(body)) else body
    ),
)
broken("refuses-user", request=lambda path, body: _refuse("user", 500) if "user" in body else body)
broken(
    "refuses-both-limits",
    request=lambda path, body: (
        _refuse("limits", 500)
        if body.get("max_tokens") and body.get("max_completion_tokens")
        else body
    ),
)
broken(
    "other-answer",
    reply=only(
        CHAT,
        lambda body: in_message(
            body, lambda m: m.update(content=m["content"] and m["content"].replace("Paris", "Rome"))
        ),
    ),
)
broken(
    "control-tokens-count-one",
    reply=lambda path, body, sent: (
        {**body, "usage": usage(body["usage"], -27)}
        if "<|im_end|>" in json.dumps(sent) and path == CHAT
        else body
    ),
)
_names: list[str] = []


def _remember(path: str, body: dict[str, Any]) -> dict[str, Any]:
    _names[:] = [name for name in body if "\n" in name]
    return body


broken(
    "field-names-in-headers",
    request=_remember,
    headers=lambda found, headers: {**headers, **({"x-ignored": _names.pop()} if _names else {})},
)
broken("500-for-ids", error=status(500, says("beyond the vocabulary")))
broken(
    "500-for-surrogates",
    request=lambda path, body: (
        _refuse("surrogate", 500) if body.get("prompt") == "\ud800" else body
    ),
)
broken(
    "500-for-depth",
    raw=lambda body: (
        fail(Refused("Too deep.", status=500)) or body if body.count(b"[") > 5000 else body
    ),
)
broken("accepts-broken-utf8", raw=lambda body: body.decode("utf-8", "replace").encode())
broken("accepts-nan", raw=lambda body: body.replace(b"NaN", b"1").replace(b"Infinity", b"1"))


def _refuse(what: str, code: int = 400) -> Any:
    raise Refused(f"Not taken: {what}.", status=code)


def _with_bos(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return [256, *prompt]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        return [[256, *one] for one in prompt]
    return prompt


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = body.get("messages")
    return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []


def _parts(body: dict[str, Any]) -> dict[str, Any]:
    for message in _messages(body):
        if isinstance(message.get("content"), list):
            message["content"] = message["content"][:1]
    return body


def _refuse_role(body: dict[str, Any], role: str) -> dict[str, Any]:
    if any(message.get("role") == role for message in _messages(body)):
        _refuse(role)
    return body


def _refuse_system_parts(body: dict[str, Any]) -> dict[str, Any]:
    for message in _messages(body):
        if message.get("role") == "system" and isinstance(message.get("content"), list):
            _refuse("parts", 500)
    return body


def _refuse_same_role(body: dict[str, Any]) -> dict[str, Any]:
    roles = [message.get("role") for message in _messages(body)]
    if any(a == b for a, b in pairwise(roles)):
        _refuse("role", 500)
    return body
