"""The tools and messages of a chat request: their rules and checks (contract 3.1 and 3.2).

Also custom tools: the grammars of their inputs, and inputs read from arguments as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson

from ...backends.base import Grammar
from ...backends.errors import shortened
from ...backends.grammar import in_request
from ...backends.grammar.dialects import check_schema
from ...backends.grammar.gbnf import UnsupportedSchema, WrongGrammar, check
from ...backends.grammar.notation import WS
from ...backends.offload import Memo
from ...schemas import limits
from ...schemas.limits import SCHEMA
from ...schemas.openai.chat import (
    AllowedToolsChoice,
    ChatRequest,
    CustomChoice,
    FunctionChoice,
    NamedTool,
)
from ...schemas.openai.common import FinishReason
from ...schemas.openai.messages import (
    NO_CONTENT,
    REASONING_FIELDS,
    AssistantMessage,
    Custom,
    Function,
    FunctionMessage,
    FunctionTool,
    GrammarInput,
    Message,
    ToolMessage,
)
from .. import dialects
from ..errors import InvalidRequest, missing, unsupported, wrong_value
from .formats import ToolCallFormat
from .formats.base import FunctionSchema
from .parsers import INPUT

# With `none`, the model sees the tools and may call none of them.
Mode = Literal["auto", "required", "named", "none"]


class ToolSet(NamedTuple):
    """The tools that a model may call.

    Args:
        functions: the functions that may be called, each with its index in the request.
        listed: all functions that the model sees.
        parallel: True if one message may contain several calls.
        legacy: True if the request has the deprecated `functions`.
        paths: the path of each listed function in the request.
        custom: the custom tools, which the model sees as functions with one string argument, by
            name; each with the grammar of its input, or None.
    """

    functions: Sequence[tuple[int, Function]]
    listed: Sequence[Function]
    mode: Mode
    parallel: bool
    legacy: bool
    paths: Sequence[str]
    custom: Mapping[str, Grammar | None] = MappingProxyType({})

    @property
    def called(self) -> FinishReason:
        """The finish reason of a message with calls (measured: contract 3.3)."""
        if self.mode == "named":
            return "stop"
        return "function_call" if self.legacy else "tool_calls"


class Offered(NamedTuple):
    """A tool of a request, as the model sees it.

    Args:
        path: its path in the request.
        is_custom: True for a custom tool.
        input: the grammar of a custom tool's input, or None.
    """

    function: Function
    path: str
    is_custom: bool = False
    input: Grammar | None = None


def tool_set_of(
    offered: Sequence[Offered],
    mode: Mode,
    chosen: Container[str] | None = None,
    parallel: bool = True,
    legacy: bool = False,
) -> ToolSet:
    """Return the tools that a model may call.

    Args:
        chosen: the names of the tools that may be called; None for all.

    Raises:
        InvalidRequest: parameters are not a valid JSON schema.
    """
    for one in offered:
        if one.function.parameters is not None and not one.is_custom:
            _check(one.function, f"{one.path}.parameters")
    listed = [one.function for one in offered]
    return ToolSet(
        [(i, own) for i, own in enumerate(listed) if chosen is None or own.name in chosen],
        listed,
        mode,
        parallel and mode != "named",
        legacy,
        [one.path for one in offered],
        {one.function.name: one.input for one in offered if one.is_custom},
    )


def _check(function: Function, param: str) -> None:
    try:
        check_schema(function.parameters)
    except UnsupportedSchema as error:
        raise wrong_schema(function.name, error, param) from None
    kind = (function.parameters or {}).get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        # OpenAI's message.
        reason = "schema must be a JSON Schema of 'type: \"object\"'"
        raise _wrong(function.name, f"{reason}, got 'type: {json.dumps(kind)}'", param)


def wrong_schema(name: str, error: UnsupportedSchema, param: str) -> InvalidRequest:
    """Return the error for parameters that are not a valid schema, or cannot be enforced."""
    return _wrong(name, f"In context={error.context}, {error.reason}", param)


def _wrong(name: str, reason: str, param: str) -> InvalidRequest:
    message = f"Invalid schema for function '{shortened(name)}': {reason}."
    return InvalidRequest(message, param, "invalid_function_parameters")


_LANGUAGES = {"lark": "Lark grammar", "regex": "regular expression"}


def taking_text(name: str, description: str | None, grammar: Grammar | None) -> Function:
    """Return a custom tool as a function with one string argument, which describes its grammar."""
    text = {"type": "string"}
    if grammar is not None:
        language = _LANGUAGES[grammar.kind]
        text["description"] = f"Text that matches this {language}:\n{grammar.text}"
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    # The name is valid, and can be longer than chat's.
    return Function.model_construct(
        name=name, description=description, parameters=parameters, strict=None
    )


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
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return allowed.mode, {_name(tool) for tool in allowed.tools}
    return "named", {choice.name if isinstance(choice, NamedTool) else _name(choice)}


def _name(tool: FunctionChoice | CustomChoice) -> str:
    return tool.function.name if isinstance(tool, FunctionChoice) else tool.custom.name


_CONTENT = attrgetter("content")
_OF_CALLS = frozenset({AssistantMessage, ToolMessage})


def check_messages(messages: Sequence[Message]) -> bool:
    """Reject messages that a chat template would silently omit, or that are too many.

    Returns:
        True if an assistant message has audio, which stands for the text of an earlier answer.

    Raises:
        InvalidRequest: a message has no content, a call has no result, or the parts are too many.
    """
    has_audio = False
    for index, message in enumerate(messages):
        if message.__pydantic_extra__:
            _check_extra(message.__pydantic_extra__, f"messages[{index}]")
        if isinstance(message, AssistantMessage):
            here = f"messages[{index}]"
            if message.audio is not None:
                has_audio = True
            reasoning = message.earlier_reasoning
            if reasoning:
                _check_reasoning(message, here)
            fields = (
                message.content, message.refusal, message.tool_calls or None,
                message.function_call, message.audio, reasoning,
            )  # fmt: skip
            if all(one is None for one in fields):
                if "content" in message.__pydantic_fields_set__:
                    raise InvalidRequest(NO_CONTENT, f"messages.[{index}].content")
                raise missing(f"{here}.content")
    contents = [*map(_CONTENT, messages)]
    if list in map(type, contents):
        check_count(contents, "messages")
    if not _OF_CALLS.isdisjoint(map(type, messages)):
        check_calls(messages)
    return has_audio


def _check_extra(extra: Mapping[str, Any], here: str) -> None:
    """Reject fields of other servers that would change the answer."""
    for name, hint in dialects.REFUSED_IN_MESSAGES.items():
        if extra.get(name):
            raise unsupported(f"{here}.{name}", hint)


def _check_reasoning(message: AssistantMessage, here: str) -> None:
    """Reject reasoning that differs between the fields of one message."""
    given = [name for name in REASONING_FIELDS if getattr(message, name)]
    for name in given[1:]:
        if getattr(message, name) != getattr(message, given[0]):
            raise wrong_value(
                f"{here}.{name}",
                f"it differs from '{given[0]}' of the same message. Send only one of them.",
            )


def check_count(contents: Iterable[object], field: str) -> None:
    """Reject more content parts than are allowed in a request.

    Args:
        contents: the content of each message: a string, or a list of parts.
    """
    parts = 0
    for content in contents:
        if isinstance(content, list):
            parts += len(content)
    if parts > limits.PARTS.maximum:
        raise wrong_value(
            field,
            f"it has {parts} content parts; at most {limits.PARTS.maximum} are allowed. Send "
            "fewer, larger parts.",
            "array_above_max_length",
        )


def check_calls(messages: Sequence[Message]) -> None:
    """Check that every call has its result, and every result its call (contract 3.2).

    Raises:
        InvalidRequest: a call or a result is missing; the message is OpenAI's.
    """
    # The calls that results may answer here, and those that have no result yet.
    known: Container[str] = ()
    open_ids: dict[str, None] = {}
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in known:
                raise InvalidRequest(
                    "Invalid parameter: messages with role 'tool' must be a response to a "
                    "preceeding message with 'tool_calls'.",
                    f"messages.[{index}].role",
                )
            open_ids.pop(message.tool_call_id, None)
            continue
        if open_ids:
            raise _unanswered([*open_ids], index)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            open_ids = dict.fromkeys(call.id for call in message.tool_calls)
            known = frozenset(open_ids)
        elif not isinstance(message, FunctionMessage):
            known = ()
    if open_ids:
        raise _unanswered([*open_ids], len(messages))


def _unanswered(ids: Sequence[str], index: int) -> InvalidRequest:
    return InvalidRequest(
        "An assistant message with 'tool_calls' must be followed by tool messages responding "
        "to each 'tool_call_id'. The following tool_call_ids did not have response messages: "
        f"{shortened(', '.join(ids))}",
        f"messages.[{index}].role",
    )


class _Input(NamedTuple):
    form: ToolCallFormat
    grammar: Grammar


# True for each grammar that a format can enforce.
_known: Memo[_Input, bool] = Memo(4 << 20, lambda key, _: 512 + 4 * len(key.grammar.text))


async def enforceable(tool_set: ToolSet | None, form: ToolCallFormat) -> Mapping[str, Grammar]:
    """Return the grammars of custom tools that can be enforced in a format, by tool name.

    Raises:
        InvalidGrammar: a grammar is malformed; the error names it.
    """
    found = {}
    for name, grammar in tool_set.custom.items() if tool_set is not None else ():
        if grammar is None:
            continue
        key = _Input(form, grammar._replace(param=""))
        try:
            if await _known.get(key, lambda key=key: _is_enforceable(key)):  # type: ignore[misc]
                found[name] = key.grammar
        except WrongGrammar as error:
            raise in_request(error, grammar) from None
    return found


def unenforced(tool_set: ToolSet | None, enforced: Mapping[str, Grammar]) -> list[str]:
    """Return the paths of the formats that nothing enforces, for `x-latimer-inexact`."""
    if tool_set is None or not tool_set.custom:
        return []
    return [
        f"{tool_set.paths[index]}.format"
        for index, function in tool_set.functions
        if tool_set.custom.get(function.name) is not None and function.name not in enforced
    ]


def _is_enforceable(key: _Input) -> bool:
    try:
        rules = key.form.rules(FunctionSchema("f", None, False, key.grammar), "root", "f-", 0)
    except UnsupportedSchema:
        return False
    try:
        check("".join(f"{name} ::= {rule}\n" for name, rule in {"ws": WS, **rules}.items()),
              SCHEMA.maximum)  # fmt: skip
    except WrongGrammar:
        # The grammar is valid, but an engine cannot enforce it.
        return False
    return True


_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Complete characters of a JSON string. Half of a surrogate pair waits for the other half.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}(?=.{6}|[^\\]|\\[^u])|'
    r"\\u(?![dD][89abAB])[0-9a-fA-F]{4})+",
    re.DOTALL,
)


class InputReader:
    """A parser of a custom tool's input from the arguments of its function."""

    def __init__(self) -> None:
        self._text = ""
        self._begun = False

    def feed(self, text: str) -> str:
        """Return the text of the input that the next part of the arguments completes."""
        self._text += text
        if not self._begun:
            begin = _BEGIN.match(self._text)
            if begin is None:
                return ""
            self._begun, self._text = True, self._text[begin.end() :]
        found = _CHARACTERS.match(self._text)
        if found is None:
            return ""
        self._text = self._text[found.end() :]
        return _unescaped(found[0])

    def end(self) -> str:
        """Return the input of arguments with another format than `{"input": "…"}`."""
        if self._begun:
            return ""
        try:
            value = orjson.loads(self._text)[INPUT]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return ""
        return value if isinstance(value, str) else orjson.dumps(value).decode()


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    value: str = json.loads(f'"{text}"', strict=False)
    # A lone surrogate is not a character.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
