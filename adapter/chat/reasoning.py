"""What models put around their thoughts, chosen by what a template spells."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Tags(NamedTuple):
    """What stands around thoughts."""

    begin: str
    end: str

    def split(self, content: str) -> tuple[str, str]:
        """The thought that a message begins with, and the rest of it."""
        bare = content.lstrip()
        if not bare.startswith(self.begin) or self.end not in bare:
            return "", content
        thought, _, rest = bare.removeprefix(self.begin).partition(self.end)
        return thought.strip(), rest.lstrip()


TAGS = (
    Tags("<think>", "</think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<reasoning>", "</reasoning>"),
)


@lru_cache(maxsize=32)
def tags_of(template: str) -> Tags | None:
    """What a template's model puts around its thoughts; None where it does not think."""
    return next((tags for tags in TAGS if tags.begin in template or tags.end in template), None)
