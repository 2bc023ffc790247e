"""The formats in which models write tool calls, detected from the chat template."""

from __future__ import annotations

import re

from . import functionary, harmony, json_formats, notations, section_formats, tag_formats
from .base import Place, ToolCallFormat

__all__ = ["FORMATS", "HERMES", "Place", "ToolCallFormat", "completed", "format_of"]

HERMES = json_formats.HERMES
# The first format that matches a template is used.
FORMATS: tuple[ToolCallFormat, ...] = (
    HERMES,
    harmony.FORMAT,
    tag_formats.XML,
    tag_formats.GLM,
    tag_formats.MINIMAX,
    section_formats.DEEPSEEK_V3_1,
    tag_formats.DEEPSEEK_V3_2,
    tag_formats.DEEPSEEK_V4,
    json_formats.MISTRAL_ARGS,
    json_formats.MISTRAL,
    json_formats.TOOL_CALL_LIST,
    json_formats.COMMAND_R7B,
    functionary.FORMAT_3_1,
    functionary.FORMAT_3_2,
    notations.GEMMA4,
    section_formats.KIMI_K2,
    section_formats.KIMI_K2_FIRST,
    notations.LFM2,
    json_formats.LLAMA3,
    json_formats.BARE,
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
