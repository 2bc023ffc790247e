"""The formats in which models write tool calls, detected from the chat template."""

from .base import CallPosition, ToolCallFormat
from .table import FORMATS, HERMES, completed, format_of

__all__ = ["FORMATS", "HERMES", "CallPosition", "ToolCallFormat", "completed", "format_of"]
