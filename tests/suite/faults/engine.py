"""Faults after the death of the engine."""

from __future__ import annotations

from suite.faults.base import broken

broken("break-silent", on_break=lambda chunk: None)
broken("break-text", on_break=lambda chunk: {"error": "The engine is gone."})
broken(
    "break-finish",
    on_break=lambda chunk: {
        **chunk, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    },
)  # fmt: skip
broken(
    "break-usage",
    on_break=lambda chunk: {
        "error": {"message": "Gone.", "type": "server_error", "param": None, "code": None},
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    },
)
broken("break-400", down=400)
