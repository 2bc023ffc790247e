"""The tools of a Responses request (contract of responses, 2.6 and 9.3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ...backends.base import Grammar
from ...backends.errors import shortened
from ...schemas import limits
from ...schemas.openai.messages import Function
from ...schemas.openai.response_items import Item, ItemReference, ToolsItem
from ...schemas.openai.response_tools import (
    AllowedChoice,
    FlatChoice,
    FlatCustom,
    FlatFunction,
    FlatGrammarInput,
    HostedChoice,
    HostedTool,
    Namespace,
)
from ...schemas.openai.responses import ResponseRequest
from ..chat.tools import Mode, Offered, ToolSet, taking_text, tool_set_of
from ..errors import InvalidRequest, unsupported, wrong_value
from .items import stored_path

# The text between the name of a namespace and that of its function.
BETWEEN = "__"


class CalledTool(NamedTuple):
    """The tool behind a name that the model sees.

    Args:
        name: the name in the request.
        namespace: the name of the namespace that has the tool, or None.
        is_custom: True if the tool takes text instead of arguments.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class Tools:
    """The tools of a request.

    Args:
        tool_set: the tools that the model may call, or None.
        echo: the served tools, as the response has them.
        choice_echo: `tool_choice`, as the response has it.
        ignored: the paths of tools, such as `tools[1]`, that this server does not run, and of
            members of others that have no effect.
        names: the tools by the name that the model sees; `NAMESPACE__name` in a namespace.
    """

    tool_set: ToolSet | None
    echo: Sequence[dict[str, Any]]
    choice_echo: Any
    ignored: Sequence[str]
    names: Mapping[str, CalledTool]


# Those of a request without any.
NO_TOOLS = Tools(None, [], "auto", [], MappingProxyType({}))


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees of a tool."""
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"


def tools_of(
    request: ResponseRequest,
    before: Sequence[Item] = (),
    resolve: Callable[[str], Item | None] = lambda _id: None,
) -> Tools:
    """Return the tools of a request, and of its items that add some.

    Args:
        before: the items of the conversation so far.
        resolve: returns stored items.

    Raises:
        InvalidRequest: `tool_choice` names a tool that is missing or that this server does not
            run, a schema is invalid, or two tools have one name.
    """
    items: Sequence[Any] = request.input if isinstance(request.input, list) else ()
    if ItemReference in map(type, items):
        items = [resolve(one.id) if isinstance(one, ItemReference) else one for one in items]
    if (
        request.tools is None
        and request.tool_choice is None
        and ToolsItem not in map(type, items)
        and ToolsItem not in map(type, before)
    ):
        return NO_TOOLS
    reader = _Reader()
    echo = reader.read(request.tools or (), "tools")
    own = len(reader.ignored)
    for item in before:
        if isinstance(item, ToolsItem):
            reader.read(item.tools, f"{stored_path(request, item)}.tools")
    # The responses so far have listed theirs.
    del reader.ignored[own:]
    for index, item in enumerate(items):
        if isinstance(item, ToolsItem):
            is_found = item.type == "tool_search_output"
            reader.read(item.tools, f"input[{index}].tools", is_found=is_found)
    if len(reader.offered) > limits.TOOLS.maximum:
        raise wrong_value(
            "tools",
            f"array too long. Expected at most {limits.TOOLS.maximum} tools, those of namespaces "
            f"included, but got {len(reader.offered)} instead.",
            "array_above_max_length",
        )
    mode, chosen = _choice(request, reader)
    tool_set = None
    if reader.offered and request.tool_choice != "none":
        parallel = request.parallel_tool_calls is not False
        tool_set = tool_set_of([*reader.offered.values()], mode, chosen, parallel)
    choice: Any = request.tool_choice or "auto"
    if not isinstance(choice, str):
        choice = choice.model_dump(exclude_unset=True)
    return Tools(tool_set, echo, choice, reader.ignored, reader.names)


class _Reader:
    """The tools so far."""

    def __init__(self) -> None:
        # By the name that the model sees; a later tool of the same name replaces an earlier one.
        self.offered: dict[str, Offered] = {}
        self.ignored: list[str] = []
        self.names: dict[str, CalledTool] = {}

    def read(
        self,
        tools: Iterable[FlatFunction | FlatCustom | Namespace | HostedTool],
        path: str,
        namespace: Namespace | None = None,
        is_found: bool = False,
    ) -> list[dict[str, Any]]:
        """Add tools, and return the served ones as a response has them.

        Args:
            is_found: True if a search has found them, so that they are no longer deferred.
        """
        echo: list[dict[str, Any]] = []
        for index, tool in enumerate(tools):
            here = f"{path}[{index}]"
            if isinstance(tool, HostedTool):
                self.ignored.append(here)
            elif isinstance(tool, Namespace):
                inner = self.read(tool.tools, f"{here}.tools", tool, is_found)
                echo.append(
                    {
                        "type": "namespace",
                        "name": tool.name,
                        "description": tool.description,
                        "tools": inner,
                    }
                )
            else:
                self.ignored += [
                    f"{here}.{name}"
                    for name in tool.inert
                    if not (is_found and name == "defer_loading")
                ]
                self._offer(tool, here, namespace, is_first=not echo)
                echo.append(_function(tool) if isinstance(tool, FlatFunction) else _custom(tool))
        return echo

    def _offer(
        self,
        tool: FlatFunction | FlatCustom,
        path: str,
        namespace: Namespace | None,
        is_first: bool,
    ) -> None:
        own = None if namespace is None else namespace.name
        name = flat_name(tool.name, own)
        called = CalledTool(tool.name, own, isinstance(tool, FlatCustom))
        if self.names.setdefault(name, called) != called:
            raise wrong_value(
                f"{path}.name",
                f"another tool has the name '{shortened(name)}' already. Rename one of them.",
            )
        description = tool.description
        if namespace is not None and namespace.description and is_first:
            # The model sees no namespaces, so their first function describes them.
            description = "\n\n".join(filter(None, (namespace.description, description)))
        if isinstance(tool, FlatCustom):
            grammar = None
            if isinstance(tool.format, FlatGrammarInput):
                form = tool.format
                grammar = Grammar(form.syntax, form.definition, f"{path}.format.definition")
            function = taking_text(name, description, grammar)
            self.offered[name] = Offered(function, path, True, grammar)
            return
        # The name is valid, and can be longer than chat's. Without `strict`, a schema is enforced
        # as far as a grammar can.
        function = Function.model_construct(
            name=name, description=description, parameters=tool.parameters, strict=tool.strict
        )
        self.offered[name] = Offered(function, path)


def _function(tool: FlatFunction) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict is not False,
    }


def _custom(tool: FlatCustom) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "text"}
    if isinstance(tool.format, FlatGrammarInput):
        form = {
            "type": "grammar",
            "definition": tool.format.definition,
            "syntax": tool.format.syntax,
        }
    return {
        "type": "custom",
        "name": tool.name,
        "description": tool.description,
        "format": form,
    }


def _choice(request: ResponseRequest, reader: _Reader) -> tuple[Mode, Collection[str] | None]:
    """Return the mode of a `tool_choice`, and the names of the tools that may be called."""
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return "auto", None
    if isinstance(choice, HostedChoice):
        raise _not_run("tool_choice", choice.type)
    if choice == "required":
        if reader.offered:
            return "required", None
        if reader.ignored:
            raise _not_run(reader.ignored[0])
        raise InvalidRequest(
            "Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice"
        )
    if isinstance(choice, FlatChoice):
        return "named", _matching(choice, reader.names)
    assert isinstance(choice, AllowedChoice)
    chosen: set[str] = set()
    for index, one in enumerate(choice.tools):
        if isinstance(one, HostedChoice):
            reader.ignored.append(f"tool_choice.tools[{index}]")
        else:
            chosen |= _matching(one, reader.names)
    if not chosen:
        raise _not_run("tool_choice", choice.tools[0].type)
    return choice.mode, chosen


def _matching(choice: FlatChoice, names: Mapping[str, CalledTool]) -> set[str]:
    """Return the names that the model sees of the tools that a choice names."""
    found = {
        name
        for name, tool in names.items()
        if choice.name in (name, tool.name)
        and choice.namespace in (None, tool.namespace)
        and tool.is_custom == (choice.type == "custom")
    }
    if not found:
        raise InvalidRequest(
            f"Tool choice '{shortened(choice.name)}' not found in 'tools' parameter.",
            "tool_choice",
        )
    return found


def _not_run(path: str, kind: str = "") -> InvalidRequest:
    what = f"tools of type '{shortened(kind)}'" if kind else "it"
    return unsupported(
        path, f"This server does not run {what}. Choose a function or a custom tool."
    )
