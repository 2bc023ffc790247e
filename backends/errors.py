"""The errors of a job, independent of the engine that runs it.

* LatimerError
  x RequestError            the client's fault; repeating the request unchanged cannot help
    - Unsupported           valid, but this engine cannot do it
    - NotServed             a task that the model is not made for, or the engine not started for
    - ContextExceeded       prompt and completion do not fit into the context
    - EmptyPrompt           the prompt has no tokens
    - InvalidGrammar        a grammar that is invalid, or that matches nothing
    - UnreadableMedia       not a readable image or audio file
    - Unspoken              a text for which a voice has no sound
    - UnknownToken          a token id that is not in the vocabulary
    - WordTooLong           a word that is too long for the tokenizer
    - TooMany               more entries than the engine accepts
    - Refused               the engine rejected the request
    - TooComplex            preparing the request takes too long
  x Busy                    too many requests; repeating the request later helps
    - ContextFull           other requests have filled the context that the engine's slots share
  x EngineError             the engine's fault
    - EngineUnavailable     not reachable, or still loading its model
    - EngineSilent          the engine stopped responding
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, TypeAlias

# Characters of a client's text that a message repeats, and of the whole message.
MOST_SHOWN, MOST_MESSAGE = 200, 2_000
# The largest token id, and the largest count of tokens, that an engine may report.
LARGEST = 2**31 - 1
# Rounding may put the logarithm of a probability of one a little above zero.
MOST_LOGPROB = 0.01


_LONG_WORD = re.compile(rf"[^\s'\"]{{{MOST_SHOWN // 2 + 1},}}+")


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """Return the text, or its beginning and `…`, to bound the length of messages."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def as_sentence(text: str) -> str:
    """Return a reason with a full stop, unless it is a sentence, so that another one can follow."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def summed_up(text: str) -> str:
    """Shorten a message from other software, and the long words of a client's text in it."""
    words = _LONG_WORD.sub(lambda word: shortened(word[0], MOST_SHOWN // 2), text)
    return shortened(words, 2 * MOST_SHOWN)


class LatimerError(Exception):
    """The base class of all errors; `message` is for the person who made the request.

    Attributes:
        status, type, code, param: OpenAI's HTTP status, and the fields of its error object.
        retry_after: the seconds after which the client may repeat the request; None if unknown.
        headers: more headers of the response.
    """

    status = 502
    type = "server_error"
    code: str | None = "engine_error"
    param: str | None = None
    retry_after: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(LatimerError):
    """The base class of errors in the request.

    Subclasses carry facts; `adapter/errors.py` has the messages.

    Args:
        param: the field at fault, by its name in the request; None if it is not a single field.
        facts: the other facts for the message.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, param: str | None, *facts: object) -> None:
        super().__init__(f"{type(self).__name__}: {', '.join(map(repr, (param, *facts)))}")
        self.param = param

    def about(self, param: str) -> Self:
        """Return the error for another field; several requests may share this one."""
        # A copy of an exception would call `__init__` of its class with other arguments.
        other = type(self).__new__(type(self), *self.args)
        other.__dict__.update(self.__dict__)
        other.param = param
        return other


class Unsupported(RequestError):
    """A valid field that `engine` does not support; `hint` offers an alternative."""

    code = "unsupported_parameter"

    def __init__(self, param: str, engine: str, hint: str) -> None:
        super().__init__(param, engine, hint)
        self.engine = engine
        self.hint = hint


def ends_with_media(engine: str) -> Unsupported:
    """Return the error for a prompt that ends with media, whose embeddings predict no token."""
    hint = "An image or audio cannot be the end of the prompt. Add text after it."
    return Unsupported("messages", engine, hint)


Task: TypeAlias = Literal["generate", "embed", "rank"]


class NotServed(RequestError):
    """A task that the model is not made for, or that `engine` was not started for.

    Args:
        hint: what to do instead, as a sentence.
    """

    def __init__(self, task: Task, engine: str, hint: str) -> None:
        super().__init__("model", task, engine, hint)
        if task == "generate":
            # OpenAI's status for a model that another endpoint serves (contract 1.4).
            self.status = 404
        self.task = task
        self.engine = engine
        self.hint = hint


class ContextExceeded(RequestError):
    """A prompt and a completion that exceed the context length together (in tokens).

    Args:
        prompt_tokens: the tokens of the prompt, with a BOS that was added: it needs a place, too.
        at_least: True if the prompt is so long that its tokens were not counted.
        param: the field of the prompt.
        hint: what the operator of the engine can do about it, as a sentence.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        context: int,
        prompt_tokens: int,
        max_tokens: int = 0,
        at_least: bool = False,
        param: str = "prompt",
        hint: str = "",
    ) -> None:
        # A prompt that fills the context leaves no place for the first token.
        max_tokens = max_tokens or int(prompt_tokens == context)
        facts = f"{context} tokens", f"{prompt_tokens} in your prompt", f"{max_tokens} behind it"
        super().__init__(param, *facts)
        self.hint = hint
        self.context = context
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.at_least = at_least


# The characters up to which a text that cannot fit is counted, in two seconds.
COUNTED = 2_000_000


def check_length(
    size: int, longest: int, context: int, max_tokens: int | None, param: str = "prompt"
) -> None:
    """Reject a text that cannot fit, before it is tokenized.

    Args:
        size: the number of characters of the text; each takes at least one byte.
        longest: the length of the longest token, in bytes.
        context: the context length, in tokens.

    Raises:
        ContextExceeded: the text exceeds the context even if all its tokens are the longest.
    """
    if size > context * longest:
        count = -(-size // longest)
        raise ContextExceeded(context, count, max_tokens or 0, at_least=True, param=param)


class EmptyPrompt(RequestError):
    """A prompt or an input without tokens: it has no text, and the model adds no BOS."""

    code = "empty_string"

    def __init__(self, param: str = "prompt") -> None:
        super().__init__(param)


class InvalidGrammar(RequestError):
    """A grammar in the request's field `param` that is invalid, or that matches nothing."""

    code = "invalid_value"

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(param, reason)
        self.reason = reason


class UnreadableMedia(RequestError):
    """Data in the request's field `param` that cannot be read as an image or audio."""

    code = "image_parse_error"

    def __init__(self, param: str) -> None:
        super().__init__(param)


class Unspoken(RequestError):
    """A text for which the voice of a `speaker` has no sound: it knows none of the words."""

    def __init__(self, speaker: str) -> None:
        super().__init__("input", speaker)
        self.speaker = speaker


class UnknownToken(RequestError):
    """A token id that is not in the vocabulary of `size` tokens."""

    code = "invalid_value"

    def __init__(self, param: str, size: int, token: int) -> None:
        super().__init__(param, size, token)
        self.size = size
        self.token = token


def check_ids(param: str, ids: Sequence[int], size: int) -> None:
    """Reject ids that are not in a vocabulary of `size` tokens.

    Raises:
        UnknownToken: an id is not in the vocabulary; the error names the first one.
    """
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise UnknownToken(param, size, next(one for one in ids if not 0 <= one < size))


class WordTooLong(RequestError):
    """A word or a run of whitespace of more than `most` characters; `beginning` is its start."""

    code = "string_above_max_length"

    def __init__(self, most: int, beginning: str, param: str = "prompt") -> None:
        super().__init__(param, f"{most} characters without a change", beginning)
        self.most = most
        self.beginning = beginning


class TooMany(RequestError):
    """A field with `count` entries, of which the engine accepts at most `most`."""

    code = "object_above_max_properties"

    def __init__(self, param: str, engine: str, most: int, count: int) -> None:
        super().__init__(param, engine, f"at most {most}", count)
        self.engine = engine
        self.most = most
        self.count = count


class Refused(RequestError):
    """A request that the engine rejected for a `reason`."""

    def __init__(self, param: str | None, engine: str, reason: str) -> None:
        super().__init__(param, engine, reason)
        self.engine = engine
        self.reason = reason


class TooComplex(RequestError):
    """A request whose preparation takes more than `seconds`."""

    code = "request_too_complex"

    def __init__(self, seconds: float) -> None:
        super().__init__(None, seconds)
        self.seconds = seconds


class Busy(LatimerError):
    """A job that can neither start nor wait now; retry it after `retry_after` seconds."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    # The name of what is exceeded, in logs and metrics.
    limit = "queue"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ContextFull(Busy):
    """A call that an engine ends because it and others have filled the context that they share.

    The engine itself is well: it serves the next call.

    Args:
        engine: the engine, for the message.
        advice: what the operator can do, as a sentence.
        context: the tokens that fit into the context; None if unknown.
    """

    status = 503
    type = "service_unavailable_error"
    code = "engine_overloaded"
    limit = ""

    def __init__(self, engine: str, advice: str, context: int | None = None) -> None:
        size = "" if context is None else f" of {context} tokens"
        super().__init__(
            f"The slots of {engine} share one context{size}, and the requests that ran at the same "
            f"time have filled it. Send the request again later, or with fewer choices or tokens. "
            f"{advice}",
            1.0,
        )


class EngineError(LatimerError):
    """A failure of the engine, or a response that cannot be trusted."""


class EngineUnavailable(EngineError):
    """An engine that cannot be reached, or that is not ready yet."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"
    retry_after = 1.0


class ModelLoading(EngineUnavailable):
    """An engine that says that it loads its model."""


class ModelChanged(EngineUnavailable):
    """An engine that has another model than the one a request was prepared for."""


class EngineSilent(EngineError):
    """An engine that stopped responding."""

    status = 504
    code = "engine_timeout"


# Why an engine has not served a call, in metrics and logs; any other error of it is `error`.
_REASONS: Mapping[type[LatimerError], str] = {
    Busy: "busy",
    ContextFull: "busy",
    EngineUnavailable: "unavailable",
    ModelLoading: "unavailable",
    ModelChanged: "model_changed",
    EngineSilent: "silent",
}


def reason_label(error: LatimerError) -> str:
    """Return why an engine has not served a call, as one of a few words."""
    return _REASONS.get(type(error), "error")


@contextmanager
def read_from(engine: str, what: str) -> Iterator[None]:
    """Turn the errors of reading a malformed response into an `EngineError`.

    Args:
        what: the name of the response, for the message.
    """
    try:
        yield
    except MALFORMED as error:
        raise malformed(engine, what, error) from error


def malformed(engine: str, what: str, error: Exception) -> EngineError:
    """Return the error for a response with a missing field or a wrong type."""
    return EngineError(f"{engine} sent an invalid response for {what}: {error!r:.200}")


def ids_of(value: Any) -> tuple[int, ...]:
    """Return the token ids that a response lists.

    Raises:
        TypeError: the value is not a list of integers.
        ValueError: a number is out of range.
    """
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise TypeError(f"expected a list of token ids, but got {type(value).__name__}")
    if value and not (min(value) >= 0 and max(value) <= LARGEST):
        raise ValueError("a token id is negative or too large")
    return tuple(value)


def ids_of_text(value: Any, text: str, size: int = LARGEST) -> tuple[int, ...]:
    """Return the token ids that a tokenizer reports for a text.

    Args:
        size: the number of tokens in the vocabulary, if known.

    Raises:
        TypeError: the value is not a list of integers.
        ValueError: an id is not in the vocabulary, or a text has no tokens.
    """
    ids = ids_of(value)
    if ids and max(ids) >= size:
        raise ValueError(f"{max(ids)} is not one of {size} token ids")
    # Some tokenizers drop whitespace.
    if not ids and text.strip():
        raise ValueError("no tokens for a text that is not empty")
    return ids


def whole_of(value: Any, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer of a response, checked against bounds before anything depends on it.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is out of bounds.
    """
    if type(value) is not int:
        raise TypeError(f"expected an integer, but got {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return value


def parse_logprob(value: Any) -> float:
    """Return a log-probability of a response; rounding may put it a little above zero.

    Raises:
        TypeError, ValueError: the value is not a number, or not a log-probability.
    """
    logprob = float(value)
    if not logprob < MOST_LOGPROB:
        raise ValueError(f"{logprob} is not a log-probability")
    return logprob


def text_of(value: Any) -> str:
    """Return a string of a response; raise `TypeError` for any other type."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, but got {type(value).__name__}")
    return value


# The errors of reading a response that does not have the documented shape.
MALFORMED = (
    LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
