"""Limits of OpenAI's hosted service (contract 1.2, 2.1 and 3.1).

A local server may do more than OpenAI's. Its answer must then be correct, and never that to a
clipped request. With `--limits openai` only OpenAI's rejection passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ..check import Body, Skip, check, expect
from ..target import Api

C, H = "/completions", "/chat/completions"
PROMPT = "1, 2, 3, 4, 5,"
ABSENT = [f"no such text {number}" for number in range(13)]
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
# Tokens that a completion has by default.
DEFAULT = 16

Answer: TypeAlias = Any
Right: TypeAlias = Callable[[Answer], None]

# Each row: the id, the fields beyond the limit, the field that the error must name, the source.
BEYOND: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("max-tokens-negative", {"max_tokens": -1}, "max_tokens", "1.2 [ChatDev#446]"),
    ("logprobs-above", {"logprobs": 10}, "logprobs", "2.1"),
    ("stop-five", {"stop": list("abcde")}, "stop", "1.2 [continue#1572]"),
)
# The same, with the endpoint, for fields whose effect on one answer is not certain.
STRONG: tuple[tuple[str, str, dict[str, Any], str, str], ...] = (
    ("temperature-above", C, {"temperature": 3}, "temperature", "2.1"),
    ("presence-penalty-above", C, {"presence_penalty": 5}, "presence_penalty", "2.1"),
    ("frequency-penalty-below", H, {"frequency_penalty": -3}, "frequency_penalty", "3.1"),
)


async def _rejected(api: Api, path: str, body: dict[str, Any], param: str, right: Right) -> bool:
    """Return True if a request is rejected; otherwise its answer must be correct."""
    reply = await api.post(path, body)
    if reply.status == 200 and not api.hosted:
        right(reply.json())
        return False
    error = reply.error(400)
    named = param in str(error["param"] or error["message"])
    expect(named, f"expected an error that names {param!r}, but got {error}")
    return True


def _any(answer: Answer) -> None:
    """Accept every answer with a choice."""
    expect(answer["choices"], "expected a choice, but got none")


def _unlimited(answer: Answer) -> None:
    """Reject an answer that ends at the default limit, or below it."""
    reason, count = answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
    expect(
        reason == "stop" or count > DEFAULT,
        f"expected a completion without a limit, but got {count} tokens and {reason!r}",
    )


def _ten(answer: Answer) -> None:
    """Reject an answer with fewer alternatives than the request asks for."""
    found = (answer["choices"][0]["logprobs"] or {}).get("top_logprobs") or []
    # Two tokens with the same text are one key.
    most = max((len(one) for one in found if one), default=0)
    expect(most >= 10, f"expected 10 alternatives of a token, but got at most {most}")


def _beyond(changes: dict[str, Any], param: str, right: Right) -> Body:
    async def run(api: Api) -> None:
        body = {"model": api.model, "prompt": api.stable(PROMPT), "temperature": 0,
                "max_tokens": 4, **changes}  # fmt: skip
        if not await _rejected(api, C, body, param, right) and param == "stop":
            await _stops(api)

    return run


async def _stops(api: Api) -> None:
    """Raise `Fail` unless the first and the last of many stop sequences end a completion."""
    body = {"prompt": api.stable(PROMPT), "temperature": 0, "max_tokens": 24}
    text: str = (await api.complete(**body))["choices"][0]["text"]
    if len(text) < 8:
        raise Skip("the model generates too little text to stop it anywhere")
    stop = text[4:7]
    expected = text[: text.index(stop)]
    for stops in ([stop, *ABSENT], [*ABSENT, stop]):
        got = (await api.complete(**body, stop=stops))["choices"][0]["text"]
        place = stops.index(stop) + 1
        expect(
            got == expected,
            f"expected {expected!r}, cut at sequence {place} of {len(stops)}, but got {got!r}",
        )


RIGHT: dict[str, tuple[Right, str]] = {
    "max_tokens": (_unlimited, "means no limit"),
    "logprobs": (_ten, "gets ten alternatives"),
    "stop": (_any, "ends at each of the sequences"),
}

for name, changes, param, source in BEYOND:
    right, words = RIGHT[param]
    promise = (
        f"A completion request with {changes} is rejected with a 400 error that names {param!r}, "
        f"or {words}."
    )
    check(f"errors.{name}", promise, "must", source)(_beyond(changes, param, right))


def _strong(path: str, changes: dict[str, Any], param: str) -> Body:
    async def run(api: Api) -> None:
        asked: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1} if path == C else HELLO
        await _rejected(api, path, {"model": api.model, **asked, **changes}, param, _any)

    return run


for name, path, changes, param, source in STRONG:
    promise = (
        f"A {'completion' if path == C else 'chat completion'} request with {changes} is rejected "
        f"with a 400 error that names {param!r}, or answered."
    )
    check(f"errors.{name}", promise, "must", source)(_strong(path, changes, param))


@check("errors.missing-model",
       "A completion request without a model is rejected with 400, or answered.",
       "must", "1.2 [centaur#3]")  # fmt: skip
async def missing_model(api: Api) -> None:
    await _rejected(api, C, {"prompt": "Hello", "max_tokens": 1}, "", _any)


@check("chat.metadata-alone",
       "A chat completion request with metadata but without store is rejected with 400, or "
       "answered.",
       "may", "3.1 10.89")  # fmt: skip
async def metadata_alone(api: Api) -> None:
    await _rejected(api, H, {"model": api.model, **HELLO, "metadata": {"a": "b"}}, "", _any)


def _no_call(answer: Answer) -> None:
    """Reject an answer with a call, because no tool was given."""
    calls = answer["choices"][0]["message"].get("tool_calls")
    expect(not calls, f"expected no tool call without tools, but got {calls}")


@check("tools.choice-alone",
       "A chat completion request with tool_choice but without tools is rejected with 400, or "
       "answered without a call.",
       "may", "3.1")  # fmt: skip
async def choice_alone(api: Api) -> None:
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "get_time", "parameters": parameters}}
    await api.chat("Hello", tools=[tool], max_tokens=1)
    await _rejected(api, H, {"model": api.model, **HELLO, "tool_choice": "auto"}, "", _no_call)


@check("tools.empty-list",
       "A message with an empty list of tool calls is rejected with 400, or read without calls.",
       "may", "3.2 1.2")  # fmt: skip
async def empty_list(api: Api) -> None:
    ask = HELLO["messages"]
    turns = [*ask, {"role": "assistant", "content": "Hello", "tool_calls": []}, *ask]
    body = {"model": api.model, **HELLO, "messages": turns}
    await _rejected(api, H, body, "tool_calls", _no_call)


@check("tools.too-many",
       "A chat completion request with 129 tools is rejected with 400, or answered.",
       "should", "1.2")  # fmt: skip
async def too_many_tools(api: Api) -> None:
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": f"t{number}", "parameters": parameters}}
             for number in range(129)]  # fmt: skip
    await api.chat("Hello", tools=tools[:1], max_tokens=1)
    body = {"model": api.model, **HELLO, "tools": tools}
    # By default the tools may also exceed the context length.
    await _rejected(api, H, body, "tools" if api.hosted else "", _any)
