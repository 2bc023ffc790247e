"""Parsers of the calls of Llama 3 and of Mistral's models, which are JSON or another syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Mapping
from typing import Any

import orjson
from typing_extensions import override

from ...generation.choice import Part
from ..parsers import ARGUMENTS, LONGEST_NAME, CallParser, ParseFailed, Steps
from .base import Check, ToolCallFormat

PYTHON_TAG = "<|python_tag|>"
# Names of functions that offer the Python interpreter.
INTERPRETERS = ("code_interpreter", "python", "ipython")
_BUILT_IN = re.compile(r"([A-Za-z_][A-Za-z0-9_-]{0,63})\.call(\(.*\))", re.DOTALL)


class CodeParser(CallParser):
    """A parser of a call that can also be code, which extends to the end of the text."""

    _code: bytearray | None = None

    def _rest(self, byte: int) -> Steps:
        """Parse code, whose first byte is given."""
        self._code = bytearray([byte])
        while True:
            self._code.append((yield))


class PythonTagParser(CodeParser):
    """A parser of JSON, of a call of a built-in tool, and of code of the Python interpreter.

    Args:
        offered: the functions that code can call.
    """

    def __init__(self, offered: Container[str], *given: Any) -> None:
        self._offered = offered
        super().__init__(*given)

    @override
    def end(self) -> list[Part]:
        if self._code is None:
            return super().end()
        text = self._code.decode(errors="replace").strip()
        name, arguments = self._built_in(text) or self._interpreted(text)
        self._put("call", name.encode())
        self._put("arguments", arguments)
        return self.taken()

    def _run(self) -> Steps:
        byte = yield from self._next()
        yield from self._call(byte) if byte == ord("{") else self._rest(byte)

    def _built_in(self, text: str) -> tuple[str, bytes] | None:
        match = _BUILT_IN.fullmatch(text)
        if match is None or match[1] not in self._offered:
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

    def _interpreted(self, text: str) -> tuple[str, bytes]:
        name = next((name for name in INTERPRETERS if name in self._offered), None)
        if name is None or not text:
            raise ParseFailed
        return name, orjson.dumps({"code": text})


class Llama3(ToolCallFormat):
    """The format `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>` before it.

    After it, a call can also be `name.call(key="value")` for a built-in tool, or Python.
    """

    @override
    def make_parser(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return PythonTagParser(functions, check, self.name, (self.arguments, *ARGUMENTS))


ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_LONGEST = LONGEST_NAME + len(CALL_ID) + 64 + len(ARGS)


class MistralParser(CallParser):
    """A parser of a list of objects, or of `name[ARGS]{…}`, for some with `[CALL_ID]id` in between.

    See mistral-common's `tokens/tokenizers/instruct.py`: the list is of tokenizers v3 to v7.
    """

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
                raise ParseFailed
            byte = yield
        text = header.decode(errors="replace").removesuffix(ARGS)
        self._begin(text.split(CALL_ID)[0].strip())
        yield from self._object(byte if byte not in b" \n" else (yield from self._next()))
