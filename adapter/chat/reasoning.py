"""The reasoning before an answer: its tags, and parsers of a text that has them."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from typing_extensions import override

from ..generation.choice import Parser, Part
from .parsers import BLANKS, MarkerFinder


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
        reasoning, _, rest = bare.removeprefix(self.begin).partition(self.end)
        return reasoning.strip().removeprefix(self.label).strip(), rest.lstrip()


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
        reasoning, _, answer = self.removeprefix(self.tags.begin).partition(self.tags.end)
        return reasoning, answer


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


class AnswerTagParser(Parser):
    """A parser that drops the tags around the answer, and the whitespace next to them.

    Args:
        begin, end: the tags. An answer without the first keeps the second, too.
        answer: the parser of the text between the tags.
    """

    def __init__(self, begin: str, end: str, answer: Parser) -> None:
        self._begin, self._end = begin.encode(), end.encode()
        self._ends = MarkerFinder([end], frozenset())
        self._answer = answer
        self._held = b""
        # A plain function, because a bound method would make a reference cycle.
        self._read = AnswerTagParser._starts

    @property
    @override
    def in_call(self) -> bool:
        return self._answer.in_call

    @override
    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        """No tag is a control token."""
        if is_control:
            return [*self._rest(), *self._answer.feed(data, True)]
        text, self._held = self._held + data, b""
        return self._read(self, text)

    @override
    def end(self) -> list[Part]:
        return [*self._rest(), *self._answer.end()]

    def _rest(self) -> list[Part]:
        """Return the held text: the last tag is dropped, other text belongs to the answer."""
        held, self._held = self._held, b""
        inside = self._read is AnswerTagParser._inside
        if not held or (inside and held.strip(BLANKS) == self._end):
            return [Part("nothing", b"", len(held))] if held else []
        return self._answer.feed(held)

    def _starts(self, text: bytes) -> list[Part]:
        bare = text.lstrip(BLANKS)
        if bare.startswith(self._begin):
            self._read = AnswerTagParser._leads
            size = len(text) - len(bare) + len(self._begin)
            return [Part("nothing", b"", size), *self._leads(text[size:])]
        if self._begin.startswith(bare):
            self._held = text
            return []
        self._read = AnswerTagParser._passes
        return self._answer.feed(text)

    def _leads(self, text: bytes) -> list[Part]:
        """Drop the whitespace after the first tag."""
        bare = text.lstrip(BLANKS)
        parts = [Part("nothing", b"", len(text) - len(bare))] if len(bare) < len(text) else []
        if not bare:
            return parts
        self._read = AnswerTagParser._inside
        return parts + self._inside(bare)

    def _inside(self, text: bytes) -> list[Part]:
        """Hold back the last tag, which is only known at the end of the text."""
        at = text.rfind(self._end)
        if at < 0 or text[at + len(self._end) :].strip(BLANKS):
            at = len(text) - self._ends.held(text)
        sure = text[:at].rstrip(BLANKS)
        self._held = text[len(sure) :]
        return self._answer.feed(sure) if sure else []

    def _passes(self, text: bytes) -> list[Part]:
        return self._answer.feed(text)


class ReasoningParser(Parser):
    """A parser that returns the text between two tags at the beginning as reasoning.

    A model whose reasoning has a label may reason again, between and after its content and calls.

    Args:
        tags: the tags.
        is_open: True if the prompt ends with the tag that begins the reasoning.
        special: the tags that are tokens of the model.
        answer: the parser of the text after the reasoning.
        interrupts: markers of calls whose tokens end the reasoning, too.
    """

    def __init__(
        self,
        tags: Tags,
        is_open: bool,
        special: frozenset[str],
        answer: Parser,
        interrupts: Collection[str] = (),
    ) -> None:
        self._begin = tags.begin.encode()
        self._text_begin = tags.begin not in special
        self._end = tags.end.encode()
        self._ends = MarkerFinder([tags.end], special)
        self._label = tags.label.encode()
        # Text that begins reasoning again.
        later = [tags.begin + tags.label] if self._text_begin else []
        self._later = MarkerFinder(later, frozenset())
        self._around = tags.answer
        self._answer = answer
        self._interrupts = frozenset(marker.encode() for marker in interrupts)
        self._held = b""
        self._has_reasoning = False
        # What separates reasoning from that before it.
        self._between = b""
        self._reasoned = False
        # A plain function, because a bound method would make a reference cycle.
        self._read = ReasoningParser._labels if is_open else ReasoningParser._starts

    @property
    @override
    def in_call(self) -> bool:
        return self._answer.in_call

    @override
    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        return self._read(self, data, is_control)

    @override
    def end(self) -> list[Part]:
        """Reasoning without an end tag is still reasoning."""
        held, self._held = self._held, b""
        if self._read is ReasoningParser._labels:
            return [Part("nothing", b"", len(held))] if held else []
        if self._read is ReasoningParser._thinks:
            kept = held.rstrip(BLANKS)
            parts = [self._reasoning(kept, len(kept))] if kept else []
            return [*parts, Part("nothing", b"", len(held) - len(kept))]
        return [*self._answer.feed(held), *self._answer.end()]

    def _starts(self, data: bytes, is_control: bool) -> list[Part]:
        """Parse whitespace, and then the tag or the answer."""
        before, text = self._held, self._held + data
        bare = text.lstrip(BLANKS)
        if is_control:
            if data == self._begin and not before.strip(BLANKS):
                return self._started(len(text))
        elif self._text_begin and bare.startswith(self._begin):
            size = len(text) - len(bare) + len(self._begin)
            return self._started(size) + self._labels(text[size:], False)
        elif not bare or (self._text_begin and self._begin.startswith(bare)):
            self._held = text
            return []
        self._held = b""
        self._read = ReasoningParser._answers
        if not is_control:
            return self._answers(text, False)
        return [*(self._answers(before, False) if before else ()), *self._answers(data, True)]

    def _started(self, size: int) -> list[Part]:
        self._held = b""
        self._read = ReasoningParser._labels
        return [Part("nothing", b"", size)]

    def _labels(self, data: bytes, is_control: bool) -> list[Part]:
        """Parse whitespace, and then the label or the reasoning."""
        text = self._held + data
        if is_control:
            if self._label and data == self._begin:
                return self._started(len(text))
            self._read = ReasoningParser._thinks
            return self._thinks(data, True)
        bare = text.lstrip(BLANKS)
        # The first tag may be repeated before a label.
        again = self._begin if self._label and self._text_begin else b""
        while again and bare.startswith(again):
            bare = bare.removeprefix(again).lstrip(BLANKS)
        known = self._label, again
        if not bare or any(one != bare and one.startswith(bare) for one in known):
            self._held = text
            return []
        self._held = b""
        self._read = ReasoningParser._thinks
        bare = bare.removeprefix(self._label)
        size = len(text) - len(bare)
        if bare == text.lstrip(BLANKS):
            return self._thinks(text, False)
        return [Part("nothing", b"", size), *self._thinks(bare, False)]

    def _thinks(self, data: bytes, is_control: bool) -> list[Part]:
        if is_control and data == self._end:
            return self._finished(self._held, len(self._held) + len(data), b"")
        if is_control and data in self._interrupts:
            return self._finished(self._held, len(self._held), b"") + self._leads(data, True)
        text = self._held + data
        found = None if is_control else self._ends.find(text)
        if found is not None:
            at, tag = found
            return self._finished(text[:at], at + len(tag), text[at + len(tag) :])
        start = 0 if self._has_reasoning else len(text) - len(text.lstrip(BLANKS))
        # Hold back whitespace at the end, and a possible beginning of the tag.
        sure = text[: len(text) - self._ends.held(text)].rstrip(BLANKS)
        if len(sure) <= start:
            self._held = text
            return []
        self._has_reasoning = True
        self._held = text[len(sure) :]
        return [self._reasoning(sure[start:], len(sure))]

    def _reasoning(self, data: bytes, size: int) -> Part:
        between, self._between = self._between, b""
        self._reasoned = True
        return Part("reasoning", between + data, size)

    def _finished(self, reasoning: bytes, size: int, rest: bytes) -> list[Part]:
        """End the reasoning with `size` bytes accounted for; the rest belongs to the answer."""
        kept = reasoning.rstrip(BLANKS) if self._has_reasoning else reasoning.strip(BLANKS)
        parts = [self._reasoning(kept, len(kept))] if kept else []
        parts.append(Part("nothing", b"", size - len(kept)))
        self._held = b""
        self._read = ReasoningParser._leads
        if self._around is not None:
            self._answer = AnswerTagParser(*self._around, self._answer)
            self._around = None
        return parts + (self._leads(rest, False) if rest else [])

    def _leads(self, data: bytes, is_control: bool) -> list[Part]:
        """Drop the whitespace between the tag and the answer."""
        bare = data if is_control else data.lstrip(BLANKS)
        parts = [Part("nothing", b"", len(data) - len(bare))] if len(bare) < len(data) else []
        if not bare:
            return parts
        self._read = ReasoningParser._answers
        return parts + self._answers(bare, is_control)

    def _answers(self, data: bytes, is_control: bool) -> list[Part]:
        """Parse the answer, up to further reasoning."""
        if not self._label:
            return self._answer.feed(data, is_control)
        held, self._held = self._held, b""
        if is_control:
            out = self._answer.feed(held) if held else []
            again = data == self._begin and not self._answer.in_call
            return out + (self._reopened() if again else self._answer.feed(data, True))
        text, out = held + data, []
        while (found := self._later.find(text)) is not None:
            at, marker = found
            out += self._answer.feed(text[:at]) if at else []
            text = text[at:]
            if not self._answer.in_call:
                return out + self._reopened() + self._labels(text[len(self._begin) :], False)
            # A part of a call's arguments.
            out += self._answer.feed(marker)
            text = text[len(marker) :]
        sure = text[: len(text) - self._later.held(text)]
        self._held = text[len(sure) :]
        return out + (self._answer.feed(sure) if sure else [])

    def _reopened(self) -> list[Part]:
        """Begin reasoning again at its first tag, which cuts off what the answer held back."""
        self._between = b"\n" if self._reasoned else b""
        self._has_reasoning = False
        self._read = ReasoningParser._labels
        return self._answer.feed(self._begin, True)
