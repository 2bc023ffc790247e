"""Calls as Phi-4 mini writes them: a list of objects between two markers."""

from __future__ import annotations

from .base import Format

FORMAT = Format(
    "tool-call-list", ("<|tool_call|>",), "<|tool_call|>", "<|/tool_call|>", listed=True
)
