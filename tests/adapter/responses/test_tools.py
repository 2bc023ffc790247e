"""Tests of the tools of Responses requests: what the model sees, what is echoed, what is listed."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.responses.tools import CalledTool, tools_of
from latimer.schemas import limits

from .requests import ITEMS, request_of, user

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
F = {"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS}
G = {"type": "function", "name": "g"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": LARK}
SPACE = {"type": "namespace", "name": "mcp__s", "description": "Of s.", "tools": [F, G]}
HOSTED = [
    {"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}, {"type": "computer_use"},
    {"type": "mcp", "server_label": "a", "server_url": "https://a"}, {"type": "local_shell"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]}, {"type": "tool_search"},
    {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "image_generation"},
    {"type": "shell"}, {"type": "apply_patch"}, {"type": "programmatic_tool_calling"},
]  # fmt: skip


def test_a_function_is_echoed_with_all_its_keys() -> None:
    """A function is echoed with five keys, and is strict unless it says false."""
    tools = tools_of(request_of(tools=[F, {**G, "strict": False, "defer_loading": True}]))
    assert tools.echo == [
        {**F, "strict": True},
        {**G, "description": None, "parameters": None, "strict": False},
    ]
    assert tools.choice_echo == "auto"
    assert tools.names == {"f": CalledTool("f"), "g": CalledTool("g")}
    assert tools.tool_set is not None
    assert [one.name for one in tools.tool_set.listed] == ["f", "g"]
    assert tools.tool_set.paths == ["tools[0]", "tools[1]"]
    assert not tools.tool_set.custom


def test_members_without_effect_are_listed() -> None:
    """A tool that the model may not call itself, or not yet, is offered, and the member listed."""
    loaded = {**SPACE, "tools": [{**F, "defer_loading": True}, {**G, "defer_loading": False}]}
    custom = {"type": "custom", "name": "p", "async": True, "allowed_callers": ["programmatic"]}
    direct = {**G, "allowed_callers": ["direct", "programmatic"], "output_schema": {}}
    tools = tools_of(request_of(tools=[loaded, custom, direct]))
    assert tools.ignored == [
        "tools[0].tools[0].defer_loading", "tools[1].allowed_callers", "tools[1].async",
    ]  # fmt: skip
    assert tools.tool_set is not None
    assert len(tools.tool_set.functions) == 4


@pytest.mark.parametrize(
    ("kind", "ignored"),
    [
        ("tool_search_output", []),
        ("additional_tools", ["input[0].tools[0].tools[0].defer_loading"]),
    ],
)
def test_a_tool_that_was_searched_is_no_longer_deferred(kind: str, ignored: list[str]) -> None:
    """`defer_loading` of a tool that a search has found is not listed; it has been loaded."""
    deferred = {**SPACE, "tools": [{**F, "defer_loading": True}]}
    assert tools_of(request_of(input=[{"type": kind, "tools": [deferred]}])).ignored == ignored


def test_a_custom_tool_is_a_function_that_takes_text() -> None:
    """A custom tool is shown with one string argument, and keeps its grammar and its path."""
    tools = tools_of(request_of(tools=[G, PATCH, {"type": "custom", "name": "p"}]))
    assert tools.tool_set is not None
    _, shown, plain = tools.tool_set.listed
    assert shown.parameters is not None
    assert list(shown.parameters["properties"]) == ["input"]
    assert 'start: "a"' in shown.parameters["properties"]["input"]["description"]
    assert plain.parameters is not None
    assert plain.parameters["properties"] == {"input": {"type": "string"}}
    grammar = tools.tool_set.custom["apply_patch"]
    assert grammar is not None
    assert grammar.param == "tools[1].format.definition"
    assert tools.tool_set.custom["p"] is None
    assert tools.names["apply_patch"] == CalledTool("apply_patch", None, True)
    assert tools.echo[1:] == [
        PATCH,
        {"type": "custom", "name": "p", "description": None, "format": {"type": "text"}},
    ]


def test_a_namespace_is_flattened() -> None:
    """The functions of a namespace are shown under its name, which their calls do not have."""
    tools = tools_of(request_of(tools=[SPACE, F]))
    assert tools.tool_set is not None
    listed = tools.tool_set.listed
    assert [one.name for one in listed] == ["mcp__s__f", "mcp__s__g", "f"]
    assert [one.description for one in listed] == ["Of s.\n\nd", None, "d"]
    assert tools.tool_set.paths == ["tools[0].tools[0]", "tools[0].tools[1]", "tools[1]"]
    assert tools.names["mcp__s__f"] == CalledTool("f", "mcp__s")
    (space, _) = tools.echo
    assert [one["name"] for one in space["tools"]] == ["f", "g"]
    assert {**space, "tools": []} == {**SPACE, "tools": []}


def test_hosted_tools_are_listed() -> None:
    """Tools that nobody runs here are neither shown nor echoed, but listed with their place."""
    inner = {**SPACE, "tools": [HOSTED[0], G]}
    tools = tools_of(request_of(tools=[*HOSTED, inner]))
    place = len(HOSTED)
    assert tools.ignored == [*(f"tools[{i}]" for i in range(place)), f"tools[{place}].tools[0]"]
    assert tools.names.keys() == {"mcp__s__g"}
    only = tools_of(request_of(tools=HOSTED))
    assert (only.tool_set, only.echo) == (None, [])


def test_items_can_add_tools() -> None:
    """Tools of items join those of the request, without an echo; a later definition replaces."""
    added = {"type": "additional_tools", "role": "developer", "tools": [F, HOSTED[0]]}
    found = {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [SPACE]}
    items = [added, user(), found]
    tools = tools_of(request_of(tools=[G], input=items), ITEMS.validate_python([added]))
    assert tools.tool_set is not None
    assert [one.name for one in tools.tool_set.listed] == ["g", "f", "mcp__s__f", "mcp__s__g"]
    assert tools.tool_set.paths == [
        "tools[0]", "input[0].tools[0]", "input[2].tools[0].tools[0]",
        "input[2].tools[0].tools[1]",
    ]  # fmt: skip
    assert [one["name"] for one in tools.echo] == ["g"]
    assert tools.ignored == ["input[0].tools[1]"]


ALLOWED = {"type": "allowed_tools", "mode": "required",
           "tools": [{"type": "function", "name": "g"}, HOSTED[3]]}  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "mode", "callable_names", "ignored"),
    [
        (None, "auto", ["f", "apply_patch", "mcp__s__f", "mcp__s__g"], []),
        ("auto", "auto", ["f", "apply_patch", "mcp__s__f", "mcp__s__g"], []),
        ("required", "required", ["f", "apply_patch", "mcp__s__f", "mcp__s__g"], []),
        ({"type": "custom", "name": "apply_patch"}, "named", ["apply_patch"], []),
        ({"type": "function", "name": "g"}, "named", ["mcp__s__g"], []),
        ({"type": "function", "name": "mcp__s__f"}, "named", ["mcp__s__f"], []),
        ({"type": "function", "name": "f", "namespace": "mcp__s"}, "named", ["mcp__s__f"], []),
        (ALLOWED, "required", ["mcp__s__g"], ["tool_choice.tools[1]"]),
        ({**ALLOWED, "mode": "auto"}, "auto", ["mcp__s__g"], ["tool_choice.tools[1]"]),
    ],
)
def test_choices(choice: Any, mode: str, callable_names: list[str], ignored: list[str]) -> None:
    """A choice limits the calls; the model sees all tools, and the choice is echoed as sent."""
    tools = tools_of(request_of(tools=[F, PATCH, SPACE], tool_choice=choice))
    assert tools.tool_set is not None
    assert tools.tool_set.mode == mode
    assert [one.name for _, one in tools.tool_set.functions] == callable_names
    assert len(tools.tool_set.listed) == 4
    assert tools.choice_echo == (choice or "auto")
    assert tools.ignored == ignored
    assert tools.tool_set.parallel == (mode != "named")


def test_no_call_is_possible() -> None:
    """With the choice `none` the model may call no tool, and the tools are still echoed."""
    tools = tools_of(request_of(tools=[F], tool_choice="none"))
    assert tools.tool_set is None
    assert (tools.choice_echo, len(tools.echo)) == ("none", 1)


def test_one_call_at_a_time() -> None:
    """With `parallel_tool_calls: false` a response has one call; the default is several."""
    for value, expected in ((False, False), (True, True), (None, True)):
        tools = tools_of(request_of(tools=[F], parallel_tool_calls=value))
        assert tools.tool_set is not None
        assert tools.tool_set.parallel is expected


def test_tools_of_namespaces_count() -> None:
    """The limit of tools includes those of namespaces."""
    many = [{"type": "function", "name": f"f{number}"} for number in range(limits.TOOLS.maximum)]
    tools_of(request_of(tools=[{**SPACE, "tools": many}]))
    with pytest.raises(InvalidRequest) as caught:
        tools_of(request_of(tools=[{**SPACE, "tools": many}, G]))
    assert (caught.value.param, caught.value.code) == ("tools", "array_above_max_length")


def test_long_names_are_valid() -> None:
    """A name may be longer in a namespace than chat allows."""
    space = {**SPACE, "name": "n" * 100, "tools": [{**F, "name": "f" * 100}]}
    (name,) = tools_of(request_of(tools=[space])).names
    assert len(name) == 202
