"""Read the tools of a chat request, or its deprecated functions (contract 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ...backends.errors import Unsupported, shortened
from ...backends.grammar import Unenforced, check_schema
from ...schemas.openai.chat import ChatRequest
from ...schemas.openai.messages import Custom, Function, FunctionTool
from ..chat.tools import INPUT, Mode, ToolSet, wrong_schema
from ..errors import InvalidRequest

_KINDS = ("function", "custom")


def tool_set_of(request: ChatRequest, engine: str) -> ToolSet | None:
    """Return the tools of a request, or None if the model may call none.

    Raises:
        InvalidRequest: `tool_choice` is malformed or names an unknown tool, or parameters are not
            a valid JSON schema.
        Unsupported: a custom tool sets a format other than text.
    """
    legacy = not request.tools
    functions = list(request.functions or ())
    custom = set()
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, FunctionTool):
            functions.append(tool.function)
            continue
        if (tool.custom.format or {}).get("type", "text") != "text":
            hint = "Omit it, or describe the format in the tool's description."
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
            raise InvalidRequest(
                f"Invalid value for '{param}': '{shortened(min(unknown))}' is not one of the "
                f"{source} of the request. Expected one of: {shortened(', '.join(known))}.",
                param,
            )
        allowed = [one for one in allowed if one[1].name in names]
    elif choice == "none":
        return None
    elif choice == "required":
        mode = "required"
    parallel = not legacy and request.parallel_tool_calls is not False
    tool_set = ToolSet(allowed, functions, mode, parallel, legacy, frozenset(custom))
    for index, function in enumerate(functions):
        if function.parameters is not None:
            _check(function, f"{tool_set.path(index)}.parameters")
    if mode == "named":
        tool_set = tool_set._replace(parallel=False)
    return tool_set


def _taking_text(tool: Custom) -> Function:
    """Return a custom tool as a function with one string argument."""
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Function(name=tool.name, description=tool.description, parameters=parameters)


def _named(choice: Mapping[str, Any], legacy: bool, param: str) -> tuple[Mode, set[str]]:
    """Return the mode and the tool names of a `tool_choice` object."""
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
    raise InvalidRequest(
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
