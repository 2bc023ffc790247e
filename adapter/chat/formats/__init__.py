"""The formats in which models write tool calls, detected from the chat template."""

from __future__ import annotations

import re

from . import (
    bare,
    command_r7b,
    deepseek,
    dsml,
    functionary,
    gemma4,
    glm,
    harmony,
    hermes,
    kimi_k2,
    lfm2,
    llama3,
    minimax,
    mistral,
    tool_call_list,
    xml,
)
from .base import Place, ToolCallFormat

__all__ = ["FORMATS", "HERMES", "Place", "ToolCallFormat", "completed", "format_of"]

HERMES = hermes.FORMAT
# The first format that matches a template is used.
FORMATS: tuple[ToolCallFormat, ...] = (
    HERMES,
    harmony.FORMAT,
    xml.FORMAT,
    glm.FORMAT,
    minimax.FORMAT,
    deepseek.FORMAT,
    dsml.V3_2,
    dsml.V4,
    mistral.WITH_ARGS,
    mistral.FORMAT,
    tool_call_list.FORMAT,
    command_r7b.FORMAT,
    functionary.FORMAT_3_1,
    functionary.FORMAT_3_2,
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


_TOOLS = re.compile(r"\btools\b")


def completed(template: str) -> str:
    """Return a template that shows tools if its format says how, or else the same template."""
    if _TOOLS.search(template) is not None:
        return template
    form = format_of(template)
    return template if form is None else form.preface + template
