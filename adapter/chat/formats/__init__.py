"""The ways in which models write calls, chosen by what a chat template spells."""

from __future__ import annotations

from . import (
    bare,
    command_r7b,
    harmony,
    hermes,
    llama3,
    mistral,
    tool_call_list,
    xml,
)
from .base import ToolCallFormat

__all__ = ["FORMATS", "HERMES", "ToolCallFormat", "format_of"]

HERMES = hermes.FORMAT
# A template is of the first that says so.
FORMATS: tuple[ToolCallFormat, ...] = (
    HERMES,
    harmony.FORMAT,
    xml.FORMAT,
    mistral.WITH_ARGS,
    mistral.FORMAT,
    tool_call_list.FORMAT,
    command_r7b.FORMAT,
    llama3.FORMAT,
    bare.FORMAT,
)


def format_of(template: str) -> ToolCallFormat | None:
    """The way in which a template writes calls; None where it knows no tools, or another way."""
    return next((one for one in FORMATS if one.is_of(template)), None)
