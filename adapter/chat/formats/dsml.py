"""Tool calls as DeepSeek V3.2 and V4 write them: tags with the token `｜DSML｜` in each.

Every parameter says whether its value is text or JSON. The block of calls has another name in each
version: https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from .tag_rules import Tags
from .tags import Tagged

_DSML = "｜DSML｜"
_TAGS = Tags(
    function=f'<{_DSML}invoke name="',
    named='">',
    key=f'<{_DSML}parameter name="',
    text='" string="true">',
    json='" string="false">',
    value="",
    value_end=f"</{_DSML}parameter>",
    end=f"</{_DSML}invoke>",
)


@dataclass(frozen=True, eq=False)
class Dsml(Tagged):
    """The format with a block of a version.

    Args:
        block: the name of the block.
    """

    block: str = ""

    @override
    def is_of(self, template: str) -> bool:
        """Templates insert the token into the tags."""
        return all(one in template for one in (_DSML, f"{self.block}>", "invoke name="))


def _of(title: str, block: str) -> Dsml:
    begin, end = f"<{_DSML}{block}>", f"</{_DSML}{block}>"
    return Dsml(title, (_DSML,), begin, end, in_list=True, in_order=True, tags=_TAGS, block=block)


V3_2 = _of("deepseek-v3.2", "function_calls")
V4 = _of("deepseek-v4", "tool_calls")
