"""Tool calls as MiniMax M2 writes them: several calls between two markers.

`<invoke name="name">`, then `<parameter name="key">value</parameter>` for each argument, then
`</invoke>`: https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md.
"""

from __future__ import annotations

from .tag_rules import Tags
from .tags import Tagged

_TAGS = Tags(
    function='<invoke name="',
    named='">',
    key='<parameter name="',
    text='">',
    json='">',
    value="",
    value_end="</parameter>",
    end="</invoke>",
)
_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"

FORMAT = Tagged("minimax", (_BEGIN, _END), _BEGIN, _END, in_list=True, in_order=True, tags=_TAGS)
