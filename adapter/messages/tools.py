"""The tools of a Messages request (contract of messages, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...backends.errors import shortened
from ...schemas.anthropic.messages import CountTokensRequest
from ...schemas.anthropic.tools import (
    AnyTool,
    BuiltInTool,
    CustomTool,
    NamedChoice,
    ServerTool,
    wrong_tag,
)
from ...schemas.openai.messages import Function
from ..chat.tools import Mode, Offered, ToolSet, tool_set_of
from ..errors import InvalidRequest

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _NUMBER}
# Members of a schema that Anthropic's SDKs may send as null. JSON Schema knows no null for them.
_NULLABLE = ("properties", "required")


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


# The members of tools for files.
_FILES = {
    "path": _TEXT,
    "view_range": _RANGE,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
}
# The description and the schema of each tool that the client runs, by the start of its type.
# Anthropic's models know them; other models have to be shown what the client expects.
_BUILT_IN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a bash shell that keeps its state between calls. 'restart' restarts it.",
        _object(["command"], command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor_": (
        "View, create and edit text files. 'view' shows a file or a folder, and 'view_range' two "
        "line numbers; 'create' writes 'file_text'; 'str_replace' replaces 'old_str', which must "
        "occur once, by 'new_str'; 'insert' adds 'insert_text' after the line 'insert_line'.",
        _object(
            ["command", "path"],
            command=_one_of("view", "create", "str_replace", "insert"),
            **_FILES,
        ),
    ),
    "memory_": (
        "Keep notes in files below /memories, which later conversations can read. 'view' shows a "
        "file or a folder; 'create' writes 'file_text'; 'str_replace' replaces 'old_str' by "
        "'new_str'; 'insert' adds 'insert_text' after the line 'insert_line'; 'delete' deletes "
        "'path'; 'rename' moves 'old_path' to 'new_path'.",
        _object(
            ["command"],
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_FILES,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}


@dataclass(slots=True)
class Tools:
    """The tools of a request.

    Args:
        tool_set: the tools that the model may call, or None.
        ignored: the paths of tools and their members that have no effect.
        inexact: the paths of members that are only approximated.
    """

    tool_set: ToolSet | None = None
    ignored: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)


def tools_of(request: CountTokensRequest) -> Tools:
    """Return the tools of a request.

    Raises:
        InvalidRequest: only Anthropic runs the tools, two of them have one name, `tool_choice`
            names a tool that is missing, or a schema is invalid.
    """
    found, offered = Tools(), []
    tools = request.tools or ()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if isinstance(tool, ServerTool):
            found.ignored.append(path)
            continue
        if tool.defer_loading:
            found.inexact.append(f"{path}.defer_loading")
        offered.append(Offered(_function(tool), path))
    if len({one.function.name for one in offered}) < len(offered):
        raise InvalidRequest("tools: Tool names must be unique.")
    mode, chosen = _choice(request, tools, offered)
    if offered:
        choice = request.tool_choice
        parallel = choice is None or not choice.disable_parallel_tool_use
        found.tool_set = tool_set_of(offered, mode, chosen, parallel)
    return found


def _function(tool: CustomTool | BuiltInTool) -> Function:
    """Return a tool as a function; its name is valid, and can be longer than chat's."""
    if isinstance(tool, BuiltInTool):
        description, schema = next(
            row for start, row in _BUILT_IN.items() if tool.type.startswith(start)
        )
    else:
        description = tool.description or ""
        given = tool.input_schema.items()
        schema = {name: one for name, one in given if one is not None or name not in _NULLABLE}
        if "type" not in schema:
            schema = {"type": "object", **schema}
    return Function.model_construct(
        name=tool.name, description=description or None, parameters=schema, strict=tool.strict
    )


def _choice(
    request: CountTokensRequest, tools: Sequence[AnyTool], offered: Sequence[Offered]
) -> tuple[Mode, set[str] | None]:
    """Return the mode of a `tool_choice`, and the names of the tools that may be called."""
    choice = request.tool_choice
    if tools and not offered:
        raise InvalidRequest(f"tools.0: {wrong_tag(tools[0].type)}")
    if choice is None or choice.type == "auto":
        return "auto", None
    if isinstance(choice, NamedChoice):
        names = [one.function.name for one in offered]
        if choice.name not in names:
            for index, tool in enumerate(tools):
                if isinstance(tool, ServerTool) and tool.name == choice.name:
                    raise InvalidRequest(f"tools.{index}: {wrong_tag(tool.type)}")
            name = shortened(choice.name)
            raise InvalidRequest(f"tool_choice: Tool '{name}' not found in provided tools")
        return "named", {choice.name}
    if choice.type == "none":
        return "none", set()
    if not offered:
        raise InvalidRequest("tool_choice: `tool_choice` may only be specified with `tools`")
    return "required", None
