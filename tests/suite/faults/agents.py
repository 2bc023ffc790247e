"""Faults that coding agents meet: requests of theirs that are refused, cut or half read."""

from __future__ import annotations

from typing import Any

from suite.faults.edits import (
    When,
    drop,
    error,
    has,
    refuses,
    saying,
    says,
    swap,
    turn,
    valid,
    values,
)
from suite.messages import M
from suite.server import RESPONSES as R
from suite.work import CHAT

# The messages of a conversation of which a server with a sliding window reads only the last ones.
WINDOW = 6
# The results of calls after which a server with a limit on turns gives up.
MOST = 5


def _more_than(path: str, kind: str, most: int) -> When:
    """Return a condition that more than `most` values at a path are of a kind."""
    return lambda body: values(path, body).count(kind) > most


def _recent(messages: list[Any]) -> list[Any]:
    """Return the last messages only, of a long conversation."""
    return messages if len(messages) <= WINDOW + 2 else messages[-WINDOW:]


def _swapped(body: Any) -> bool:
    """Return True if results follow their calls in another order."""
    calls = values("messages.*.tool_calls.*.id", body)
    results = values("messages.*.tool_call_id", body)
    return len(results) > 1 and sorted(calls) == sorted(results) and calls != results


FAULTS = {
    "agent-window": valid(turn("messages", _recent), at=CHAT),
    "agent-turns-limited": refuses(_more_than("messages.*.role", "tool", MOST), CHAT, 400),
    "agent-turns-limited-responses": refuses(
        _more_than("input.*.type", "function_call_output", MOST), R, 400),
    "agent-turns-limited-messages": refuses(
        _more_than("messages.*.content.*.type", "tool_result", MOST), M, 400),
    "agent-own-message-refused": refuses(has("messages.*[tool_calls].refusal", None), CHAT, 400),
    "agent-own-status-refused": refuses(
        has("input.*[arguments].status", "completed"), R, 400),
    "agent-empty-answer-refused": refuses(
        has("messages.*[role=assistant].content", ""), CHAT, 400),
    "agent-blank-content-refused": refuses(has("messages.*[tool_calls].content", " "), CHAT, 400),
    "agent-results-swapped-refused": refuses(_swapped, CHAT, 400),
    "agent-marks-refused": refuses(has("messages.*.copilot_cache_control"), CHAT, 400),
    "agent-assistant-parts-refused": refuses(
        has("messages.*[role=assistant].content", list), CHAT, 400),
    "agent-reasoning-alone-refused": refuses(
        has("messages.*[tool_calls]", lambda found: "content" not in found), CHAT, 400),
    "agent-strict-parameters-refused": refuses(
        has("tools.*.function[strict].parameters.properties.*.properties"), CHAT, 400),
    "agent-nullable-refused": refuses(
        has("tools.*.function.parameters.properties.*.nullable"), CHAT, 400),
    "agent-namespace-refused": refuses(has("tools.*.type", "namespace"), R, 400),
    "agent-client-metadata-refused": refuses(has("client_metadata"), R, 400),
    "agent-item-ids-refused": refuses(has("input.*.id", saying("msg_0")), R, 400),
    "agent-patch-unread": valid(turn("input.*[type=custom_tool_call].input", lambda text: ""),
                                at=R),
    "agent-context-management-refused": refuses(has("context_management"), M, 400),
    "agent-effort-refused": refuses(has("output_config.effort"), M, 400),
    "agent-results-without-error-refused": refuses(
        has("messages.*.content.*.is_error", False), M, 400),
    "agent-overflow-code-null": error(swap("error.code", "context_length_exceeded", None),
                                      turn("error.message", lambda text: "Too long."),
                                      when=says("maximum context length")),
    "agent-overflow-streamed": error(drop("error.code"), status=413,
                                     when=lambda told: (
                                         told["error"]["code"] == "context_length_exceeded"
                                         and told["sent"].get("stream"))),
}  # fmt: skip
