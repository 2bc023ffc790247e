"""The end of names and texts in tags, which may contain the tag after them if they are known."""

from __future__ import annotations

from collections.abc import Sequence


def end_of(text: bytes, ends: Sequence[bytes], known: Sequence[bytes]) -> bytes | None:
    """Return the mark that ends a text here, or None if the text continues.

    Args:
        known: texts that are expected; a mark may be a part of one.
    """
    end = next((one for one in ends if text.endswith(one)), None)
    if end is None or text[: -len(end)] in known:
        return end
    return None if any(one.startswith(text) for one in known) else end


def is_readable(text: str, ends: Sequence[str], known: Sequence[str]) -> bool:
    """Return True if a known text is found again, with each of the marks after it."""
    if not any(end in text for end in ends):
        # No mark begins with the end of another.
        return True
    data, marks = text.encode(), [one.encode() for one in ends]
    others = [one.encode() for one in known]
    return all(
        end_of(whole[:size], marks, others) is None
        for whole in (data + end for end in marks)
        for size in range(1, len(whole))
    )
