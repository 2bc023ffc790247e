"""Map token ids of OpenAI's vocabularies, which clients compute with tiktoken, to other models.

tiktoken is imported when a vocabulary is first needed. It downloads the vocabulary, or reads
it from the folder in `TIKTOKEN_CACHE_DIR`, and sets no time limit. Each vocabulary is therefore
loaded in a daemon thread of its own, which blocks neither other work nor the end of the process.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...backends import offload
from ...backends.base import Backend, Sampling, Text
from ...backends.errors import EngineError, LatimerError, Unsupported, shortened, summed_up
from ...schemas.openai.common import EngineExtras
from ..daemon_threads import DaemonThreads
from ..errors import InvalidRequest, wrong_value
from ..model_entry import ServedModel

if TYPE_CHECKING:
    from tiktoken import Encoding as Encoding

Biases = tuple[tuple[int, float], ...]

# Seconds that requests wait for a vocabulary, counted from the start of its loading.
PATIENCE = 30.0
# Seconds from the start of a failed load until the next attempt.
AGAIN = 60.0
# Biases to map before the event loop runs other tasks.
AT_ONCE = 128

_BY_HAND = (
    "set TIKTOKEN_CACHE_DIR to a directory with its file, whose name there is the SHA-1 of its URL"
)


class _Load:
    """A load that runs once in a thread, with one result for all requests."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.begun = time.monotonic()
        # A download that hangs must not block the end of the process.
        thread = DaemonThreads(1, "latimer-vocabulary")
        self.future: Future[Any] = thread.submit(work)
        thread.shutdown()

    @property
    def has_failed(self) -> bool:
        """True if the load failed and is old enough to be tried again."""
        failed = self.future.done() and self.future.exception() is not None
        return failed and time.monotonic() - self.begun > AGAIN


# Loads by vocabulary name, so tiktoken's names bound their number. The empty name is for the load
# of the list of names.
_loads: dict[str, _Load] = {}
_lock = threading.Lock()


def _load_of(name: str, work: Callable[[], Any]) -> _Load:
    with _lock:
        load = _loads.get(name)
        if load is None or load.has_failed:
            load = _loads[name] = _Load(work)
        return load


def forget() -> None:
    """Forget every vocabulary and every failed load."""
    with _lock:
        _loads.clear()


def check_vocabulary(name: str) -> None:
    """Check the name of a vocabulary that a setting has, without loading it.

    Raises:
        ValueError: tiktoken is not installed, or knows no vocabulary of that name.
    """
    try:
        _check(name, _names())
    except (EngineError, InvalidRequest) as error:
        raise ValueError(error.message.removesuffix(".")) from None


def load(name: str) -> Encoding:
    """Return a vocabulary by its name in tiktoken (`cl100k_base`, `o200k_base` …).

    This blocks until the vocabulary is loaded.

    Raises:
        EngineError: tiktoken is not installed, or cannot get the vocabulary's file.
        InvalidRequest: tiktoken knows no vocabulary of that name.
    """
    _check(name, _load_of("", _names).future.result())
    encoding: Encoding = _load_of(name, lambda: _encoding(name)).future.result()
    return encoding


async def loaded(name: str) -> Encoding:
    """Return a vocabulary that a request names.

    Raises:
        Unsupported: the vocabulary cannot be loaded, or not within `PATIENCE`.
        InvalidRequest: tiktoken knows no vocabulary of that name.
    """
    _check(name, await _waited(name, _load_of("", _names)))
    encoding: Encoding = await _waited(name, _load_of(name, lambda: _encoding(name)))
    return encoding


async def _waited(name: str, load: _Load) -> Any:
    if not load.future.done():
        waiting = asyncio.wrap_future(load.future)
        # The outcome is read here too, since a cancelled request does not read it below.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([waiting], timeout=max(load.begun + PATIENCE - time.monotonic(), 0))
    if load.future.done():
        error = load.future.exception()
        if error is None:
            return load.future.result()
        hint = error.message if isinstance(error, LatimerError) else repr(error)
    else:
        hint = (
            f"The vocabulary {name} was not downloaded within {PATIENCE:g} s. Send the request "
            f"again later, or {_BY_HAND}."
        )
    raise Unsupported("logit_bias_vocabulary", "this server", hint)


def _names() -> Collection[str]:
    try:
        import tiktoken
    except ImportError:
        raise EngineError(
            "logit_bias_vocabulary requires the extra 'tiktoken': run pip install "
            "'.[tiktoken]' in a clone of Latimer."
        ) from None
    return sorted(tiktoken.list_encoding_names())


def _check(name: str, names: Collection[str]) -> None:
    if name not in names:
        in_list = ", ".join(f"'{known}'" for known in names)
        raise InvalidRequest(
            f"Invalid value: '{shortened(name)}'. Supported values are: {in_list}.",
            "logit_bias_vocabulary",
            "invalid_value",
        )


def _encoding(name: str) -> Encoding:
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except Exception as error:
        raise EngineError(
            f"The vocabulary {name} cannot be loaded. Without a network, {_BY_HAND}. The reason: "
            f"{summed_up(str(error))}"
        ) from error


async def to_model(name: str, biases: Biases, backend: Backend) -> tuple[Biases, bool]:
    """Map biases from another vocabulary to the model's; also return True if the result is exact.

    A token maps to the model's token with the same bytes. If there is none, it maps to the first
    of the model's tokens that spell it. If two tokens map to one, an exact match wins, then the
    stronger bias.

    Raises:
        InvalidRequest: an id is not in the vocabulary.
        Unsupported: the engine does not report the bytes of its tokens.
    """
    encoding = await loaded(name)
    pieces = await backend.token_bytes()
    if pieces is None:
        capabilities = backend.capabilities
        field = "logit_bias_vocabulary"
        hint = capabilities.refused.get(field, "Send the model's own token ids.")
        raise Unsupported(field, capabilities.engine, hint)
    ids = await _index(pieces)
    found: dict[int, tuple[bool, float]] = {}
    for number, (token, bias) in enumerate(biases, 1):
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
        data = _bytes_of(encoding, token, f"logit_bias.{token}")
        exact = ids.get(data)
        target = exact if exact is not None else await _first(data, pieces, ids, backend)
        rank = (exact is not None, abs(bias))
        known = found.get(target)
        if known is None or rank > (known[0], abs(known[1])):
            found[target] = (exact is not None, bias)
    inexact = not all(exact for exact, _ in found.values()) or len(found) < len(biases)
    return tuple((token, bias) for token, (_, bias) in found.items()), not inexact


def to_text(encoding: Encoding, ids: Sequence[int]) -> Text:
    """Return the text of a prompt in another vocabulary's ids, for the model's own tokenizer.

    Raises:
        InvalidRequest: an id is not in the vocabulary, or the bytes of the ids are not UTF-8.
    """
    try:
        return Text(_data_of(encoding, ids, "prompt").decode())
    except UnicodeDecodeError:
        raise _incomplete(encoding, "prompt") from None


def to_input(encoding: Encoding, ids: Sequence[int], param: str) -> tuple[Text, bool]:
    """Return the text of an input in another vocabulary's ids; control tokens in it are text.

    Clients cut long texts between tokens, which may be inside a character. The bytes of incomplete
    characters at both ends are dropped; the second value is True if there are any.

    Args:
        param: the field of the ids.

    Raises:
        InvalidRequest: an id is not in the vocabulary, or the other bytes are not UTF-8.
    """
    data = _data_of(encoding, ids, param)
    start = next((at for at, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), 3)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data[start:])
    except UnicodeDecodeError:
        raise _incomplete(encoding, param) from None
    if not text:
        raise _incomplete(encoding, param)
    return Text(text, parse_special=False), bool(start or decoder.getstate()[0])


def _data_of(encoding: Encoding, ids: Sequence[int], param: str) -> bytes:
    return b"".join(_bytes_of(encoding, token, param) for token in ids)


def _incomplete(encoding: Encoding, param: str) -> InvalidRequest:
    return wrong_value(
        param,
        f"these token ids of {encoding.name} do not decode to complete characters. Send text.",
    )


def _bytes_of(encoding: Encoding, token: int, param: str) -> bytes:
    try:
        return encoding.decode_single_token_bytes(token)
    except (KeyError, OverflowError):
        raise wrong_value(
            param,
            f"{token} is not a token id of {encoding.name}. Expected an id from 0 to "
            f"{encoding.max_token_value}.",
        ) from None


_indices: dict[int, tuple[Sequence[bytes], dict[bytes, int]]] = {}


async def _index(pieces: Sequence[bytes]) -> dict[bytes, int]:
    """Return the model's token ids by their bytes; of tokens with the same bytes, the lowest id."""
    known = _indices.get(id(pieces))
    if known is None or known[0] is not pieces:

        def index() -> dict[bytes, int]:
            return {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}

        ids = await offload.run(8 * len(pieces), index)
        _indices.clear()
        known = _indices[id(pieces)] = (pieces, ids)
    return known[1]


async def _first(
    data: bytes, pieces: Sequence[bytes], ids: dict[bytes, int], backend: Backend
) -> int:
    """Return the first of the model's tokens in these bytes.

    This is the tokenizer's first token, or the longest token that the bytes begin with.

    Raises:
        InvalidRequest: the bytes begin with none of the model's tokens.
    """
    try:
        cut = await backend.tokenize(data.decode(), add_special=False, parse_special=False)
    except UnicodeDecodeError:
        cut = ()
    if cut and b"".join(pieces[token] for token in cut) == data:
        return cut[0]
    for end in range(len(data), 0, -1):
        if (token := ids.get(data[:end])) is not None:
            return token
    raise wrong_value("logit_bias", f"this model has no token for the text {data!r}.")


async def in_model_vocabulary(
    request: EngineExtras, sampling: Sampling, served: ServedModel
) -> tuple[Sampling, Sequence[str]]:
    """Return the sampling with biases of the model's tokens, and the fields that are inexact."""
    vocabulary = request.logit_bias_vocabulary or served.policy.vocabulary
    if vocabulary is None or not sampling.logit_bias:
        return sampling, ()
    biases, exact = await to_model(vocabulary, sampling.logit_bias, served.backend)
    return replace(sampling, logit_bias=biases), () if exact else ("logit_bias",)
