"""Calls without markers: JSON is all that such an answer is."""

from __future__ import annotations

from dataclasses import dataclass

from .base import ToolCallFormat


@dataclass(frozen=True, eq=False)
class Bare(ToolCallFormat):
    """`{"name": …, "arguments": {…}}`."""

    def is_of(self, template: str) -> bool:
        """See `ToolCallFormat.is_of`."""
        if "tools" not in template or '"name"' not in template or "<function=" in template:
            return False
        return '"arguments"' in template or '"parameters"' in template


FORMAT = Bare("bare", bare=True)
