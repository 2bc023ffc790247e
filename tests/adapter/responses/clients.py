"""Requests of real clients in their form: the fields, the items and the tools that they send."""

from __future__ import annotations

from typing import Any, NamedTuple


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


PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Delete File: " filename LF
filename: /(.+)/
%import common.LF"""


def _object(**properties: str) -> dict[str, Any]:
    fields = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


_SHELL = {
    "type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
    "parameters": _object(cmd="string", workdir="string", yield_time_ms="number"),
}  # fmt: skip
_CODEX_TOOLS: list[dict[str, Any]] = [
    _SHELL,
    {"type": "function", "name": "update_plan", "description": "Updates the plan.",
     "strict": False, "parameters": _object(explanation="string")},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}},
    {"type": "namespace", "name": "mcp__mail", "description": "Tools for mail.", "tools": [
        {"type": "function", "name": "_search", "description": "Searches.", "strict": False,
         "defer_loading": True, "parameters": _object(query="string")}]},
    {"type": "web_search", "external_web_access": False},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.",
     "parameters": _object(query="string")},
]  # fmt: skip
_CODEX: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [_text("input_text", "<permissions>")]},
        {"type": "message", "role": "user", "content": [_text("input_text", "<environment>")]},
        {"type": "message", "role": "user", "content": [_text("input_text", "Fix the test.")]},
    ],
    "tools": _CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198c2a4-0000-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "5"},
}
_CODEX_LATER: list[dict[str, Any]] = [
    {"type": "reasoning", "summary": [_text("summary_text", "I look.")], "content": None,
     "encrypted_content": "gAAAAABo"},
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}',
     "call_id": "call_1"},
    {"type": "function_call", "name": "_search", "namespace": "mcp__mail",
     "arguments": '{"query":"a"}', "call_id": "call_2"},
    {"type": "function_call_output", "call_id": "call_1", "output": "test.py"},
    {"type": "function_call_output", "call_id": "call_2",
     "output": [_text("input_text", "none")]},
    {"type": "custom_tool_call", "status": "completed", "call_id": "call_3",
     "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch"},
    {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Done."},
    {"type": "web_search_call", "status": "completed",
     "action": {"type": "search", "query": "a"}},
    {"type": "local_shell_call", "call_id": "call_4", "status": "completed",
     "action": {"type": "exec", "command": ["ls"]}},
    {"type": "message", "role": "assistant", "content": [_text("output_text", "Fixed.")],
     "phase": "final_answer"},
    {"type": "message", "role": "user", "content": [_text("input_text", "Thanks. More?")]},
]  # fmt: skip
_CODEX_NAMES = ["exec_command", "update_plan", "apply_patch", "mcp__mail___search"]
_ADDED = {"type": "additional_tools", "role": "developer", "tools": _CODEX_TOOLS[:3]}
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
    "codex": Sent(_CODEX, ["system", "user", "user"], _CODEX_NAMES, ["tools[4]", "tools[5]"]),
    "codex, a later turn": Sent(
        {**_CODEX, "input": [*_CODEX["input"], *_CODEX_LATER]},
        ["system", "user", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
         "user"],
        _CODEX_NAMES,
        ["tools[4]", "tools[5]", "input[3]", "input[10]", "input[11]"],
    ),
    "codex, tools as an item": Sent(
        {**{name: value for name, value in _CODEX.items() if name != "tools"},
         "input": [_ADDED, *_CODEX["input"]]},
        ["system", "user", "user"], _CODEX_NAMES[:3], [],
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
