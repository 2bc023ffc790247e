"""Profiles of clients: the checks that must pass for each client to work.

They are derived from the clients' own code. Patterns are shell-style.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import translate

from .check import Check, Verdict, all_checks

# The result for a client that needs what the server breaks, or mostly what it lacks.
FAILS = "does not work"
# The result for a client of whose checks some did not run.
NOT_JUDGED = "not judged"

_CHAT = (
    "chat.object", "chat.created", "chat.message", "chat.usage", "chat.finish-words", "chat.nulls",
    "headers.json", "models.list",
)  # fmt: skip
_CHAT_STREAM = (
    "streaming.frames", "streaming.done", "streaming.same-id", "streaming.role-once",
    "streaming.delta-object", "streaming.finish-once", "streaming.concat", "streaming.utf8",
    "headers.stream",
)  # fmt: skip
_TOOLS = (
    "tools.required", "tools.content-null", "tools.arguments", "tools.ids", "tools.type",
    "tools.auto", "tools.round-trip",
)  # fmt: skip
_TOOLS_STREAM = (
    "tools.stream-header", "tools.stream-once", "tools.stream-arguments", "tools.stream-finish",
)  # fmt: skip
_AGENTS = tuple(
    f"agents.{name}"
    for name in ("aider", "claude-code-chat", "cline", "codex-chat", "continue", "copilot", "crush",
                 "goose", "opencode", "qwen-code", "roo-code", "zed", "loop", "loop-stream",
                 "parallel", "cancelled", "overflow")
)  # fmt: skip
_ERRORS = ("errors.keys", "errors.code-type", "errors.missing-messages", "errors.stream")

PROFILES: Mapping[str, Sequence[str]] = {
    "openai": (
        *_CHAT, *_CHAT_STREAM, *_ERRORS, "history.system-middle", "history.developer-middle",
        "chat.detail-original", "custom_tools.text", "custom_tools.round-trip",
        "headers.request-id", "models.*", "chat.refusal-null",
        "streaming.choices-in-order", "streaming.usage", "transport.unknown-path", "types.*",
        *_TOOLS, *_TOOLS_STREAM,
        "structured.schema", "embeddings.base64", "embeddings.order", "stored.pages",
        "responses.type", "responses.stream-type", "responses.stream-order",
        "responses.accumulator*", "responses.call-dump", "responses.all-keys",
    ),
    "anthropic": (
        "messages.*",
    ),
    "langchain": (
        "history.system-middle", "history.system-after-system", "history.user-after-user",
        "history.arguments-*", *_CHAT, *_CHAT_STREAM, "completions.usage", "completions.nulls",
        "choices.order",
        "streaming.usage", "chat.max-tokens", "errors.context", *_TOOLS, *_TOOLS_STREAM,
        "structured.schema", "embeddings.shape", "embeddings.order", "embeddings.id-lists",
    ),
    "lm-eval": (
        "headers.json", "transport.empty-key", "completions.prompt-id-lists",
        "completions.stop-empty", "choices.order", "echo.length", "echo.first-null",
        "echo.ids-verbatim", "echo.id-lists", "echo.end-entry", "echo.greedy", "echo.chain",
        "echo.context-counts", "echo.floor", "logprobs.same-number", "concurrency.echo",
        "stops.excluded",
    ),
    "HELM": (
        "completions.nulls", "choices.best-of-one", "choices.best-of", "echo.tokens", "echo.zero",
        "echo.utf8", "echo.alone", "logprobs.keys", "logprobs.utf8", "logprobs.top-count",
        "completions.finish-words",
    ),
    "guidance": (
        *_CHAT_STREAM, "chat_logprobs.stream", "chat_logprobs.twenty", "chat_logprobs.bytes",
        "chat_logprobs.shape", "streaming.usage", "chat_logprobs.aligned", "structured.schema",
    ),
    "instructor": (
        *_CHAT, "chat.refusal-null", "chat.no-tool-calls", "chat.usage-details", "tools.named",
        "tools.schema", "tools.length", "structured.schema", "structured.object",
        "structured.finish", "constraints.object-schema",
    ),
    "litellm": (
        "history.reasoning-content", "mcp.lookahead", *_CHAT, *_CHAT_STREAM,
        "errors.context", "errors.unknown-model", "streaming.usage",
    ),
    "Open WebUI": (
        "history.system-middle", "keepalive.*", "mcp.auto",
        *_CHAT_STREAM, "models.list", "models.fields", "chat.system", "chat.history",
        "chat.text-parts", "streaming.disconnect", "headers.cors", *_TOOLS_STREAM,
        "tools.round-trip",
        "embeddings.shape", "embeddings.order",
    ),
    "SillyTavern": (
        "history.assistant-first", "history.system-*", "history.user-after-user",
        "history.assistant-after-assistant", "constraints.grammar", "constraints.json-schema",
        *_CHAT_STREAM, "models.list", "stops.chat", "stops.held-back", "streaming.disconnect",
        "chat.name", "chat.same-role", "streaming.in-pieces",
    ),
    "coding agents": (
        *_CHAT_STREAM, *_TOOLS, *_TOOLS_STREAM, "headers.json", "models.*", "errors.chat-context",
        "streaming.usage", "streaming.disconnect", "history.*", "mcp.*", "keepalive.*", *_AGENTS,
    ),
    "codex": (
        "agents.codex", "agents.codex-patch", "agents.loop-responses", "agents.overflow-responses",
        "responses.codex", "responses.namespace", "responses.custom-*", "responses.call-*",
        "responses.stream-*", "responses.reasoning*", "websocket.handshake", "websocket.events",
        "models.list",
    ),
    "claude code": (
        "agents.claude-code", "agents.loop-messages", "agents.overflow-messages", "messages.*",
    ),
    "Mantella": (*_CHAT_STREAM, "models.list", "chat.system", "chat.history", "stops.chat"),
    "dspy": (*_CHAT, "choices.chat", "chat.max-tokens", "chat.finish-words"),
    "LMQL": (
        "logprobs.keys", "logprobs.utf8", "logprobs.stream", "echo.text", "choices.order",
        "sampling.bias-forces", "completions.prompt-ids",
    ),
}  # fmt: skip


def needed(name: str, checks: Sequence[Check]) -> list[Check]:
    """Return the checks that a client depends on."""
    patterns = PROFILES[name]
    matches = re.compile("|".join(map(translate, patterns))).match
    return [one for one in checks if matches(one.id)]


def works(name: str, verdicts: Sequence[Verdict]) -> tuple[str, list[Verdict]]:
    """Return how well a client works, with the verdicts that prevent more.

    Returns:
        `does not work` if a `must` check of the client fails, or most of them are unsupported: what
        the client is for is missing then. Else `not judged` if some of its checks did not run;
        `works except` if checks are broken or unsupported; or `works`. The verdicts are the broken
        and unsupported ones.
    """
    checks = needed(name, all_checks())
    ids = {check.id for check in checks}
    ran = [verdict for verdict in verdicts if verdict.check.id in ids and verdict.runs]
    wrong = [verdict for verdict in ran if verdict.broken or verdict.outcome == "unsupported"]
    musts = Counter(verdict.outcome for verdict in wrong if verdict.check.level == "must")
    needs = sum(check.level == "must" for check in checks)
    if musts["fail"] or musts["timeout"] or musts["unsupported"] > needs / 2:
        return FAILS, wrong
    if len(ran) < len(ids):
        return NOT_JUDGED, []
    return ("works except" if wrong else "works"), wrong


def causes(result: str, wrong: Sequence[Verdict], names: Sequence[str]) -> str:
    """Return the names of the first checks that prevent more, and how many more there are."""
    lacks = result == FAILS and all(verdict.outcome == "unsupported" for verdict in wrong)
    more = f" and {len(wrong) - len(names)} more" if len(wrong) > len(names) else ""
    return f"{'the server lacks ' if lacks else ''}{', '.join(names)}{more}"
