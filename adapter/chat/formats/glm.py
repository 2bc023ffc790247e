"""Tool calls as GLM 4.5 and its successors write them: a tag for each key and for each value.

`<tool_call>name`, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each
argument, on lines of their own up to GLM 4.6: the chat templates of
https://huggingface.co/zai-org/GLM-4.6 and https://huggingface.co/zai-org/GLM-4.7-Flash.
"""

from __future__ import annotations

from .tag_rules import Tags
from .tags import Tagged

_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAGS = Tags(
    function="",
    named="",
    key="<arg_key>",
    text="</arg_key>",
    json="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end=_END,
)
_MARKERS = (_BEGIN, _END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

FORMAT = Tagged("glm", _MARKERS, _BEGIN, _END, in_order=True, interrupts=True, tags=_TAGS)
