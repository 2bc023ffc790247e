"""The formats in which models write tool calls, detected from the chat template."""

from __future__ import annotations

from . import (
    bare,
    command_r7b,
    gemma4,
    harmony,
    hermes,
    kimi_k2,
    lfm2,
    llama3,
    mistral,
    tool_call_list,
    xml,
)
from .base import Place, ToolCallFormat

__all__ = ["FORMATS", "HERMES", "Place", "ToolCallFormat", "format_of"]

HERMES = hermes.FORMAT
# The first format that matches a template is used.
FORMATS: tuple[ToolCallFormat, ...] = (
    HERMES,
    harmony.FORMAT,
    xml.FORMAT,
    mistral.WITH_ARGS,
    mistral.FORMAT,
    tool_call_list.FORMAT,
    command_r7b.FORMAT,
    gemma4.FORMAT,
    kimi_k2.FORMAT,
    kimi_k2.FIRST,
    lfm2.FORMAT,
    llama3.FORMAT,
    bare.FORMAT,
)


def format_of(template: str) -> ToolCallFormat | None:
    """Return the tool call format of a template; None if it has no tools or an unknown format."""
    return next((one for one in FORMATS if one.is_of(template)), None)
