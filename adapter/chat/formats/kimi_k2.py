"""Tool calls as Kimi K2 writes them: a section of calls, each with an id that names the function.

`functions.name:0`, the arguments as JSON, and so on; the number counts all calls of a conversation:
https://huggingface.co/moonshotai/Kimi-K2-Instruct, `docs/tool_call_guidance.md`. The template shows
a result with the id of its call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from typing_extensions import override

from ....backends.grammar import literal
from .base import Place
from .section import Markers, Section

_MARKERS = Markers(
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
)
_RESTARTS = re.compile(r"""[:]['"]\s*[+~]\s*\(?loop\.index0""")


@dataclass(frozen=True, eq=False)
class KimiK2(Section):
    """The format of Kimi K2.

    Args:
        restarts: True if the template numbers the calls of each message from 0.
    """

    restarts: bool = False

    @override
    def is_of(self, template: str) -> bool:
        if _MARKERS.begin not in template or _MARKERS.arguments not in template:
            return False
        return (_RESTARTS.search(template) is not None) == self.restarts

    @override
    def call_id(self, call_id: str, place: Place) -> str:
        """The name of a call that the template shows by its id."""
        number = place.in_message if self.restarts else place.in_conversation
        return self.header_of(place.name, number)

    @property
    @override
    def header(self) -> re.Pattern[str]:
        # One of the prefix and the number may be missing.
        return re.compile(r"(?=functions\.|.*:)(?:functions\.)?([A-Za-z0-9_.-]+)(?::[0-9]{1,6})?")

    @override
    def header_of(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    @override
    def header_rule(self, name: str) -> str:
        return f"{literal(f'functions.{name}:')} [0-9]{{1,4}}"

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"functions.{name}:",)


FORMAT = KimiK2("kimi-k2", _MARKERS, _MARKERS.begin, _MARKERS.end, in_order=True, interrupts=True)
# The first template of July 2025.
FIRST = KimiK2("kimi-k2-first", _MARKERS, _MARKERS.begin, _MARKERS.end, restarts=True)
