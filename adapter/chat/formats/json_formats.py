"""Tool calls as JSON: between markers, after one, or as the whole answer."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from typing_extensions import override

from ....backends.grammar import literal
from ...generation.parts import Part
from ..parsers import ARGUMENTS, BLANKS, LONGEST_NAME, Broken, CallParser, JsonCallParser, Steps
from .base import GAP, Check, ToolCallFormat
from .base import marker as marker_of


@dataclass(frozen=True, eq=False)
class Hermes(ToolCallFormat):
    """The format `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    @override
    def is_of(self, template: str) -> bool:
        """Other formats have other content between the same tags."""
        if "<function=" in template or "<arg_key>" in template:
            return False
        return self.begin in template and ('"name"' in template or '\\"name\\"' in template)


HERMES = Hermes("hermes", ("<tool_call>", "</tool_call>"), "<tool_call>", "</tool_call>")


TOOL_CALL_LIST = ToolCallFormat(
    "tool-call-list", ("<|tool_call|>",), "<|tool_call|>", "<|/tool_call|>", in_list=True
)


_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"

COMMAND_R7B = ToolCallFormat(
    "command-r7b", (_BEGIN, _END), _BEGIN, _END, "tool_name", "parameters", in_list=True
)


@dataclass(frozen=True, eq=False)
class Bare(ToolCallFormat):
    """The format `{"name": …, "arguments": {…}}`."""

    @override
    def is_of(self, template: str) -> bool:
        if "tools" not in template or '"name"' not in template or "<function=" in template:
            return False
        return '"arguments"' in template or '"parameters"' in template


BARE = Bare("bare", bare=True)


PYTHON_TAG = "<|python_tag|>"
# Names of functions that offer the Python interpreter.
INTERPRETERS = ("code_interpreter", "python", "ipython")
_BUILT_IN = re.compile(r"([A-Za-z_][A-Za-z0-9_-]{0,63})\.call(\(.*\))", re.DOTALL)


class PythonTagParser(CallParser):
    """A parser of each kind of call; one that is not JSON extends to the end of the text."""

    def __init__(self, make: Callable[[], JsonCallParser], offered: Callable[[str], bool]) -> None:
        self._json = make()
        self._offered = offered
        self._text = b""
        self._is_json: bool | None = None
        self.done = False
        # The only call is complete with the parser.
        self.complete = 0

    @override
    def feed(self, data: bytes) -> tuple[int, list[Part]]:
        if self._is_json is None:
            bare = (self._text + data).lstrip(BLANKS)
            self._is_json = bare[:1] == b"{" if bare else None
        if self._is_json:
            taken, parts = self._json.feed(data)
            self.done = self._json.done
            return taken, parts
        self._text += data
        return len(data), []

    @override
    def taken(self) -> list[Part]:
        return self._json.taken()

    @override
    def end(self) -> list[Part]:
        if self._is_json:
            return self._json.end()
        text = self._text.decode(errors="replace").strip()
        name, arguments = self._built_in(text) or self._code(text)
        return [Part("call", name.encode(), len(self._text)), Part("arguments", arguments, 0)]

    def _built_in(self, text: str) -> tuple[str, bytes] | None:
        match = _BUILT_IN.fullmatch(text)
        if match is None or not self._offered(match[1]):
            return None
        try:
            call = ast.parse(f"f{match[2]}", mode="eval").body
            assert isinstance(call, ast.Call)
            if call.args:
                return None
            values = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
            return match[1], orjson.dumps(values)
        except (SyntaxError, ValueError, TypeError, RecursionError, AssertionError, MemoryError):
            return None

    def _code(self, text: str) -> tuple[str, bytes]:
        name = next((name for name in INTERPRETERS if self._offered(name)), None)
        if name is None or not text:
            raise Broken
        return name, orjson.dumps({"code": text})


@dataclass(frozen=True, eq=False)
class Llama3(Bare):
    """The format `{"name": …, "parameters": {…}}`, with or without the marker before it."""

    @override
    def is_of(self, template: str) -> bool:
        if not super().is_of(template) or '"parameters"' not in template:
            return False
        return PYTHON_TAG in template or "<|start_header_id|>" in template

    @property
    @override
    def begins(self) -> tuple[str, ...]:
        return (PYTHON_TAG,)

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """Text that is not JSON can call a built-in tool."""

        def make() -> JsonCallParser:
            return JsonCallParser(self.name, (self.arguments, *ARGUMENTS), check)

        return PythonTagParser(make, functions.__contains__)

    @override
    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """Nothing follows the first call."""
        return f"{marker_of(PYTHON_TAG, special)}?", "call"


LLAMA3 = Llama3("llama3", (PYTHON_TAG,), arguments="parameters", bare=True)


TOOL_CALLS = "[TOOL_CALLS]"
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_LONGEST = LONGEST_NAME + len(CALL_ID) + 64 + len(ARGS)


class MistralParser(JsonCallParser):
    """A parser of both forms."""

    def _run(self) -> Steps:
        byte = yield from self._next()
        if byte in b"[{":
            self._peeked = byte
            yield from super()._run()
            return
        header = bytearray()
        while not header.endswith(ARGS.encode()):
            header.append(byte)
            if len(header) > _LONGEST or byte in b'{}"':
                raise Broken
            byte = yield
        self._begin(_name(header))
        byte = byte if byte not in b" \n" else (yield from self._next())
        if byte != ord("{"):
            raise Broken
        yield from self._value(byte, self._fragment)
        self._check_whole()


def _name(header: bytearray) -> str:
    text = header.decode(errors="replace").removesuffix(ARGS)
    return text.split(CALL_ID)[0].strip()


@dataclass(frozen=True, eq=False)
class Mistral(ToolCallFormat):
    """The format `[TOOL_CALLS][{"name": …, "arguments": {…}}]`."""

    @override
    def is_of(self, template: str) -> bool:
        return TOOL_CALLS in template

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return MistralParser(check=check)


@dataclass(frozen=True, eq=False)
class WithArgs(Mistral):
    """The format `[TOOL_CALLS]name[ARGS]{…}`, once for each call."""

    @override
    def is_of(self, template: str) -> bool:
        return TOOL_CALLS in template and ARGS in template

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"{name}{ARGS}", f"{name}{CALL_ID}")

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(
            f"{TOOL_CALLS}{name}{ARGS}{json.dumps(arguments, ensure_ascii=False)}"
            for name, arguments in calls
        )

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        return f"{literal(name)} {marker_of(ARGS, special)} {arguments}"

    @override
    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """The name follows the marker directly."""
        begin = marker_of(self.begin, special)
        return begin, f"call ({GAP} {begin} call)*" if parallel else "call"


MISTRAL = Mistral("mistral", (TOOL_CALLS,), TOOL_CALLS, in_list=True, id_size=9)
MISTRAL_ARGS = WithArgs("mistral-args", (TOOL_CALLS, ARGS), TOOL_CALLS, id_size=9)
