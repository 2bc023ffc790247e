"""The tags around the reasoning of models, detected from the chat template."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Tags(NamedTuple):
    """The tags around reasoning.

    Args:
        label: text between the first tag and the reasoning.
        answer: the tags around the answer that follows, or None.
    """

    begin: str
    end: str
    label: str = ""
    answer: tuple[str, str] | None = None

    def split(self, content: str) -> tuple[str, str]:
        """Return the reasoning at the beginning of a message, and the rest of the content."""
        bare = content.lstrip()
        if not bare.startswith(self.begin) or self.end not in bare:
            return "", content
        thought, _, rest = bare.removeprefix(self.begin).partition(self.end)
        return thought.strip().removeprefix(self.label).strip(), rest.lstrip()


class Framed(str):
    """An earlier answer with its reasoning in tags, which are the template's own.

    Attributes:
        tags: these tags.
    """

    tags: Tags

    @classmethod
    def of(cls, content: str, tags: Tags) -> str:
        """Return the content of a message with this class, if reasoning is at its beginning."""
        if not content.startswith(tags.begin) or tags.end not in content:
            return content
        found = cls(content)
        found.tags = tags
        return found

    @property
    def parts(self) -> tuple[str, str]:
        """The reasoning and the answer."""
        thought, _, answer = self.removeprefix(self.tags.begin).partition(self.tags.end)
        return thought, answer


TAGS = (
    Tags("<think>", "</think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<reasoning>", "</reasoning>"),
    Tags("<|channel>", "<channel|>", "thought"),
)
_ANSWER = ("<response>", "</response>")


@lru_cache(maxsize=32)
def tags_of(template: str) -> Tags | None:
    """Return the reasoning tags in a template; None if it has none."""
    found = next((tags for tags in TAGS if tags.begin in template or tags.end in template), None)
    # Granite's template has the pair in its instructions; others have results in the same tags.
    if found is not None and "".join(_ANSWER) in template:
        return found._replace(answer=_ANSWER)
    return found
