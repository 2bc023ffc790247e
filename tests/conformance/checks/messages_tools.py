"""The tools of a Messages request, their calls and results (contract, section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..check import Skip, check, expect
from ..target import Api
from .messages import (
    ASK,
    SCHEMA,
    ask,
    blocks,
    expect_end,
    expect_error,
    expect_same,
    said,
    send,
    size,
    text,
    user,
)

WEATHER = {"name": "get_weather", "description": "Get the weather", "input_schema": SCHEMA}
TIME = {**WEATHER, "name": "get_time", "description": "Get the time"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
BASH = {"type": "bash_20250124", "name": "bash"}
ANY = {"type": "any"}
LIMIT = 200


def call(call_id: str = "toolu_1", city: str = "Paris") -> dict[str, Any]:
    """Return a call."""
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {"city": city}}


def result(call_id: str = "toolu_1", **members: Any) -> dict[str, Any]:
    """Return a result."""
    return {"type": "tool_result", "tool_use_id": call_id, **members}


async def called(api: Api, **fields: Any) -> list[Any]:
    """Return the calls of a message that must have some."""
    found = await ask(api, **{"max_tokens": LIMIT, "tools": [WEATHER], **fields})
    if found["stop_reason"] == "max_tokens":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    calls = blocks(found, "tool_use")
    expect(calls, f"expected a call, but got {found['content']}")
    expect_end(found, "tool_use")
    for one in calls:
        valid = one["id"].startswith("toolu_") and isinstance(one["input"], dict)
        expect(valid, f"expected toolu_… and an object as input, but got {one}")
    return calls


@check("messages.tool",
       "tool_choice tool gives a call of that tool, whose input is an object that matches the "
       "schema.",
       "must", "M4 M13.34 M13.39")  # fmt: skip
async def tool(api: Api) -> None:
    choice = {"type": "tool", "name": "get_time"}
    for one in await called(api, tools=[WEATHER, TIME], tool_choice=choice):
        expect(one["name"] == "get_time", f"expected get_time, but got {one}")
        city = one["input"].get("city")
        expect(city in ("Paris", "Rome"), f"expected an input that matches, but got {one}")


@check("messages.tool-any", "tool_choice any gives a call.", "must", "M4 M13.34")
async def tool_any(api: Api) -> None:
    await called(api, tool_choice=ANY)


@check("messages.tool-none",
       "tool_choice none gives no call, and the tools stay in the prompt.",
       "must", "M4 M13.34")  # fmt: skip
async def tool_none(api: Api) -> None:
    asked = [user("What is the weather in Paris?")]
    fields: Mapping[str, Any] = {"messages": asked, "tools": [WEATHER]}
    found = await ask(api, **fields, tool_choice={"type": "none"})
    expect(not blocks(found, "tool_use"), f"expected no call, but got {found['content']}")
    none = await size(api, *asked, tools=[WEATHER], tool_choice={"type": "none"})
    expect_same(none, await size(api, *asked, tools=[WEATHER]), "with tool_choice none")


@check("messages.tool-one",
       "disable_parallel_tool_use with any gives exactly one call.",
       "must", "M4 M13.35")  # fmt: skip
async def tool_one(api: Api) -> None:
    asked = [user("What is the weather in Paris and in Rome?")]
    choice = {**ANY, "disable_parallel_tool_use": True}
    calls = await called(api, messages=asked, tool_choice=choice)
    expect(len(calls) == 1, f"expected one call, but got {len(calls)}")


@check("messages.tool-type", "The type custom, null and none are the same.", "must", "M4 M13.32")
async def tool_type(api: Api) -> None:
    plain = await size(api, tools=[WEATHER])
    for kind in ("custom", None):
        found = await size(api, tools=[{**WEATHER, "type": kind}])
        expect_same(found, plain, f"with the type {kind!r}")


@check("messages.tool-loop",
       "The result of a call is part of the prompt: as a text, as blocks, or empty.",
       "must", "M3.2 M13.27 M13.28")  # fmt: skip
async def tool_loop(api: Api) -> None:
    async def sized(**members: Any) -> int:
        return await size(api, user(ASK), said(call()), user(result(**members)), tools=[WEATHER])

    empty = await sized()
    empties: tuple[Any, ...] = (None, [])
    for nothing in empties:
        expect_same(await sized(content=nothing), empty, f"with the content {nothing}")
    plain = await sized(content="Sunny.")
    expect(plain > empty, "expected the result in the prompt, but it has as many tokens")
    expect_same(await sized(content=[text("Sunny.")]), plain, "with a block")


@check("messages.tool-error", "is_error changes the prompt.", "must", "M3.2 M13.29")
async def tool_error(api: Api) -> None:
    sizes = [
        await size(api, user(ASK), said(call()), user(result(content="No.", is_error=wrong)))
        for wrong in (False, True)
    ]
    expect(sizes[0] != sizes[1], "expected another prompt with is_error, but it is the same")


@check("messages.tool-results",
       "Several results are accepted in one message, in any order and after other text.",
       "must", "M3.2 M13.30")  # fmt: skip
async def tool_results(api: Api) -> None:
    calls = said(text("Well."), call("toolu_1"), call("toolu_2", "Rome"))
    results = [result("toolu_1", content="Sunny."), result("toolu_2", content="Windy.")]
    for given in (results, results[::-1], [text("Here."), *results]):
        await size(api, user(ASK), calls, user(*given), tools=[WEATHER])


@check("messages.tool-system",
       "Instructions between a call and its result are accepted.",
       "must", "M3.1 M13.20")  # fmt: skip
async def tool_system(api: Api) -> None:
    told = {"role": "system", "content": "Be brief."}
    await size(api, user(ASK), said(call()), told, user(result(content="Sunny.")))


@check("messages.orphan-result",
       "A result without a call is rejected with its place and Anthropic's words.",
       "must", "M2.3 M13.31")  # fmt: skip
async def orphan_result(api: Api) -> None:
    reply = await send(api, messages=[user(result("toolu_9", content="Sunny."))])
    found = expect_error(reply, 400, "invalid_request_error")
    start = "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: toolu_9"
    expect(found.startswith(start), f"expected {start!r}, but got {found!r}")


@check("messages.orphan-call",
       "A call without a result is rejected with its place and Anthropic's words.",
       "must", "M2.3 M13.31")  # fmt: skip
async def orphan_call(api: Api) -> None:
    reply = await send(api, messages=[user(ASK), said(call()), user("And?")])
    found = expect_error(reply, 400, "invalid_request_error")
    start = "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after"
    expect(found.startswith(start), f"expected {start!r}, but got {found!r}")


@check("messages.server-tool",
       "A tool that Anthropic runs is left out of the prompt if there are others.",
       "must", "M4 M13.36")  # fmt: skip
async def server_tool(api: Api) -> None:
    found = await size(api, tools=[WEATHER, SEARCH])
    expect_same(found, await size(api, tools=[WEATHER]), "with a tool of Anthropic's")


@check("messages.server-tool-alone",
       "A tool that Anthropic runs is rejected with its type if there is no other.",
       "must", "M4 M13.36")  # fmt: skip
async def server_tool_alone(api: Api) -> None:
    reply = await send(api, tools=[SEARCH])
    found = expect_error(reply, 400, "invalid_request_error")
    start = "tools.0: Input tag 'web_search_20250305' found using 'type'"
    expect(found.startswith(start), f"expected {start!r}, but got {found!r}")


@check("messages.bash",
       "The tool bash is known without a schema, and is called with a command.",
       "must", "M4 M13.37")  # fmt: skip
async def bash(api: Api) -> None:
    for one in await called(api, tools=[BASH], tool_choice=ANY):
        valid = one["name"] == "bash" and isinstance(one["input"].get("command"), str)
        expect(valid, f"expected a call of bash with a command, but got {one}")


@check("messages.tool-absent", "A tool_choice that names no tool of the request is rejected.",
       "must", "M4")  # fmt: skip
async def tool_absent(api: Api) -> None:
    reply = await send(api, tools=[WEATHER], tool_choice={"type": "tool", "name": "no_such_tool"})
    expect_error(reply, 400, "invalid_request_error")


@check("messages.tool-thinking", "A forced tool is called with thinking, too.", "must",
       "M4 M13.38")  # fmt: skip
async def tool_thinking(api: Api) -> None:
    await called(api, tool_choice=ANY, thinking={"type": "adaptive"})
