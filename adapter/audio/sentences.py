"""Cut a text into sentences as it arrives, so that each can be spoken while the next is written."""

from __future__ import annotations

import re

# Characters of a piece at most: speakers get slow and worse with longer texts, and others wait.
LONGEST_PIECE = 400
# How many letters take as long as a character to speak: a digit is a word, and a sign or an emoji
# several; a character of Chinese is a syllable, and a name to voices that do not know it.
_COSTS = (
    (re.compile(r"[\u0370-\u1fff]"), 2),
    (re.compile(r"\d"), 5),
    (re.compile(r"[^\w\s.,;:!?…'\"‘’“”«»()\[\]*_\u0300-\u036f–—、。，！？：；「」『』（）-]"), 12),
    (re.compile(r"[\u2e80-\U0010ffff]"), 8),
)
_COSTLY = re.compile("|".join(pattern.pattern for pattern, _ in _COSTS))
# Characters of a piece at least that is cut within a sentence, if a comma allows it.
LEAST = 100

# What may end a sentence: marks before a space, CJK marks before anything, and line breaks.
_END = re.compile(
    r"[.!?…؟۔।]+[\"'”’»)\]*_]*(?=\s|\Z)|[。！？；｡]+[」』”’）】\"')]*|(?=\n)",
)
_BLANK_LINE = re.compile(r"[^\S\n]*\n[^\S\n]*\n")
_SPACE = re.compile(r"\s*")
# Where a sentence that is too long may be cut, the better places first.
_CUTS = tuple(map(re.compile, (r"[;:,–—][\"'”’)]*(?=\s)|[、，：]", r"(?=\s)")))
_LAST_WORD = re.compile(r"(\S+?)\.[\"'”’»)\]*_]*\Z")
# The number of a line in a list.
_NUMBER = re.compile(r"\W*\d{1,3}\.\Z")
# Abbreviations that a name follows, and those that a number follows. Others end a sentence if a
# capital letter follows.
_BEFORE_NAMES = frozenset({
    "mr", "mrs", "ms", "mx", "dr", "prof", "rev", "hon", "gen", "col", "capt", "lt", "sgt",
    "st", "mt", "ft", "vs", "cf", "e.g", "i.e", "viz", "sr", "sra", "hr", "fr", "frau", "bzw",
    "z.b", "d.h", "mme", "mlle",
})  # fmt: skip
_BEFORE_NUMBERS = frozenset({
    "no", "nos", "nr", "vol", "ch", "sec", "fig", "figs", "eq", "p", "pp", "ca", "approx",
})  # fmt: skip


class Sentences:
    """The sentences of a text that arrives in parts.

    They do not depend on where the text is parted. They have no whitespace around them, and take at
    most as long to speak as `LONGEST_PIECE` letters. Joined, they have all of the text except
    whitespace.
    """

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[str]:
        """Return the sentences that are complete with this part."""
        self._text = (self._text + text).lstrip()
        found: list[str] = []
        while (end := _first_end(self._text)) is not None:
            found.append(self._text[:end].rstrip())
            self._text = self._text[end:].lstrip()
        return found

    def end(self) -> list[str]:
        """Return the rest of the text."""
        text, self._text = self._text.rstrip(), ""
        return [text] if text else []


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a whole text."""
    sentences = Sentences()
    return sentences.feed(text) + sentences.end()


def is_speakable(text: str) -> bool:
    """Return True if a text has a letter or a digit, so that there is something to speak."""
    return any(map(str.isalnum, text))


def _first_end(text: str) -> int | None:
    """Return the end of the first sentence, or None if the text may have to be longer for it.

    Only as many characters count as a sentence may have, and one more, so that a longer text has
    the same first sentence.
    """
    most = _most(text[:LONGEST_PIECE])
    window = text[: most + 1]
    is_full = len(window) > most
    for match in _END.finditer(window, 1):
        if match.end() > most:
            break
        ends = _ends_at(window, match.end(), bool(match[0]))
        if ends or (ends is None and is_full):
            return match.end()
        if ends is None:
            return None
    return _cut(window[:most]) if is_full else None


def _most(text: str) -> int:
    """Return how many characters of the beginning of a text are spoken at once at most."""
    left = LONGEST_PIECE
    for match in _COSTLY.finditer(text):
        at = match.start()
        if at >= left:
            break
        # What does not fit is for the next piece; what comes before it does not depend on it.
        left = max(left - _cost(match[0]) + 1, at)
    return left


def _cost(character: str) -> int:
    return next(cost for pattern, cost in _COSTS if pattern.match(character))


def _ends_at(text: str, end: int, has_mark: bool) -> bool | None:
    """Return True if a sentence ends there, or None if that depends on more text."""
    if end == len(text):
        return None
    after = _SPACE.match(text, end)
    assert after is not None
    if not after[0]:
        # A CJK mark.
        return True
    if _BLANK_LINE.match(text, end):
        return True
    if after.end() == len(text):
        return None
    following = text[after.end()]
    if following.islower():
        return False
    return not has_mark or not _is_abbreviation(text[:end], following)


def _is_abbreviation(text: str, following: str) -> bool:
    """Return True if the mark at the end of a text belongs to its last word.

    Args:
        following: the first character of the next word.
    """
    word = _LAST_WORD.search(text)
    if word is None:
        return False
    name = word[1].lstrip("(\"'“‘«*_").lower()
    # A single letter is an initial.
    return (
        (len(name) == 1 and name.isalpha())
        or name in _BEFORE_NAMES
        or (name in _BEFORE_NUMBERS and following.isdigit())
        or _NUMBER.match(text) is not None
    )


def _cut(text: str) -> int:
    """Return where to cut a sentence that is too long: behind a comma, or a word, or anywhere."""
    for pattern in _CUTS:
        ends = [match.end() for match in pattern.finditer(text, min(LEAST, len(text) // 2))]
        if ends:
            return ends[-1]
    return len(text)
