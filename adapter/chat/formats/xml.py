"""Tool calls as Qwen3-Coder and related models write them: tags for the function and arguments.

`<function=name>`, then `<parameter=key>`, a newline, the value, a newline and `</parameter>` for
each argument, then `</function>`: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

from .tag_rules import Tags
from .tags import Tagged

_TAGS = Tags(
    function="<function=",
    named=">",
    key="<parameter=",
    text=">",
    json=">",
    value="",
    value_end="</parameter>",
    end="</function>",
    lines=True,
)
_BEGIN, _END = "<tool_call>", "</tool_call>"

FORMAT = Tagged("xml", (_BEGIN, _END), _BEGIN, _END, tags=_TAGS)
