"""Tool calls as Hermes, Qwen 2.5, Qwen 3 and many others write them: an object between tags.

https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from .base import ToolCallFormat


@dataclass(frozen=True, eq=False)
class Hermes(ToolCallFormat):
    """The format `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    @override
    def is_of(self, template: str) -> bool:
        """Other formats have other content between the same tags."""
        if "<function=" in template or "<arg_key>" in template:
            return False
        return self.begin in template and ('"name"' in template or '\\"name\\"' in template)


FORMAT = Hermes("hermes", ("<tool_call>", "</tool_call>"), "<tool_call>", "</tool_call>")
