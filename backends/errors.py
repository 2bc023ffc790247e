"""What can go wrong with a job, whichever engine runs it.

* LatimerError
  x RequestError            the client's fault; asking again unchanged cannot help
    - Unsupported           valid, but this engine cannot do it
    - ContextExceeded       prompt and completion do not fit into the context
    - EmptyPrompt           nothing to start from
    - InvalidGrammar        a grammar that is wrong, or that nothing can follow
    - UnreadableMedia       a picture or a sound that is none
  x Busy                    too much work at once; asking again later helps
  x EngineError             the engine's fault
    - EngineUnavailable     not reachable, or still loading its model
    - EngineSilent          it does not answer any more
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    """The request is wrong; `param` names the field in the client's own words, if one is at fault.

    `code` is OpenAI's machine-readable word (contract 1.2 and 1.4), `status` the HTTP status.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Unsupported(RequestError):
    """A field is valid, but `engine` cannot honour it; the message says what would."""

    def __init__(self, param: str, engine: str, hint: str) -> None:
        super().__init__(
            f"Unsupported parameter: '{param}' is not supported by {engine}. {hint}",
            param,
            "unsupported_parameter",
        )


class ContextExceeded(RequestError):
    """Prompt and completion together are longer than the context (in tokens).

    Args:
        at_least: whether the prompt is so long that its tokens were not counted.
    """

    def __init__(
        self, context: int, prompt_tokens: int, max_tokens: int = 0, at_least: bool = False
    ) -> None:
        more = "at least " if at_least else ""
        super().__init__(
            f"This model's maximum context length is {context} tokens, however you requested "
            f"{more}{prompt_tokens + max_tokens} tokens ({more}{prompt_tokens} in your prompt; "
            f"{max_tokens} for the completion). Please reduce your prompt; or completion length.",
            "prompt",
            "context_length_exceeded",
        )
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
        super().__init__(
            "Invalid 'prompt': empty. This model has no BOS token to start from; send at least one "
            "token.",
            "prompt",
            "empty_string",
        )


class InvalidGrammar(RequestError):
    """A grammar, in the request's field `param`, that is wrong or that nothing can follow."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"Invalid '{param}': {summed_up(reason)}.", param, "invalid_value")


class UnreadableMedia(RequestError):
    """What came in the request's field `param` cannot be read as a picture or a sound."""

    def __init__(self, param: str) -> None:
        super().__init__(
            f"Invalid '{param}': it cannot be read. Pictures may be PNG, JPEG, GIF or BMP, sounds "
            "WAV, MP3 or FLAC.",
            param,
            "image_parse_error",
        )


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
