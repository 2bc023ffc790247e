"""Tool calls as Mistral's models write them after `[TOOL_CALLS]`.

A list of objects (tokenizers v3 to v7), or `name[ARGS]{…}`, for some with `[CALL_ID]id` in between
(v11 and later): https://docs.mistral.ai/capabilities/function_calling and mistral-common's
`tokens/tokenizers/instruct.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....backends.grammar import literal
from ..calls import CallParser
from ..json_call import LONGEST_NAME, Broken, JsonCallParser, Steps
from .base import Check, ToolCallFormat
from .rules import GAP
from .rules import marker as marker_of

MARKER = "[TOOL_CALLS]"
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
        return MARKER in template

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return MistralParser(check=check)


@dataclass(frozen=True, eq=False)
class WithArgs(Mistral):
    """The format `[TOOL_CALLS]name[ARGS]{…}`, once for each call."""

    @override
    def is_of(self, template: str) -> bool:
        return MARKER in template and ARGS in template

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"{name}{ARGS}", f"{name}{CALL_ID}")

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(
            f"{MARKER}{name}{ARGS}{json.dumps(arguments, ensure_ascii=False)}"
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


FORMAT = Mistral("mistral", (MARKER,), MARKER, in_list=True, id_size=9)
WITH_ARGS = WithArgs("mistral-args", (MARKER, ARGS), MARKER, id_size=9)
