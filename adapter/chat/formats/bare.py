"""Tool calls without markers: the whole answer is JSON."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from .base import ToolCallFormat


@dataclass(frozen=True, eq=False)
class Bare(ToolCallFormat):
    """The format `{"name": …, "arguments": {…}}`."""

    @override
    def is_of(self, template: str) -> bool:
        if "tools" not in template or '"name"' not in template or "<function=" in template:
            return False
        return '"arguments"' in template or '"parameters"' in template


FORMAT = Bare("bare", bare=True)
