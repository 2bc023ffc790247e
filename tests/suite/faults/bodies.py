"""Faults in the bodies of replies."""

from __future__ import annotations

from suite.faults.base import (
    broken,
    in_message,
    only,
)
from suite.server import COMPLETIONS
from suite.work import CHAT

for _kind, _path in (("completion", COMPLETIONS), ("chat", CHAT)):
    broken(f"{_kind}-object", reply=only(_path, lambda body: {**body, "object": "reply"}))
    broken(f"{_kind}-id", reply=only(_path, lambda body: {**body, "id": "1"}))
    broken(f"{_kind}-created-float", reply=only(_path, lambda body: {**body, "created": 1.7e9}))
    broken(f"{_kind}-created-zero", reply=only(_path, lambda body: {**body, "created": 0}))
    broken(
        f"{_kind}-no-usage",
        reply=only(_path, lambda body: {k: v for k, v in body.items() if k != "usage"}),
    )
    broken(
        f"{_kind}-usage-sum",
        reply=only(_path, lambda body: {**body, "usage": {**body["usage"], "total_tokens": 0}}),
    )
    broken(
        f"{_kind}-finish-word",
        reply=only(
            _path,
            lambda body: {
                **body,
                "choices": [{**c, "finish_reason": "eos"} for c in body["choices"]],
            },
        ),
    )
    broken(
        f"{_kind}-always-stop",
        reply=only(
            _path,
            lambda body: {
                **body,
                "choices": [{**c, "finish_reason": "stop"} for c in body["choices"]],
            },
        ),
    )
    broken(
        f"{_kind}-no-logprobs-key",
        reply=only(
            _path,
            lambda body: {
                **body,
                "choices": [
                    {k: v for k, v in c.items() if k != "logprobs" or v} for c in body["choices"]
                ],
            },
        ),
    )
    broken(
        f"{_kind}-one-choice",
        valid=lambda path, body, at=_path: (
            {**body, "n": 1, "best_of": None} if path == at else body
        ),
    )

broken("completion-same-id", reply=only(COMPLETIONS, lambda body: {**body, "id": "cmpl-1"}))
broken(
    "chat-no-refusal", reply=only(CHAT, lambda body: in_message(body, lambda m: m.pop("refusal")))
)
broken(
    "chat-empty-tool-calls",
    reply=only(CHAT, lambda body: in_message(body, lambda m: m.setdefault("tool_calls", []))),
)
broken(
    "chat-null-content",
    reply=only(CHAT, lambda body: in_message(body, lambda m: m.update(content=None))),
)
broken(
    "chat-role-bot", reply=only(CHAT, lambda body: in_message(body, lambda m: m.update(role="bot")))
)
broken(
    "chat-usage-details-null",
    reply=only(
        CHAT,
        lambda body: {
            **body,
            "usage": {**body["usage"], "prompt_tokens_details": {"cached_tokens": "0"}},
        },
    ),
)
broken(
    "chat-fingerprint-changes",
    reply=only(CHAT, lambda body: {**body, "system_fingerprint": body["id"]}),
)
