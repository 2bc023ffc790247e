"""The tags around the reasoning of models, detected from the chat template."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Tags(NamedTuple):
    """The tags around reasoning."""

    begin: str
    end: str

    def split(self, content: str) -> tuple[str, str]:
        """Return the reasoning at the beginning of a message, and the rest of the content."""
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
    """Return the reasoning tags in a template; None if it has none."""
    return next((tags for tags in TAGS if tags.begin in template or tags.end in template), None)
