"""What can go wrong with a job, whichever engine runs it.

* LatimerError
  x RequestError            the client's fault; asking again unchanged cannot help
    - Unsupported           valid, but this engine cannot do it
    - ContextExceeded       prompt and completion do not fit into the context
    - EmptyPrompt           nothing to start from
    - InvalidGrammar        a grammar that is wrong, or that nothing can follow
    - UnreadableMedia       a picture or a sound that is none
    - UnknownToken          a token id that is none
    - WordTooLong           a word that the tokeniser cannot take
    - TooMany               more entries than the engine takes
    - Refused               the engine says so
    - TooComplex            preparing it takes too long
  x Busy                    too much work at once; asking again later helps
  x EngineError             the engine's fault
    - EngineUnavailable     not reachable, or still loading its model
    - EngineSilent          it does not answer any more
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Characters of a client's own text that a message repeats, and of a message in all.
MOST_SHOWN, MOST_MESSAGE = 200, 2_000
# The largest token id, and the largest count of tokens, that an engine may tell.
LARGEST = 2**31 - 1
# A probability of one is told a little above or below it.
MOST_LOGPROB = 0.01


_LONG_WORD = re.compile(rf"[^\s'\"]{{{MOST_SHOWN // 2 + 1},}}+")


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """The text, or its beginning and `…`: what a message repeats of a request is bounded."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def summed_up(text: str) -> str:
    """A message of others, in which their own words may stand around a client's text."""
    words = _LONG_WORD.sub(lambda word: shortened(word[0], MOST_SHOWN // 2), text)
    return shortened(words, 2 * MOST_SHOWN)


class LatimerError(Exception):
    """Base of all errors; `message` is meant for the person who made the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(LatimerError):
    """The request is wrong. What is below carries facts; `adapter/errors.py` has OpenAI's words.

    Args:
        param: the field at fault in the client's own words, None where it is no single one.
        facts: what else there is to say.
    """

    def __init__(self, param: str | None, *facts: object) -> None:
        super().__init__(f"{type(self).__name__}: {', '.join(map(repr, (param, *facts)))}")
        self.param = param


class Unsupported(RequestError):
    """A field is valid, but `engine` cannot honour it; the hint says what would."""

    def __init__(self, param: str, engine: str, hint: str) -> None:
        super().__init__(param, engine, hint)
        self.engine = engine
        self.hint = hint


class ContextExceeded(RequestError):
    """Prompt and completion together are longer than the context (in tokens).

    Args:
        at_least: whether the prompt is so long that its tokens were not counted.
    """

    def __init__(
        self, context: int, prompt_tokens: int, max_tokens: int = 0, at_least: bool = False
    ) -> None:
        facts = f"{context} tokens", f"{prompt_tokens} in your prompt", f"{max_tokens} behind it"
        super().__init__("prompt", *facts)
        self.context = context
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.at_least = at_least


def check_length(size: int, longest: int, context: int, max_tokens: int | None) -> None:
    """Refuse a text that cannot fit, before it is tokenised.

    Args:
        size: characters of the text; each takes a byte at least.
        longest: bytes of the longest token.
        context: tokens.

    Raises:
        ContextExceeded: so many bytes are more tokens than the context holds.
    """
    if size > context * longest:
        raise ContextExceeded(context, -(-size // longest), max_tokens or 0, at_least=True)


class EmptyPrompt(RequestError):
    """Nothing to start from: no text, and no BOS that the model would begin with."""

    def __init__(self) -> None:
        super().__init__("prompt")


class InvalidGrammar(RequestError):
    """A grammar, in the request's field `param`, that is wrong or that nothing can follow."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(param, reason)
        self.reason = reason


class UnreadableMedia(RequestError):
    """What came in the request's field `param` cannot be read as a picture or a sound."""

    def __init__(self, param: str) -> None:
        super().__init__(param)


class UnknownToken(RequestError):
    """A token id that the vocabulary, of `size` tokens, does not have."""

    def __init__(self, param: str, size: int, token: int) -> None:
        super().__init__(param, size, token)
        self.size = size
        self.token = token


def check_ids(param: str, ids: Sequence[int], size: int) -> None:
    """Refuse an id that a vocabulary of so many tokens does not have.

    Raises:
        UnknownToken: it names the first.
    """
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise UnknownToken(param, size, next(one for one in ids if not 0 <= one < size))


class WordTooLong(RequestError):
    """A word, or a run of blanks, of more than `most` characters; `beginning` is how it begins."""

    def __init__(self, most: int, beginning: str) -> None:
        super().__init__("prompt", f"{most} characters without a change", beginning)
        self.most = most
        self.beginning = beginning


class TooMany(RequestError):
    """The engine takes at most `most` entries of a field that has `count`."""

    def __init__(self, param: str, engine: str, most: int, count: int) -> None:
        super().__init__(param, engine, f"at most {most}", count)
        self.engine = engine
        self.most = most
        self.count = count


class Refused(RequestError):
    """The engine refused the request, and says why."""

    def __init__(self, param: str | None, engine: str, reason: str) -> None:
        super().__init__(param, engine, reason)
        self.engine = engine
        self.reason = reason


class TooComplex(RequestError):
    """The request takes more than some seconds to prepare."""

    def __init__(self, seconds: float) -> None:
        super().__init__(None, seconds)
        self.seconds = seconds


class Busy(LatimerError):
    """Nothing can take the job now; `retry_after` says in how many seconds to ask again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(LatimerError):
    """The engine failed, or answered something that cannot be trusted."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, or is not ready yet."""


class EngineSilent(EngineError):
    """The engine does not answer any more."""


@contextmanager
def read_from(engine: str, what: str) -> Iterator[None]:
    """Turn whatever is wrong with the shape of an engine's answer into an `EngineError`.

    Args:
        what: the answer, for the message.
    """
    try:
        yield
    except MALFORMED as error:
        raise malformed(engine, what, error) from error


def malformed(engine: str, what: str, error: Exception) -> EngineError:
    """The error for an answer in which something is missing, or is of another type."""
    return EngineError(
        f"{engine} answered {what} with something else than it documents: {error!r:.200}"
    )


def ids_of(value: Any) -> tuple[int, ...]:
    """The token ids that an answer lists.

    Raises:
        TypeError: it lists something else.
        ValueError: one is no id.
    """
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise TypeError(f"a {type(value).__name__} is no list of token ids")
    if value and not (min(value) >= 0 and max(value) <= LARGEST):
        raise ValueError("a token id is negative, or larger than there are any")
    return tuple(value)


def ids_of_text(value: Any, text: str, size: int = LARGEST) -> tuple[int, ...]:
    """The token ids that a tokeniser tells for a text.

    Args:
        size: how many tokens the vocabulary has, where that is known.

    Raises:
        TypeError: it tells something else.
        ValueError: an id is none of the vocabulary, or there are none for a text.
    """
    ids = ids_of(value)
    if ids and max(ids) >= size:
        raise ValueError(f"{max(ids)} is not an id of {size} tokens")
    # Some tokenisers leave out blanks.
    if not ids and text.strip():
        raise ValueError("a text has no tokens")
    return ids


def whole_of(value: Any, least: int = 0, most: int = LARGEST) -> int:
    """The whole number that an answer tells; nothing is allocated by its size.

    Raises:
        TypeError: it is something else.
        ValueError: it is beyond its bounds.
    """
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} is no whole number")
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return value


def told_logprob(value: Any) -> float:
    """The log-probability that an answer tells; a little above zero is rounding.

    Raises:
        TypeError, ValueError: it is no number, or no probability has it.
    """
    logprob = float(value)
    if not logprob < MOST_LOGPROB:
        raise ValueError(f"{logprob} is the logarithm of no probability")
    return logprob


def text_of(value: Any) -> str:
    """The text that an answer tells; raises `TypeError` where it is something else."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} is no text")
    return value


# What reading an answer raises where its shape is not the documented one.
MALFORMED = (
    LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
