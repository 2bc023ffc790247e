"""Faults in messages: their bodies, counts, input, tools, streams and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suite.faults.edits import (
    Edit,
    all_edits,
    drop,
    given,
    has,
    headers,
    ignores,
    lacks,
    put,
    query,
    refuses,
    rejects,
    reply,
    request,
    saying,
    swap,
    takes,
    turn,
    valid,
)
from suite.messages import COUNT, SERVERS, M
from suite.server import Fault

TEXT = "content.*[type=text]"
CALL = "content.*[type=tool_use]"
THINKING = "content.*[type=thinking]"
RESULT = "messages.*.content.*[type=tool_result]"
IN_MESSAGES = "messages.*.content.*"


def _reply(*edits: Edit) -> Fault:
    return reply(*edits, at=M)


def _stream(*edits: Edit) -> Fault:
    return Fault(message_events=lambda found: all_edits(edits, found))


def _more(body: Any) -> Any:
    """Return a message with one input token more on each request with a cache."""
    return put("usage.input_tokens", body["usage"]["input_tokens"] + 100)(body)


def _error(*edits: Edit, when: Any = lambda sent: True) -> Fault:
    return reply(*edits, at="message error", when=when)


def _cut(body: Any) -> Any:
    """Return a message that ends in the middle of the stop sequence."""
    if body["stop_reason"] != "stop_sequence":
        return body
    return turn(f"{TEXT}.text", lambda text: text + body["stop_sequence"])(body)


def _without_servers(tools: Any) -> Any:
    """Return tools in which those that Anthropic runs are ordinary ones."""
    if not isinstance(tools, list):
        return tools
    return [
        {"name": tool["name"], "input_schema": {"type": "object"}}
        if str(tool.get("type")).startswith(SERVERS) else tool
        for tool in tools
    ]  # fmt: skip


def _blocks(kind: str, change: Edit) -> Edit:
    return turn(f"{IN_MESSAGES}[type={kind}]", change)


def _text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


BODIES = {
    "type": _reply(put("type", "msg")),
    "id": _reply(put("id", "1")),
    "model-empty": _reply(put("model", "")),
    "tier-unknown": _reply(put("usage.service_tier", "best")),
    "details": _reply(put("stop_details", "none")),
    "other-answer": _reply(put(f"{TEXT}.text", "Other, and, quite, another, one.")),
    "output-tokens": _reply(turn("usage.output_tokens", lambda count: count + 1)),
    "cached-null": _reply(put("usage.cache_read_input_tokens", None)),
    "counted-twice": _reply(turn("usage", lambda usage: {
        **usage, "cache_read_input_tokens": usage["input_tokens"]})),
    "always-end-turn": _reply(put("stop_reason", "end_turn")),
    "always-max-tokens": _reply(put("stop_reason", "max_tokens")),
    "stop-unnamed": _reply(put("stop_sequence", None)),
    "stop-included": _reply(_cut),
    "stop-ignored": ignores("stop_sequences", at=M),
    "window-refused": refuses(has("max_tokens", lambda most: most > 1_000_000), M, 400),
    "zero-refused": refuses(has("max_tokens", 0), M, 400),
    "zero-answers": valid(swap("max_tokens", 0, 1), at=M),
    "format-ignored": valid(drop("output_config.format"), at=M),
    "former-format-ignored": ignores("output_format", at=M),
    "no-request-id": headers(drop("request-id")),
    "error-no-request-id": _error(drop("request_id")),
    "query-refused": query(lambda found: {**found, "refused": "1"} if "beta" in found else found),
    "tokens-zero": reply(put("input_tokens", 0), at=COUNT),
    "tokens-no-tools": ignores("tools", "system", at=COUNT),
    "thinking-refused": refuses(has("thinking.type", "adaptive"), M, 400),
    "unsigned": _reply(put(f"{THINKING}.signature", "")),
    "thinking-last": _reply(turn("content", lambda content: content[::-1])),
    "thinking-uncounted": _reply(put("usage.output_tokens_details.thinking_tokens", 0)),
    "always-thinks": valid(put("thinking", {"type": "adaptive"}), at=M,
                           when=has("max_tokens", 400)),
    "display-ignored": valid(drop("thinking.display"), at=M),
    "seal-not-opened": request(_blocks("thinking", lambda block: {**block, "signature": "x"}),
                               at=M),
    "redacted-refused": refuses(has("messages", saying("redacted_thinking")), M, 400),
    "foreign-refused": refuses(has("messages", saying("no such seal")), M, 400),
}  # fmt: skip
INPUT = {
    "system-ignored": ignores("system", at=M),
    "system-blocks-refused": refuses(has("system", list), M, 400),
    "first-system-only": valid(turn("system", lambda system: system[:1] if isinstance(
        system, list) and "billing" not in str(system) else system), at=M),
    "billing-kept": valid(turn("system.*.text", lambda text: text.replace("x-anthropic-", "")),
                          at=M),
    "last-of-user": valid(turn("messages", lambda found: found[-1:] if all(
        one["role"] == "user" and isinstance(one["content"], str) for one in found) else found),
        at=M),
    "prefill-repeated": Fault(reply=lambda path, body, sent: (
        put(f"{TEXT}.text", sent["messages"][-1]["content"])(body)
        if path == M and sent["messages"][-1]["role"] == "assistant" else body)),
    "space-taken": takes(has("messages.*[role=assistant].content", "1, "), M,
                         messages=[{"role": "user", "content": "Hi"}]),
    "system-role-refused": refuses(has("messages.*[role=system].content",
                                       "The sky is blue."), M, 400),
    "empty-taken": takes(has(f"{IN_MESSAGES}[type=text].text", ""), M,
                         messages=[{"role": "user", "content": "Hi"}]),
    "empty-answer-refused": refuses(has("messages.*[role=assistant].content",
                                        lambda content: content in ("", [])), M, 400),
    "cache-control-refused": refuses(given("cache_control"), M, 400),
    "nulls-refused": refuses(lambda body: None in body.values(), M, 400),
    "management-refused": refuses(given("context_management"), M, 400),
    "metadata-refused": refuses(given("metadata"), M, 400),
    "unknown-refused": refuses(given("no_such_field"), M, 400),
    "document-dropped": request(_blocks("document", lambda block: _text("-")), at=M),
    "source-dropped": request(_blocks("search_result", lambda block: {**block, "source": ""}),
                              at=M),
    "file-taken": request(_blocks("image", lambda block: _text("-")), at=M),
    "block-unnamed": _error(turn("error.message", lambda text: text.replace("tag", "word"))),
}  # fmt: skip
TOOLS = {
    "first-tool": Fault(reply=lambda path, body, sent: (
        put(f"{CALL}.name", sent["tools"][0]["name"])(body)
        if path == M and sent.get("tools") else body)),
    "call-id": _reply(put(f"{CALL}.id", "call_1")),
    "input-text": _reply(put(f"{CALL}.input", "{}")),
    "any-ignored": valid(put("tool_choice", {"type": "auto"}), at=M,
                         when=has("tool_choice.type", "any")),
    "none-ignored": valid(put("tool_choice", {"type": "auto"}), at=M,
                          when=has("tool_choice.type", "none")),
    "none-hides": valid(put("tools", []), at=M, when=has("tool_choice.type", "none")),
    "always-parallel": valid(drop("tool_choice.disable_parallel_tool_use"), at=M),
    "type-refused": refuses(has("tools.*.type", "custom"), M, 400),
    "result-dropped": request(put(f"{RESULT}.content", ""), at=M),
    "result-blocks-dropped": request(turn(f"{RESULT}.content", lambda content: (
        "" if isinstance(content, list) else content)), at=M),
    "error-ignored": request(put(f"{RESULT}.is_error", False), at=M),
    "text-first-refused": refuses(has(f"{IN_MESSAGES}[type=text].text", "Here."), M, 400),
    "instructions-between-refused": refuses(has("messages.*[role=system].content", "Be brief."),
                                            M, 400),
    "orphan-result-unnamed": _error(turn("error.message", lambda text: (
        "Wrong." if "unexpected" in text else text))),
    "orphan-call-unnamed": _error(turn("error.message", lambda text: (
        "Wrong." if "without" in text else text))),
    "server-tool-shown": request(turn("tools", lambda tools: (
        _without_servers(tools) if isinstance(tools, list) and len(tools) > 1 else tools)), at=M),
    "server-tool-taken": request(turn("tools", lambda tools: (
        _without_servers(tools) if isinstance(tools, list) and len(tools) == 1 else tools)),
        at=M),
    "bash-empty": _reply(put(f"{CALL}[name=bash].input", {})),
    "absent-taken": request(put("tool_choice", {"type": "auto"}), at=M,
                            when=has("tool_choice.name", "no_such_tool")),
    "forced-thinking-refused": refuses(given("thinking", "tool_choice"), M, 400),
}  # fmt: skip


def _event(kind: str) -> str:
    return f"*[type={kind}]"


def _second(found: Sequence[Any], kind: str) -> list[Any]:
    """Return events without the second delta of a kind."""
    deltas = [event for event in found if (event.get("delta") or {}).get("type") == kind]
    return [event for event in found if not any(event is one for one in deltas[1:2])]


def _early(found: list[Any]) -> list[Any]:
    """Move signatures to the start of their blocks."""
    signed = [e for e in found if (e.get("delta") or {}).get("type") == "signature_delta"]
    rest = [event for event in found if not any(event is one for one in signed)]
    for event in signed:
        at = next(i for i, one in enumerate(rest) if one.get("index") == event["index"])
        rest.insert(at + 1, event)
    return rest


STREAMS = {
    "events-unnamed": Fault(event=lambda data: (
        data.partition(b"\n")[2] if data.startswith(b"event: content") else data)),
    "done": Fault(event=lambda data: (
        data + b"data: [DONE]\n\n" if b"message_stop" in data else data)),
    "start-id": _stream(put(f"{_event('message_start')}.message.id", "1")),
    "start-made": _stream(put(f"{_event('message_start')}.message.usage.output_tokens", 9)),
    "thought-cut": _stream(turn("*.delta[type=thinking_delta].thinking", lambda text: text[:1])),
    "signature-cut": _stream(turn("*.delta.signature", lambda text: text[:-1])),
    "block-begun": _stream(put("*.content_block[type=text].text", "1")),
    "call-no-id": _stream(put("*.content_block[type=tool_use].id", "")),
    "no-stop": _stream(drop(_event("message_stop"))),
    "no-block-stop": _stream(drop(_event("content_block_stop"))),
    "index-one": _stream(turn("*.index", lambda index: index + 1)),
    "delta-lost": _stream(lambda found: _second(found, "text_delta")),
    "start-zero": _stream(put(f"{_event('message_start')}.message.usage.input_tokens", 0)),
    "end-no-output": _stream(drop(f"{_event('message_delta')}.usage.output_tokens")),
    "first-piece": _stream(lambda found: [
        event for event in found if (event.get("delta") or {}).get("partial_json") != ""]),
    "piece-lost": _stream(lambda found: _second(_second(found, "input_json_delta"),
                                                "input_json_delta")),
    "start-input": _stream(put(f"{_event('content_block_start')}.content_block[type=tool_use]"
                               ".input", {"city": "Paris"})),
    "no-signature": _stream(lambda found: [
        e for e in found if (e.get("delta") or {}).get("type") != "signature_delta"]),
    "signature-early": _stream(_early),
    "stream-error-200": request(put("messages", [{"role": "user", "content": "Hi"}]), at=M,
                                when=lambda body: (
                                    body.get("stream") and body.get("messages") == [])),
}  # fmt: skip

NONE: Mapping[str, Any] = {
    "model": "org/toy", "max_tokens": 24, "messages": [{"role": "user", "content": "Hi"}],
}  # fmt: skip
ERRORS = {
    **{f"any-{name}": request(put(name, value), at=M, when=lacks(name))
       for name, value in NONE.items()},
    "missing-unnamed": _error(turn("error.message", lambda text: (
        "Wrong." if "Field required" in text else text))),
    "any-temperature": request(swap("temperature", 1.5, 1), at=M),
    "any-limit": request(swap("max_tokens", -1, 1), at=M),
    "any-role": request(swap("messages.*.role", "nobody", "user"), at=M),
    "any-stop": request(swap("stop_sequences", [""], []), at=M),
    "any-budget": request(swap("thinking.budget_tokens", 1, 2000), at=M),
    "any-tool": request(swap("tools.*.type", "no_such_tool_1", "bash_20250124"), at=M),
    "any-servers": request(drop("mcp_servers"), at=M),
    "any-model-name": request(swap("model", "no-such-model-anywhere", "org/toy"), at=M),
    "model-untold": _error(turn("error.message", lambda text: (
        "Unknown." if text.startswith("model: ") else text))),
    "long-untold": _error(turn("error.message", lambda text: (
        "Too long." if "too long" in text else text))),
    "error-of-openai": _error(drop("type")),
    "not-found-500": _error(turn("error.type", lambda kind: (
        "api_error" if kind == "not_found_error" else kind))),
    "key-500": _error(turn("error.type", lambda kind: (
        "api_error" if kind == "authentication_error" else kind))),
    "models-ends": reply(drop("first_id"), at="message models"),
    "models-no-time": reply(put("data.*.created_at", 0), at="message models"),
    "models-of-openai": reply(drop("has_more"), at="message models"),
    "version-needed": rejects(lambda method, path, sent: (
        path == M and "anthropic-version" not in sent), 400),
    "beta-refused": rejects(lambda method, path, sent: "anthropic-beta" in sent, 400),
}  # fmt: skip
FAULTS = {f"message-{name}": one
          for name, one in (BODIES | INPUT | TOOLS | STREAMS | ERRORS).items()}  # fmt: skip
