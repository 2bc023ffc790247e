"""Tool calls as Llama 3.x writes them after `<|python_tag|>`.

A call is JSON, `name.call(key="value")` for a built-in tool, or Python for the interpreter:
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from typing_extensions import override

from ...generation.parts import Part
from ..calls import CallParser
from ..json_call import ARGUMENTS, Broken, JsonCallParser
from ..parsing import BLANKS
from .bare import Bare
from .base import Check
from .rules import marker as marker_of

MARKER = "<|python_tag|>"
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
        return MARKER in template or "<|start_header_id|>" in template

    @property
    @override
    def begins(self) -> tuple[str, ...]:
        return (MARKER,)

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """Text that is not JSON can call a built-in tool."""

        def make() -> JsonCallParser:
            return JsonCallParser(self.name, (self.arguments, *ARGUMENTS), check)

        return PythonTagParser(make, functions.__contains__)

    @override
    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """Nothing follows the first call."""
        return f"{marker_of(MARKER, special)}?", "call"


FORMAT = Llama3("llama3", (MARKER,), arguments="parameters", bare=True)
