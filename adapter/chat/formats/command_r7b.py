"""Tool calls as Command R7B writes them: a list of actions, each with a tool's name."""

from __future__ import annotations

from .base import ToolCallFormat

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"

FORMAT = ToolCallFormat(
    "command-r7b", (_BEGIN, _END), _BEGIN, _END, "tool_name", "parameters", in_list=True
)
