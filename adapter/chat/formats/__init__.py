"""The formats in which models write tool calls, detected from the chat template."""

from __future__ import annotations

import re

from .base import CallPosition, ToolCallFormat
from .table import FORMATS, HERMES

__all__ = ["FORMATS", "HERMES", "CallPosition", "ToolCallFormat", "completed", "format_of"]


def format_of(template: str) -> ToolCallFormat | None:
    """Return the tool call format of a template; None if it has no tools or an unknown format."""
    return next((one for one in FORMATS if one.matches(template)), None)


_TOOLS = re.compile(r"\btools\b")


def completed(template: str) -> str:
    """Return a template that shows tools if its format says how, or else the same template."""
    if _TOOLS.search(template) is not None:
        return template
    form = format_of(template)
    return template if form is None else form.preface + template
