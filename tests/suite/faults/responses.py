"""Faults in responses: their bodies, rejections, tools, streams and state, and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.faults.edits import (
    Edit,
    drop,
    error,
    events,
    given,
    has,
    ignores,
    keep,
    longer,
    omits,
    put,
    query,
    refuses,
    reply,
    request,
    saying,
    says,
    swap,
    takes,
    turn,
    valid,
    values,
)
from suite.responses.routes import TOKENS
from suite.server import RESPONSES as R
from suite.server import Fault

PART = "output.*.content.*"
MESSAGE = "output.*[type=message]"
CALL = "output.*[type=function_call]"
REASONING = "output.*[type=reasoning]"


def _reply(*edits: Edit) -> Fault:
    return reply(*edits, at=R)


def _first(content: Any) -> Any:
    return content[:1] if isinstance(content, list) else content


BODIES = {
    "no-instructions-key": _reply(drop("error")),
    "object": _reply(put("object", "responses")),
    "id": _reply(put("id", "1")),
    "tools-null": _reply(put("tools", None)),
    "role": _reply(keep(f"{MESSAGE}.role", "user")),
    "message-id": _reply(keep(f"{MESSAGE}.id", "1")),
    "part-type": _reply(keep(f"{PART}.type", "text")),
    "other-answer": _reply(keep(f"{PART}.text", "Other.")),
    "no-details": _reply(drop("usage.input_tokens_details")),
    "usage-sum": _reply(put("usage.total_tokens", 0)),
    "always-incomplete": _reply(put("status", "incomplete")),
    "always-completed": _reply(put("status", "completed")),
    "details-empty": _reply(put("incomplete_details", None)),
    "limit-ignored": valid(swap("max_output_tokens", 16, 40)),
    "small-limit": takes(has("max_output_tokens", 15), R, max_output_tokens=16),
    "instructions-ignored": valid(put("instructions", None), at=R),
    "instructions-untold": _reply(put("instructions", None)),
    "items-refused": refuses(has("input", list), R),
    "first-part": request(turn("input.*.content", _first)),
    "call-no-id": _reply(put(f"{CALL}.id", "call")),
    "call-arguments": _reply(put(f"{CALL}.arguments", "{}")),
    "call-as-text": ignores("tools", "tool_choice", at=R),
    "calls-refused": refuses(has("input", saying("function_call_output")), R),
    "format-ignored": valid(put("text", None), at=R),
    "nulls-refused": refuses(lambda body: None in body.values(), R),
    "namespace-emptied": _reply(drop("tools.*[type=namespace].tools.*.description")),
    "limit-unstated": _reply(
        lambda body: body if body["max_output_tokens"] else drop("max_output_tokens")(body)
    ),
    "no-background": _reply(drop("background")),
    "no-verbosity": _reply(put("text", {"format": {"type": "text"}})),
    "temperature-null": _reply(put("temperature", None)),
    "created-fraction": _reply(turn("created_at", lambda time: time + 0.5)),
    "created-milliseconds": _reply(turn("created_at", lambda time: 1000 * time)),
    "no-written-tokens": _reply(put("usage.input_tokens_details", {"cached_tokens": 0})),
    "item-completed": _reply(keep(f"{MESSAGE}.status", "completed")),
    "metadata-untold": _reply(put("metadata", {})),
    "logprobs-null": _reply(keep(f"{PART}.logprobs", None)),
    "top-logprobs-ignored": ignores("top_logprobs", at=R),
    "stop-ignored": ignores("stop", at=R),
    "seed-ignored": ignores("seed", at=R),
    "logprobs-ignored": ignores("include", "top_logprobs", at=R),
    "bytes-null": _reply(put(f"{PART}.logprobs.*.bytes", None)),
    "image-dropped": request(drop("input.*.content.*[image_url]")),
    "file-ignored": request(drop("input.*.content.*[file_id]")),
    "original-refused": refuses(has("input", saying("'original'")), R),
}

# A value for a field that is absent.
NONE = object()
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
# Each row: the fault's name, the field, the invalid value that is taken, and what it becomes.
TAKEN: Sequence[tuple[str, str, Any, Any]] = (
    ("temperature", "temperature", 2.1, 1),
    ("low-temperature", "temperature", -1, 1),
    ("top-p", "top_p", 1.1, 1),
    ("top-logprobs", "top_logprobs", 21, 20),
    ("include", "include", ["no_such_thing"], []),
    ("truncation", "truncation", "no_such_word", "disabled"),
    ("limit", "max_output_tokens", "many", 16),
    ("model", "model", "no-such-model-anywhere", "org/toy"),
    ("null-model", "model", None, "org/toy"),
    ("missing-model", "model", NONE, "org/toy"),
    ("missing-input", "input", NONE, "Hello"),
    ("null-input", "input", None, "Hello"),
    ("input", "input", 5, "Hello"),
    ("empty-input", "input", "", "Hello"),
    ("empty-list", "input", [], "Hello"),
    ("previous", "previous_response_id", "resp_none", None),
    ("item", "input", [5], "Hello"),
    ("item-type", "input", [{"type": "no_such_item"}], "Hello"),
    ("role", "input", [{"role": "nobody", "content": "Hello"}], "Hello"),
    ("empty-item", "input", [{"role": "user"}], "Hello"),
    ("tools", "tools", [{"type": "function", "function": {"name": "get_weather"}}], []),
    ("tool-type", "tools", [{"type": "no_such_tool"}], []),
    ("choice-form", "tool_choice", {"type": "function", "function": {"name": "get_weather"}},
     "auto"),
    ("absent-tool", "tool_choice", {"type": "function", "name": "no_such_tool"}, "auto"),
    ("format", "text", {"format": CHAT_FORMAT}, None),
)  # fmt: skip
REJECTIONS = {
    **{f"any-{name}": takes(omits(field) if value is NONE else has(field, value), R, **{field: new})
       for name, field, value, new in TAKEN},
    "any-metadata": takes(has("metadata", longer(16)), R, metadata={}),
    "any-part": takes(has("input", saying("no_such_part")), R, input="Hello"),
    "any-role-part": takes(has("input.*[role=user]", saying("output_text")), R, input="Hello"),
    "required-alone": takes(lambda body: (
        body.get("tool_choice") == "required" and not body.get("tools")), R, tool_choice="auto"),
    "messages": takes(has("messages", list), R, messages=None, input="Hello"),
    "background-ignored": request(drop("background"), at=R),
    "moderation-ignored": request(drop("moderation"), at=R),
    "prompt-ignored": request(drop("prompt"), at=R),
    "no-such-field-ignored": request(drop("no_such_field"), at=R),
    "error-no-param": error(put("error.param", None), when=has("sent.input")),
    "error-no-code": error(put("error.code", None), when=has("sent.input")),
    "orphan-unnamed": error(put("error.message", "Invalid input."), when=says("No tool")),
    "context-text": error(turn("error.message", lambda text: text.partition(" Your input")[0])),
}  # fmt: skip


def _swapped(body: Any) -> bool:
    """Return True if the outputs of calls are in another order than the calls."""
    calls, outputs = (
        values(f"input.*[type={kind}].call_id", body)
        for kind in ("function_call", "function_call_output")
    )
    return calls != outputs


def _sealed(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning" and not item.get("content")


TOOLS = {
    "call-same-id": _reply(turn(CALL, lambda item: {**item, "call_id": item["id"]})),
    "call-status-null": _reply(put(f"{CALL}.status", None)),
    "always-parallel": ignores("parallel_tool_calls", at=R),
    "dump-refused": refuses(has("input.*[type=function_call][id]"), R),
    "outputs-by-place": refuses(_swapped, R),
    "none-ignored": valid(swap("tool_choice", "none", "auto"), at=R),
    "required-ignored": valid(swap("tool_choice", "required", "auto"), at=R),
    "allowed-ignored": valid(put("tool_choice", "required"), at=R,
                             when=has("tool_choice", saying("allowed_tools"))),
    "hosted-refused": refuses(has("tools.*.type", "web_search"), R),
    "hosted-ignored": takes(has("tool_choice", {"type": "file_search"}), R, tool_choice="auto"),
    "agent-refused": refuses(given("client_metadata"), R, 400),
    "namespace-untold": _reply(put(f"{CALL}.namespace", None)),
    "custom-as-function": _reply(turn("output.*[type=custom_tool_call]", lambda item: {
        **item, "type": "function_call", "arguments": item["input"]})),
    "custom-free": valid(put("tools.*[type=custom].format", None), at=R),
    "custom-dropped": request(drop("input.*[type=custom_tool_call]"),
                              drop("input.*[type=custom_tool_call_output]")),
    "reasoning-last": _reply(turn("output", lambda output: output[::-1])),
    "reasoning-tagged": _reply(put(f"{REASONING}.content", [
        {"type": "reasoning_text", "text": "<think>Yes.</think>"}])),
    "reasoning-dropped": request(drop("input.*[type=reasoning]")),
    "summary-ignored": valid(put("reasoning.summary", None)),
    "effort-untold": _reply(turn("reasoning", lambda found: (
        {**found, "effort": None} if found else found))),
    "logprobs-twice": _reply(turn("output.*.content.*.logprobs", lambda found: found + found[-1:])),
    "always-sealed": _reply(put(f"{REASONING}.encrypted_content", "sealed:Yes.")),
    "sealed-ignored": request(turn("input", lambda found: (
        [item for item in found if not _sealed(item)] if isinstance(found, list) else found))),
}  # fmt: skip

# Streams.


def _event(kind: str) -> str:
    return f"*[type=response.{kind}]"


def _numbered(found: Sequence[Any]) -> list[Any]:
    return [{**event, "sequence_number": at} for at, event in enumerate(found)]


def _lost(kind: str) -> Fault:
    """Return a fault that loses the second delta of a kind."""

    def change(found: list[Any]) -> list[Any]:
        deltas = [event for event in found if kind in event["type"] and "delta" in event]
        return _numbered([event for event in found if event not in deltas[1:2]])

    return events(change)


def _mixed(found: list[Any]) -> list[Any]:
    """Add all calls before the first of them ends."""
    added = values(_event("output_item.added"), found)
    rest = [event for event in found if event not in added]
    return found if len(added) < 2 else _numbered([*rest[:2], *added, *rest[2:]])


def _unended(found: list[Any]) -> list[Any]:
    """Drop the ends of the items of an incomplete response."""
    cut = "incomplete" in found[-1]["type"]
    return drop(_event("output_item.done"))(found) if cut else found


STREAMS = {
    "events-unnamed": Fault(event=lambda data: (
        data.partition(b"\n")[2] if data.startswith(b"event: ") else data)),
    "events-unnumbered": events(put("*.sequence_number", 0)),
    "events-swapped": events(lambda found: [found[1], found[0], *found[2:]]),
    "no-part-event": events(drop(_event("content_part.added"))),
    "no-end": events(lambda found: found[:-1]),
    "delta-lost": _lost("output_text"),
    "done-empty": events(put(f"{_event('output_text.done')}.text", "")),
    "delta-no-item": events(*(drop(f"{_event(f'{kind}_text.delta')}.item_id") for kind in (
        "output", "reasoning", "reasoning_summary"))),
    "stream-no-usage": events(put("*.response.usage", None)),
    "stream-no-output": events(put("*.response.output", [])),
    "event-type": events(turn("*.logprobs", lambda found: 0)),
    "arguments-lost": _lost("function_call"),
    "created-full": events(put(f"{_event('created')}.response.output", [{"type": "message"}])),
    "goes-on": events(lambda found: _numbered([*found, found[-1]])),
    "early-usage": events(lambda found: (
        put("*.response.usage", found[-1]["response"]["usage"])(found))),
    "other-item-id": events(put(f"{_event('output_item.added')}.item.id", "msg_0")),
    "part-empty": events(put(f"{_event('content_part.done')}.part.text", "")),
    "last-other": events(lambda found: [
        *found[:-1], put("response.tool_choice", "none")(found[-1])]),
    "cut-early": events(_unended),
    "part-no-lists": events(drop("*.part.annotations")),
    "never-padded": ignores("stream_options", at=R),
    "padded-by-number": events(turn("*.obfuscation", len)),
    "always-padded": valid(put("stream_options", {"include_obfuscation": True}), at=R),
    "not-added": events(drop(_event("output_item.added"))),
    "stream-error-200": error(status=200, when=has("sent[stream].input")),
    "arguments-early": events(turn(f"{_event('output_item.added')}.item.arguments",
                                   lambda text: "{}")),
    "calls-mixed": events(_mixed),
    "input-lost": _lost("custom_tool_call"),
    "delta-no-logprobs": events(put(f"{_event('output_text.delta')}.logprobs", [])),
    "thought-lost": _lost("reasoning_text"),
    "summary-index": events(put("*.summary_index", 1)),
    "thought-index": events(put(f"{_event('reasoning_text.delta')}.output_index", 1)),
    "summary-unsent": events(drop(_event("reasoning_summary_text.delta"))),
    "stored-late": Fault(late=0.2),
    "aborted-stored": Fault(keeps_aborted=True),
    "replay-cut": Fault(replay=lambda found: found[:-1]),
    "replay-begins-ended": Fault(replay=lambda found: (
        put(f"{_event('created')}.response", found[-1]["response"])(found))),
}  # fmt: skip

# Stored responses, and conversations.

LISTED = "response input_items"


def _inherited(path: str, body: Any, sent: Any) -> Any:
    """Give a response that continues another one a tool that its request does not have."""
    if path != R or not sent.get("previous_response_id") or sent.get("tools"):
        return body
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": ""}
    return {**body, "tools": [tool]}


def _with_instructions(found: list[Any], parent: Any) -> list[Any]:
    """Return items after the instructions of the response that they continue."""
    told = parent.get("instructions")
    return [{"role": "system", "content": told}, *found] if told else found


STATE = {
    "not-stored": reply(lambda body: {"id": "x", "output": []}, at="response GET"),
    "delete-false": reply(put("deleted", False), at="response DELETE"),
    "always-stored": valid(put("store", True), at=R),
    "says-not-stored": reply(put("store", False), at=R, when=omits("store")),
    "previous-ignored": valid(put("previous_response_id", None), at=R),
    "no-items": reply(put("data", []), at=LISTED),
    "item-text": reply(put("data.*.content", [{"text": ""}]), at=LISTED),
    "tokens-zero": reply(put("input_tokens", 0), at=TOKENS),
    "unknown-400": error(status=400, when=says("id 'resp_none'")),
    "stored-other": reply(put("temperature", 0.5), at="response GET"),
    "parent-no-code": error(put("error.code", None),
                            when=has("error.param", "previous_response_id")),
    "chain-no-output": Fault(chain=lambda found, parent: [
        item for item in found if item.get("role") != "assistant"]),
    "previous-untold": _reply(put("previous_response_id", None)),
    "tools-inherited": Fault(reply=_inherited),
    "instructions-inherited": Fault(chain=_with_instructions),
    "output-alone-refused": refuses(lambda body: (
        body.get("previous_response_id") and "call_output" in str(body.get("input"))), R),
    "tokens-no-tools": ignores("tools", at=TOKENS),
    "tokens-no-chain": ignores("previous_response_id", at=TOKENS),
    "items-short": reply(put("data.*.content", "Hello"), at=LISTED),
    "items-no-lists": reply(drop("data.*.content.*.logprobs"), at=LISTED),
    "items-same-id": reply(put("data.*.id", "msg_0"), at=LISTED),
    "items-ascending": query(lambda found: {"order": "asc", **found}),
    "reference-dropped": request(drop("input.*[type=item_reference]")),
    "reference-400": error(status=400, when=says("Item with id")),
    "cancelled": Fault(refuses_cancel=False),
    "replay-all": query(drop("starting_after")),
    "compact-500": Fault(no_compact=500),
    "never-cut": request(put("truncation", "disabled"), when=has("truncation", "auto")),
}  # fmt: skip
CONVERSATIONS = {
    "no-metadata": reply(put("metadata", {}), at="conversation GET"),
    "metadata-kept": reply(put("metadata", {}), at="conversation POST"),
    "items-reversed": reply(turn("data", lambda data: data[::-1]), at="conversation items"),
    "added-reversed": reply(turn("data", lambda data: data[::-1]), at="conversation added"),
    "not-read": ignores("conversation"),
    "not-deleted": reply(put("deleted", False), at="conversation DELETE"),
    "and-parent": takes(given("conversation", "previous_response_id"), R, conversation=None),
    "only-stored": takes(has("store", False), R, conversation=None),
    "loses-items": reply(turn("data", lambda data: data[:15]), at="conversation items"),
}
FAULTS = {
    **{f"response-{name}": one
       for name, one in (BODIES | REJECTIONS | TOOLS | STREAMS | STATE).items()},
    **{f"conversation-{name}": one for name, one in CONVERSATIONS.items()},
}  # fmt: skip
