"""Read the tools of a chat request, or its deprecated functions (contract 3.1)."""

from __future__ import annotations

from typing import TypeAlias

from ...backends.base import Grammar
from ...backends.errors import shortened
from ...backends.grammar import Unenforced, check_schema
from ...schemas.openai.chat import ChatRequest
from ...schemas.openai.messages import Custom, Function, FunctionTool, GrammarInput
from ...schemas.openai.tool_choice import (
    AllowedToolsChoice,
    CustomChoice,
    FunctionChoice,
    NamedTool,
)
from ..chat.json_call import INPUT
from ..chat.tools import Mode, ToolSet, wrong_schema
from ..errors import InvalidRequest

_LANGUAGES = {"lark": "Lark grammar", "regex": "regular expression"}
AnyChoice: TypeAlias = FunctionChoice | CustomChoice | AllowedToolsChoice | NamedTool


def tool_set_of(request: ChatRequest) -> ToolSet | None:
    """Return the tools of a request, or None if the model may call none.

    Raises:
        InvalidRequest: `tool_choice` is malformed or names an unknown tool, or parameters are not
            a valid JSON schema.
    """
    legacy = not request.tools
    functions = list(request.functions or ())
    custom: dict[str, Grammar | None] = {}
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, FunctionTool):
            functions.append(tool.function)
            continue
        custom[tool.custom.name] = _grammar_of(tool.custom, f"tools[{index}].custom.format")
        functions.append(_taking_text(tool.custom))
    if not functions:
        return None
    choice = request.function_call if legacy else request.tool_choice
    param = "function_call" if legacy else "tool_choice"
    allowed = list(enumerate(functions))
    mode: Mode = "auto"
    if isinstance(choice, AnyChoice):
        mode, names = _named(choice)
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
    tool_set = ToolSet(allowed, functions, mode, parallel, legacy, custom)
    for index, function in enumerate(functions):
        if function.parameters is not None:
            _check(function, f"{tool_set.path(index)}.parameters")
    if mode == "named":
        tool_set = tool_set._replace(parallel=False)
    return tool_set


def _grammar_of(tool: Custom, path: str) -> Grammar | None:
    if not isinstance(tool.format, GrammarInput):
        return None
    grammar = tool.format.grammar
    return Grammar(grammar.syntax, grammar.definition, f"{path}.grammar.definition")


def _taking_text(tool: Custom) -> Function:
    """Return a custom tool as a function with one string argument, which describes its grammar."""
    text = {"type": "string"}
    if isinstance(tool.format, GrammarInput):
        grammar = tool.format.grammar
        language = _LANGUAGES[grammar.syntax]
        text["description"] = f"Text that matches this {language}:\n{grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Function(name=tool.name, description=tool.description, parameters=parameters)


def _named(choice: AnyChoice) -> tuple[Mode, set[str]]:
    """Return the mode and the tool names of a `tool_choice` object."""
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return allowed.mode, {_name(tool) for tool in allowed.tools}
    return "named", {choice.name if isinstance(choice, NamedTool) else _name(choice)}


def _name(tool: FunctionChoice | CustomChoice) -> str:
    return tool.function.name if isinstance(tool, FunctionChoice) else tool.custom.name


def _check(function: Function, param: str) -> None:
    try:
        check_schema(function.parameters)
    except Unenforced as error:
        raise wrong_schema(function.name, error, param) from None
