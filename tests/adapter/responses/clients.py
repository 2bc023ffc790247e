"""Requests of real clients in their form: the fields, the items and the tools that they send.

Those of Codex are in `tests/conformance/sessions/responses-codex.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

_FILE = Path(__file__).parents[2] / "conformance" / "sessions" / "responses-codex.json"
_SESSIONS = json.loads(_FILE.read_text())["sessions"]


class Sent(NamedTuple):
    """A client's request, and what becomes of it.

    Args:
        roles: the roles of its messages.
        names: the names of its tools, as the model sees them.
        ignored: the paths of tools and items that nobody reads here.
    """

    body: dict[str, Any]
    roles: list[str]
    names: list[str]
    ignored: list[str]


def _object(**properties: str) -> dict[str, Any]:
    fields = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


def _codex(name: str, *more: dict[str, Any]) -> dict[str, Any]:
    """Return the first request of a session, with more items."""
    session = _SESSIONS[name]
    return {**session["request"], "input": [*session["turns"][0]["input"], *more]}


_LATER: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [_text("summary_text", "I look.")],
     "content": None, "encrypted_content": "gAAAAABo"},
    {"type": "function_call", "id": "fc_1", "status": "completed", "name": "exec_command",
     "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
    {"type": "function_call", "id": "fc_2", "name": "search", "namespace": "mcp__mail",
     "arguments": '{"query":"a"}', "call_id": "call_2"},
    {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "test.py"},
    {"type": "function_call_output", "id": "fco_2", "call_id": "call_2",
     "output": [_text("input_text", "none")]},
    {"type": "custom_tool_call", "id": "ctc_3", "status": "completed", "call_id": "call_3",
     "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch"},
    {"type": "custom_tool_call_output", "id": "ctco_3", "call_id": "call_3", "output": "Done."},
    {"type": "web_search_call", "id": "ws_1", "status": "completed",
     "action": {"type": "search", "query": "a"}},
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_4", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "timeout_ms": None, "user": None}},
    {"type": "message", "id": "msg_1", "role": "assistant", "phase": "final_answer",
     "content": [_text("output_text", "Fixed.")]},
    {"type": "message", "id": "msg_2", "role": "user",
     "content": [_text("input_text", "Thanks. More?")]},
]  # fmt: skip
_WEATHER = {
    "type": "function", "name": "get_weather", "strict": True, "description": "",
    "parameters": {**_object(city="string"), "required": ["city"]},
}  # fmt: skip
_CALLED = {
    "id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1",
    "name": "get_weather", "arguments": '{"city":"Paris"}',
}  # fmt: skip
_ANSWERED = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
_SAID = {
    "id": "msg_1", "type": "message", "status": "completed", "role": "assistant",
    "content": [{"type": "output_text", "text": "Sunny.", "annotations": [], "logprobs": []}],
}  # fmt: skip
_OBJECT = {**_object(a="string"), "required": ["a"]}

CLIENTS: dict[str, Sent] = {
    "codex": Sent(
        _codex("a model of one's own"), ["system", "user", "user"],
        ["exec_command", "write_stdin", "update_plan", "view_image",
         "multi_agent_v1__close_agent", "multi_agent_v1__send_input", "mcp__mail__search",
         "get_goal"],
        ["tools[7]"],
    ),
    "codex, a later turn": Sent(
        _codex("a model of Codex's list", *_LATER),
        ["system", "user", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
         "user"],
        ["exec_command", "write_stdin", "apply_patch", "view_image"],
        ["tools[4]", "tools[5]", "input[4]", "input[11]", "input[12]"],
    ),
    "codex, tools as an item": Sent(
        _codex("a newest model"), ["system", "user", "user"],
        ["functions__exec", "functions__wait", "clock__sleep"], [],
    ),
    "openai-agents": Sent(
        {"model": "demo", "instructions": "Be brief.", "include": [], "stream": False,
         "input": [{"role": "user", "content": "Weather?"}, _CALLED, _ANSWERED],
         "tools": [{**_WEATHER, "description": "The weather."}], "parallel_tool_calls": True,
         "text": {"format": {"type": "json_schema", "name": "final_output", "schema": _OBJECT,
                             "strict": True}}},
        ["system", "user", "assistant", "tool"], ["get_weather"], [],
    ),
    "openai-agents, its items sent back": Sent(
        {"model": "demo", "include": ["reasoning.encrypted_content"], "tools": [],
         "input": [{"role": "user", "content": "Hi"},
                   {"id": "rs_1", "type": "reasoning", "summary": [], "status": "completed",
                    "content": [_text("reasoning_text", "Hm.")]},
                   {**_SAID, "phase": None}, {"role": "user", "content": "And?"}]},
        ["user", "assistant", "user"], [], [],
    ),
    "@ai-sdk/openai": Sent(
        {"model": "demo", "store": False, "include": ["reasoning.encrypted_content"],
         "input": [{"role": "developer", "content": "Be brief."},
                   {"role": "user", "content": [_text("input_text", "Weather?")]},
                   {"type": "reasoning", "id": "rs_1", "encrypted_content": "x",
                    "summary": [_text("summary_text", "Hm.")]},
                   _CALLED, _ANSWERED,
                   {"role": "assistant", "id": "msg_1",
                    "content": [_text("output_text", "Sunny.")]},
                   {"role": "user", "content": [_text("input_text", "And?")]}],
         "text": {"format": {"type": "json_schema", "strict": True, "name": "response",
                             "schema": _OBJECT}},
         "tools": [_WEATHER, {"type": "web_search_preview"}], "tool_choice": "auto"},
        ["developer", "user", "assistant", "tool", "assistant", "user"], ["get_weather"],
        ["tools[1]", "input[2]"],
    ),
    "langchain-openai": Sent(
        {"model": "demo", "stream": True, "input": [
            {"type": "message", "role": "user", "content": "Weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            _CALLED, _ANSWERED, {**_SAID, "id": "msg_2"},
            {"role": "user", "type": "message", "content": [
                _text("input_text", "And?"),
                {"type": "input_image", "image_url": "https://a/b.png", "detail": "auto"}]}],
         "tools": [{**_WEATHER, "strict": None}], "top_p": 0.9},
        ["user", "assistant", "tool", "assistant", "user"], ["get_weather"], ["input[1]"],
    ),
    "open responses": Sent(
        {"model": "demo", "input": [
            {"type": "message", "role": "system", "content": "Talk like a pirate."},
            {"type": "message", "role": "user", "content": "Say hello."}]},
        ["system", "user"], [], [],
    ),
}  # fmt: skip
