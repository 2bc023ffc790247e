"""Read the tools of a chat request, or its deprecated functions (contract 3.1)."""

from __future__ import annotations

from typing import TypeAlias

from ...backends.base import Grammar
from ...backends.errors import shortened
from ...schemas.openai.chat import (
    AllowedToolsChoice,
    ChatRequest,
    CustomChoice,
    FunctionChoice,
    NamedTool,
)
from ...schemas.openai.messages import Custom, FunctionTool, GrammarInput
from ..chat.custom import taking_text
from ..chat.tools import Mode, Offered, ToolSet, tool_set_of
from ..errors import InvalidRequest

AnyChoice: TypeAlias = FunctionChoice | CustomChoice | AllowedToolsChoice | NamedTool


def chat_tools_of(request: ChatRequest) -> ToolSet | None:
    """Return the tools of a request, or None if the model may call none.

    Raises:
        InvalidRequest: `tool_choice` is malformed or names an unknown tool, or parameters are not
            a valid JSON schema.
    """
    legacy = not request.tools
    offered = [
        Offered(function, f"functions[{index}]")
        for index, function in enumerate(request.functions or ())
    ]
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, FunctionTool):
            offered.append(Offered(tool.function, f"tools[{index}].function"))
        else:
            offered.append(_custom(tool.custom, f"tools[{index}].custom"))
    if not offered:
        return None
    choice = request.function_call if legacy else request.tool_choice
    if choice == "none":
        return None
    mode: Mode = "required" if choice == "required" else "auto"
    names = None
    if isinstance(choice, AnyChoice):
        mode, names = _named(choice)
        _check_names(names, offered, legacy)
    parallel = not legacy and request.parallel_tool_calls is not False
    return tool_set_of(offered, mode, names, parallel, legacy)


def _check_names(names: set[str], offered: list[Offered], legacy: bool) -> None:
    known = [one.function.name for one in offered]
    unknown = names.difference(known)
    if unknown:
        param, source = ("function_call", "functions") if legacy else ("tool_choice", "tools")
        raise InvalidRequest(
            f"Invalid value for '{param}': '{shortened(min(unknown))}' is not one of the "
            f"{source} of the request. Expected one of: {shortened(', '.join(known))}.",
            param,
        )


def _custom(tool: Custom, path: str) -> Offered:
    grammar = None
    if isinstance(tool.format, GrammarInput):
        own = tool.format.grammar
        grammar = Grammar(own.syntax, own.definition, f"{path}.format.grammar.definition")
    return Offered(taking_text(tool.name, tool.description, grammar), path, True, grammar)


def _named(choice: AnyChoice) -> tuple[Mode, set[str]]:
    """Return the mode and the tool names of a `tool_choice` object."""
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return allowed.mode, {_name(tool) for tool in allowed.tools}
    return "named", {choice.name if isinstance(choice, NamedTool) else _name(choice)}


def _name(tool: FunctionChoice | CustomChoice) -> str:
    return tool.function.name if isinstance(tool, FunctionChoice) else tool.custom.name
