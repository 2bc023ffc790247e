"""Turn errors into OpenAI's error object, with status and headers (contract 1.3 and 1.4).

Also text of requests and engines in a form that is safe in logs, on terminals and in messages.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import orjson

from ..backends.errors import (
    MOST_MESSAGE,
    ContextExceeded,
    EmptyPrompt,
    InvalidGrammar,
    LatimerError,
    NotServed,
    Refused,
    RequestError,
    TooComplex,
    TooMany,
    UnknownToken,
    UnreadableMedia,
    Unspoken,
    Unsupported,
    WordTooLong,
    shortened,
    summed_up,
)

if TYPE_CHECKING:
    # Commands that only print text do not wait for the import of pydantic.
    from ..schemas.openai.common import ErrorReply

Header = tuple[bytes, bytes]

# The last event of every stream.
DONE = b"data: [DONE]\n\n"

# Clients that compute ids with tiktoken meet this error; `/tokenize` and `/detokenize` have no such
# field.
_OTHER_VOCABULARY = (
    " If the ids are of one of OpenAI's vocabularies, name it in 'logit_bias_vocabulary' or "
    "--logit-bias-vocabulary."
)
_CLOSE: Header = (b"connection", b"close")


class InvalidRequest(RequestError):
    """An invalid request, with OpenAI's error message.

    Args:
        code: OpenAI's error code (contract 1.2 and 1.4).
        status: the HTTP status.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        LatimerError.__init__(self, message)
        self.param = param
        self.code = code
        self.status = status
        if status == 413:
            self.headers = (_CLOSE,)


def about(path: str, error: tuple[str, str]) -> InvalidRequest:
    """Return the error with a message and a code, in which `{param}` is the path of a field."""
    message, code = error
    return InvalidRequest(message.replace("{param}", path), path, code)


def wrong_value(path: str, reason: str, code: str | None = "invalid_value") -> InvalidRequest:
    """Return the error for a field with a value that is not allowed."""
    return InvalidRequest(f"Invalid '{path}': {reason}", path, code)


def wrong_type(path: str, expected: str, value: object) -> InvalidRequest:
    """Return OpenAI's error for a value of another JSON type."""
    from ..schemas.openai.common import kind_of

    message = f"Invalid type for '{path}': expected {expected}, but got {kind_of(value)} instead."
    return InvalidRequest(message, path, "invalid_type")


def missing(path: str) -> InvalidRequest:
    """Return OpenAI's error for a field that must be there."""
    return InvalidRequest(
        f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
    )


def unsupported(path: str, hint: str) -> InvalidRequest:
    """Return the error for a field that this server refuses on every engine."""
    return InvalidRequest(
        f"Unsupported parameter: '{path}' is not supported. {hint}", path, "unsupported_parameter"
    )


def not_found(kind: str, name: str, hint: str = "") -> InvalidRequest:
    """Return the 404 for an object that does not exist, or of another key."""
    return InvalidRequest(f"{kind} with id '{shortened(name)}' not found.{hint}", status=404)


class MethodNotAllowed(InvalidRequest):
    """A request for a known path with a method that the path does not support."""

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"Not allowed to {shortened(f'{method} on {path}')}. (HINT: Perhaps you meant to use a "
            "different HTTP method?)",
            status=405,
        )
        self.headers = ((b"allow", ", ".join(allowed).encode()),)


class LateRequest(InvalidRequest):
    """A request whose rest has not arrived in time."""

    status = 408
    headers = (_CLOSE,)

    def __init__(self) -> None:
        super().__init__(
            "The rest of the request has not arrived in time. Send the request again.",
            code="request_timeout",
            status=408,
        )


class WebSocketRefused(InvalidRequest):
    """A handshake of a WebSocket; a client can send the same request without one."""

    headers = ((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade"))

    def __init__(self, path: str) -> None:
        super().__init__(
            f"This server does not serve a WebSocket at {shortened(path)}. Send POST requests; "
            "with 'stream', the response has the same events.",
            code="unsupported_endpoint",
            status=426,
        )


class ShuttingDown(LatimerError):
    """An error for requests that a shutdown ends; the client can retry later or elsewhere."""

    status = 503
    type = "service_unavailable_error"
    code = "server_shutting_down"
    retry_after = 1.0
    headers = (_CLOSE,)

    def __init__(self) -> None:
        super().__init__("The server is shutting down. Send the request again later.")


class Overloaded(LatimerError):
    """An error for a large request that arrives while too many others do."""

    status = 503
    type = "service_unavailable_error"
    code = "server_overloaded"
    retry_after = 1.0

    def __init__(self) -> None:
        super().__init__(
            "Too many large requests are arriving at this server. Send the request again later."
        )


class ReplicaUnavailable(LatimerError):
    """An error for a request that only another replica can serve, which takes none now."""

    status = 503
    type = "service_unavailable_error"
    code = "replica_unavailable"
    retry_after = 1.0

    def __init__(self) -> None:
        super().__init__(
            "The replica that runs this response is busy or ends. Send the request again later."
        )


class ReplicaEnded(LatimerError):
    """An error for a request whose replica ended before the response began."""

    status = 503
    type = "service_unavailable_error"
    code = "replica_ended"
    retry_after = 1.0

    def __init__(self) -> None:
        super().__init__(
            "The replica that had the request ended before its response began. Send the request "
            "again."
        )


class StoreUnavailable(LatimerError):
    """A store of objects that cannot be used now.

    Args:
        reason: for clients.
        detail: for the log: the message of the database, with hosts and paths.
    """

    status = 503
    type = "service_unavailable_error"
    code = "store_unavailable"
    retry_after = 1.0

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"The store is not available: {reason}. Send the request again later.")
        self.reason = reason
        self.detail = detail or reason


class RateLimited(LatimerError):
    """A request that exceeds a limit of its key, in OpenAI's words.

    Args:
        model: the name of the model in the request.
        key: the name of the key's table.
        unit: the unit of the limit, such as `tokens per min (TPM)`.
        wait: the seconds after which the request may be sent again.
        headers: the state of the limits.
    """

    status = 429
    code = "rate_limit_exceeded"

    def __init__(
        self,
        model: str,
        key: str,
        unit: str,
        limit: int,
        used: int,
        requested: int,
        wait: float,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(
            f"Rate limit reached for {shortened(model)} in key {key} on {unit}: Limit {limit}, "
            f"Used {used}, Requested {requested}. Please try again in {go_duration(wait)}."
        )
        # `requests`, `tokens` or `concurrent`.
        self.limit = unit.partition(" ")[0]
        self.type = "tokens" if unit.startswith("tokens") else "requests"
        self.retry_after = wait
        self.headers = headers


class LimitsUnavailable(LatimerError):
    """A store of limits that does not answer, where requests are refused then.

    Args:
        detail: for the log: the message of the database, with hosts.
    """

    status = 503
    type = "service_unavailable_error"
    code = "limits_unavailable"
    retry_after = 1.0

    def __init__(self, detail: str) -> None:
        super().__init__(
            "The limits of this API key cannot be checked now. Send the request again later."
        )
        self.detail = detail


def go_duration(seconds: float) -> str:
    """Return a time as Go writes it, in OpenAI's headers and messages: `20ms`, `1.5s`, `1m0s`."""
    milliseconds = max(math.ceil(seconds * 1000), 0)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{shown}s" if minutes else f"{shown}s"


# OpenAI's Python client, which reads milliseconds first, ignores a longer wait and retries at once.
# Claude Code gives up.
_LONGEST_MS = 60_000


def render(error: LatimerError) -> tuple[int, ErrorReply, list[Header]]:
    """Return the HTTP status, the body and the extra headers of an error."""
    if isinstance(error, RequestError):
        error = worded(error)
    headers: list[Header] = []
    if error.retry_after is not None:
        milliseconds = min(max(math.ceil(error.retry_after * 1000), 1), _LONGEST_MS)
        headers.append((b"retry-after-ms", str(milliseconds).encode()))
        headers.append((b"retry-after", str(-(-milliseconds // 1000)).encode()))
    body = _body(error.message, error.type, error.param, error.code)
    return error.status, body, [*headers, *error.headers]


def error_event(error: LatimerError) -> bytes:
    """Return the frames that end a stream with an error, for OpenAI's SDK (contract 1.7)."""
    _status, body, _headers = render(error)
    return b"data: " + orjson.dumps(body) + b"\n\n" + DONE


def unexpected() -> tuple[int, ErrorReply]:
    """Return the status and the body for an unexpected exception."""
    message = (
        "The server had an error while processing your request. Sorry about that! The server's log "
        "has the details."
    )
    return 500, _body(message, "server_error", None, None)


def of_http(status: int, message: str) -> ErrorReply:
    """Return the body for an error that has only a status and a message."""
    return _body(message, "invalid_request_error" if status < 500 else "server_error", None, None)


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorReply:
    message = shortened(message, MOST_MESSAGE)
    param = None if param is None else shortened(param)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class UnknownModel(InvalidRequest):
    """A model name that no engine has.

    Args:
        hint: the known names, or an empty text.
    """

    def __init__(self, name: str, hint: str) -> None:
        name = shortened(name)
        message = f"The model `{name}` does not exist or you do not have access to it."
        super().__init__(f"{message}{hint}", None, "model_not_found", 404)
        self.name = name
        self.hint = hint


def worded(error: RequestError) -> InvalidRequest:
    """Return an error with OpenAI's message."""
    if isinstance(error, InvalidRequest):
        return error
    return InvalidRequest(_MESSAGES[type(error)](error), error.param, error.code, error.status)


def with_names(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return an error that names the client's fields.

    Args:
        names: the client's field for each field that was set.
    """
    facts = worded(error)
    message, param = facts.message, facts.param
    for name, own in names.items():
        if param is not None and (param == name or param.startswith((f"{name}.", f"{name}["))):
            param = own + param[len(name) :]
        message = message.replace(f"'{name}'", f"'{own}'").replace(f"'{name}.", f"'{own}.")
        message = message.replace(f"'{name}[", f"'{own}[")
    return InvalidRequest(message, param, facts.code, facts.status)


def in_chat(error: LatimerError) -> LatimerError:
    """Return an error that names `messages` instead of `prompt`, which a chat request lacks."""
    if isinstance(error, ContextExceeded):
        return InvalidRequest(_chat_context(error), "messages", "context_length_exceeded")
    if isinstance(error, EmptyPrompt):
        # Without the hint for those who send a chat as a prompt.
        return worded(EmptyPrompt("messages"))
    if isinstance(error, RequestError) and error.param == "prompt":
        return with_names(error, {"prompt": "messages"})
    return error


# The names that fields of chat have in the Responses API.
RESPONSE_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def in_responses(error: LatimerError, names: Mapping[str, str] = _NO_NAMES) -> LatimerError:
    """Return an error that names the fields of a Responses request.

    Args:
        names: the path in the request for each path in its messages that differs.
    """
    if isinstance(error, ContextExceeded) and error.prompt_tokens < error.context:
        message = (
            f"This model's maximum context length is {error.context} tokens. However, you "
            f"requested {error.prompt_tokens + error.max_tokens} tokens ({error.prompt_tokens} in "
            f"the input, {error.max_tokens} in 'max_output_tokens'). Send a smaller "
            "'max_output_tokens', or omit it."
        )
        return InvalidRequest(message, "max_output_tokens", "context_length_exceeded")
    if isinstance(error, ContextExceeded):
        more = "at least " if error.at_least else ""
        message = (
            f"This model's maximum context length is {error.context} tokens. However, your input "
            f"resulted in {more}{error.prompt_tokens} tokens. {_beyond(error)} Your input exceeds "
            "the context window of this model. Please adjust your input and try again."
        )
        return InvalidRequest(message, "input", "context_length_exceeded")
    if isinstance(error, UnknownModel):
        message = f"The requested model '{error.name}' does not exist.{error.hint}"
        return InvalidRequest(message, "model", "model_not_found")
    if not isinstance(error, RequestError):
        return error
    return with_names(in_chat(error), {**names, **RESPONSE_NAMES})  # type: ignore[arg-type]


def _context(error: ContextExceeded) -> str:
    more = "at least " if error.at_least else ""
    total = error.prompt_tokens + error.max_tokens
    return (
        f"This model's maximum context length is {error.context} tokens, however you requested "
        f"{more}{total} tokens ({more}{error.prompt_tokens} in your prompt; {error.max_tokens} for "
        "the completion). Please reduce your prompt; or completion length."
        # The texts of embeddings and rankings, of which a request may have many.
        + (f" This is about '{error.param}'." if "[" in (error.param or "") else "")
        + (f" {error.hint}" if error.hint else "")
    )


def _chat_context(error: ContextExceeded) -> str:
    start = f"This model's maximum context length is {error.context} tokens. However, "
    more = "at least " if error.at_least else ""
    if error.max_tokens:
        beyond = f"{_beyond(error)} " if error.prompt_tokens >= error.context else ""
        return (
            f"{start}you requested {more}{error.prompt_tokens + error.max_tokens} tokens "
            f"({more}{error.prompt_tokens} in the messages, {error.max_tokens} in the completion). "
            f"{beyond}Please reduce the length of the messages or completion."
        )
    return (
        f"{start}your messages resulted in {more}{error.prompt_tokens} tokens. {_beyond(error)} "
        "Please reduce the length of the messages."
    )


def _beyond(error: ContextExceeded) -> str:
    """Return the words of OpenAI's newer models for a prompt that is too long.

    LangChain searches for them: since version 3 of OpenAI's client, the text of its exceptions
    lacks the code.
    """
    return f"Input tokens exceed the configured limit of {error.context} tokens."


_NOT_SERVED: Mapping[str, str] = {
    "generate": (
        "This is not a chat or completion model and thus not supported in the v1/chat/completions "
        "and v1/completions endpoints."
    ),
    "embed": (
        "This is not an embedding model and thus not supported in the v1/embeddings endpoint."
    ),
    "rank": "This is not a reranking model and thus not supported in the v1/rerank endpoint.",
}

# For clients that send a chat to v1/completions.
_CHAT = " For a chat, send 'messages' to v1/chat/completions."

# OpenAI's message for each type of error (contract 1.2 to 1.4).
_MESSAGES: Mapping[type[RequestError], Callable[[Any], str]] = {
    Unsupported: lambda error: (
        f"Unsupported parameter: '{error.param}' is not supported by {error.engine}. {error.hint}"
    ),
    NotServed: lambda error: f"{_NOT_SERVED[error.task]} {error.hint}",
    ContextExceeded: _context,
    EmptyPrompt: lambda error: (
        f"Invalid '{error.param}': empty prompt. This model has no BOS token, so send at least one "
        "token." + (_CHAT if error.param == "prompt" else "")
    ),
    InvalidGrammar: lambda error: f"Invalid '{error.param}': {summed_up(error.reason)}.",
    UnreadableMedia: lambda error: (
        f"Invalid '{error.param}': the file cannot be read. Supported formats are PNG, JPEG, GIF, "
        "BMP and WebP for images, and WAV, MP3 and FLAC for audio."
    ),
    Unspoken: lambda error: (
        f"Invalid '{error.param}': the voice of {error.speaker} has no sound for any of its words. "
        "Write it in the language of the voice."
    ),
    UnknownToken: lambda error: (
        f"Invalid '{error.param}': {error.token} is not a token id of this model. Expected an id "
        f"from 0 to {error.size - 1}." + ("" if error.param == "tokens" else _OTHER_VOCABULARY)
    ),
    WordTooLong: lambda error: (
        f"Invalid '{error.param}': a word or a run of whitespace is longer than {error.most} "
        f"characters, starting with {error.beginning!r}. Send a shorter one."
    ),
    TooMany: lambda error: (
        f"Invalid '{error.param}': too many entries. {error.engine} supports at most "
        f"{error.most}, but got {error.count} instead."
    ),
    Refused: lambda error: f"{error.engine} rejected the request: {error.reason}",
    TooComplex: lambda error: (
        f"This request takes more than {error.seconds:g} s to prepare. Send fewer or shorter "
        "messages, or a simpler schema or grammar."
    ),
}


def printable(text: str, keep: str = "") -> str:
    """Escape the unprintable characters of a text, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def as_ascii(text: str) -> str:
    """Return text of a request for a message, as ASCII and shortened."""
    return text.encode("ascii", "backslashreplace").decode()[:100]


# A new salt for each process, so that a hash cannot be compared with those of known names.
_SALT = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)


def in_log(name: str) -> str:
    """Return the hash of a name: 12 hex digits, the same ones until the process ends."""
    data = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, key=_SALT, digest_size=6).hexdigest()
