"""The tools of a chat request: which of them may be called, and how (contract 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from ..backends.errors import RequestError, Unsupported, shortened
from ..backends.structured import Unenforced, check_schema
from ..schemas.openai.chat import ChatRequest
from ..schemas.openai.common import FinishReason
from ..schemas.openai.messages import (
    AssistantMessage,
    Custom,
    Function,
    FunctionMessage,
    FunctionTool,
    Message,
    ToolMessage,
)

Mode = Literal["auto", "required", "named"]

_KINDS = ("function", "custom")
# What the one argument is called of a function that stands for a custom tool.
INPUT = "input"


class Offer(NamedTuple):
    """What may be called.

    Args:
        functions: those that may; `told` are all that the model is told of, by their places in
            the request.
        parallel: whether one message may make several calls.
        legacy: whether they came as the deprecated `functions`.
        custom: the names of those that take text: models are told of functions with one string.
    """

    functions: Sequence[tuple[int, Function]]
    told: Sequence[Function]
    mode: Mode
    parallel: bool
    legacy: bool
    custom: frozenset[str] = frozenset()

    @property
    def called(self) -> FinishReason:
        """The finish reason of a message with calls (measured: contract 3.3)."""
        if self.mode == "named":
            return "stop"
        return "function_call" if self.legacy else "tool_calls"

    def path(self, index: int) -> str:
        """Where a function's parameters stand in the request."""
        return f"functions[{index}]" if self.legacy else f"tools[{index}].function"


def offer_of(request: ChatRequest, engine: str) -> Offer | None:
    """What a request offers; None where nothing may be called.

    Raises:
        RequestError: the choice names no tool that there is, or parameters are no JSON schema.
        Unsupported: a tool is none of functions.
    """
    legacy = not request.tools
    functions = list(request.functions or ())
    custom = set()
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, FunctionTool):
            functions.append(tool.function)
            continue
        if (tool.custom.format or {}).get("type", "text") != "text":
            hint = "Leave it out, or say in the description what the text looks like."
            raise Unsupported(f"tools[{index}].custom.format", engine, hint)
        functions.append(_taking_text(tool.custom))
        custom.add(tool.custom.name)
    if not functions:
        return None
    choice = request.function_call if legacy else request.tool_choice
    param = "function_call" if legacy else "tool_choice"
    allowed = list(enumerate(functions))
    mode: Mode = "auto"
    if isinstance(choice, dict):
        mode, names = _named(choice, legacy, param)
        known = [function.name for function in functions]
        unknown = names.difference(known)
        if unknown:
            source = "functions" if legacy else "tools"
            raise RequestError(
                f"Invalid value for '{param}': '{shortened(min(unknown))}' is not among the "
                f"{source} of the request; there are {shortened(', '.join(known))}.",
                param,
            )
        allowed = [one for one in allowed if one[1].name in names]
    elif choice == "none":
        return None
    elif choice == "required":
        mode = "required"
    offer = Offer(allowed, functions, mode, not legacy and request.parallel_tool_calls is not False,
                  legacy, frozenset(custom))  # fmt: skip
    for index, function in enumerate(functions):
        if function.parameters is not None:
            _check(function, f"{offer.path(index)}.parameters")
    if mode == "named":
        offer = offer._replace(parallel=False)
    return offer


def _taking_text(tool: Custom) -> Function:
    """A custom tool as models know tools."""
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Function(name=tool.name, description=tool.description, parameters=parameters)


def _named(choice: Mapping[str, Any], legacy: bool, param: str) -> tuple[Mode, set[str]]:
    """The mode and the names of a choice that is an object."""
    try:
        if legacy:
            return "named", {_name(choice)}
        if choice["type"] in _KINDS:
            return "named", {_name(choice[choice["type"]])}
        if choice["type"] == "allowed_tools":
            allowed = choice["allowed_tools"]
            if allowed["mode"] in ("auto", "required"):
                names = {_name(tool[tool["type"]]) for tool in allowed["tools"]}
                if names:
                    return allowed["mode"], names
    except (KeyError, TypeError):
        pass
    shapes = (
        '{"name": …}'
        if legacy
        else '{"type": "function", "function": {"name": …}} and {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [{"type": "function", '
        '"function": {"name": …}}, …]}}'
    )
    shown = shortened(orjson.dumps(choice).decode())
    raise RequestError(
        f"Invalid value for '{param}': {shown}. Objects may be {shapes}.",
        param,
        "invalid_value",
    )


def _name(function: Mapping[str, Any]) -> str:
    name = function["name"]
    if not isinstance(name, str):
        raise TypeError
    return name


def _check(function: Function, param: str) -> None:
    try:
        check_schema(function.parameters)
    except Unenforced as error:
        raise wrong_schema(function.name, error, param) from None


def wrong_schema(name: str, error: Unenforced, param: str) -> RequestError:
    """The error for parameters that are no schema, or that nothing can make sure of."""
    return RequestError(
        f"Invalid schema for function '{shortened(name)}': In context={error.context}, "
        f"{error.reason}.",
        param,
    )


def check_calls(messages: Sequence[Message]) -> None:
    """Every call has its result, and every result its call (contract 3.2).

    Raises:
        RequestError: in OpenAI's words.
    """
    open_ids: list[str] = []
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in open_ids:
                before = _call_before(messages, index)
                if before is None or message.tool_call_id not in _ids(before):
                    raise RequestError(
                        "Invalid parameter: messages with role 'tool' must be a response to a "
                        "preceeding message with 'tool_calls'.",
                        f"messages.[{index}].role",
                    )
            else:
                open_ids.remove(message.tool_call_id)
            continue
        _check_open(open_ids, index)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            open_ids = list(dict.fromkeys(_ids(message)))
    _check_open(open_ids, len(messages))


def _check_open(ids: Sequence[str], index: int) -> None:
    if ids:
        raise RequestError(
            "An assistant message with 'tool_calls' must be followed by tool messages responding "
            "to each 'tool_call_id'. The following tool_call_ids did not have response messages: "
            f"{shortened(', '.join(ids))}",
            f"messages.[{index}].role",
        )


def _ids(message: AssistantMessage) -> list[str]:
    return [call.id for call in message.tool_calls or ()]


def _call_before(messages: Sequence[Message], index: int) -> AssistantMessage | None:
    """The message whose calls a run of results answers."""
    while index and isinstance(messages[index - 1], ToolMessage | FunctionMessage):
        index -= 1
    found = messages[index - 1] if index else None
    return found if isinstance(found, AssistantMessage) and found.tool_calls else None
