"""Tool calls as DeepSeek V3.1 writes them: a section of calls, each a name and JSON.

Its template shows calls, but no tools. They are described in the system message, as its model card
says: https://huggingface.co/deepseek-ai/DeepSeek-V3.1. The calls of DeepSeek R1 and the first V3
are fenced code between the same markers, which is another format.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from .section import Markers, Section

_MARKERS = Markers(
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
_PREFACE = """\
{%- if tools -%}
{%- set described -%}
## Tools
You have access to the following tools:
{% for tool in tools %}

### {{ tool.function.name }}
Description: {{ tool.function.description }}

Parameters: {{ tool.function.parameters | tojson }}
{% endfor %}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments\
<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
{%- endset -%}
{%- set head = messages[:1] if messages[0].role == 'system' else [] -%}
{%- set own = [{'role': 'system', 'content': described}] -%}
{%- set messages = head + own + messages[head | length:] -%}
{%- endif -%}
"""


@dataclass(frozen=True, eq=False)
class DeepSeek(Section):
    """The format of DeepSeek V3.1."""

    @override
    def is_of(self, template: str) -> bool:
        return _MARKERS.arguments in template and "```json" not in template


FORMAT = DeepSeek(
    "deepseek-v3.1", _MARKERS, _MARKERS.begin, _MARKERS.end, in_order=True, preface=_PREFACE
)
