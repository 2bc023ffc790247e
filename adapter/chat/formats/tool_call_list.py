"""Tool calls as Phi-4 mini writes them: a list of objects between two markers."""

from __future__ import annotations

from .base import ToolCallFormat

FORMAT = ToolCallFormat(
    "tool-call-list", ("<|tool_call|>",), "<|tool_call|>", "<|/tool_call|>", in_list=True
)
