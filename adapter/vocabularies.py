"""Token ids of OpenAI's own vocabularies, which clients compute with tiktoken, for other models.

tiktoken is imported when the first such vocabulary is wanted. It downloads a vocabulary, or takes
it from the folder that `TIKTOKEN_CACHE_DIR` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ..backends.base import Backend, Text
from ..backends.errors import EngineError, RequestError, Unsupported

if TYPE_CHECKING:
    import tiktoken

Biases = tuple[tuple[int, float], ...]


@lru_cache(maxsize=4)
def load(name: str) -> tiktoken.Encoding:
    """A vocabulary by tiktoken's name for it (`cl100k_base`, `o200k_base` …).

    Raises:
        EngineError: tiktoken is not installed, or cannot get the vocabulary's file.
        RequestError: it knows no vocabulary of that name.
    """
    try:
        import tiktoken
    except ImportError:
        raise EngineError(
            "logit_bias_vocabulary needs the extra 'tiktoken': pip install 'latimer[tiktoken]'."
        ) from None
    names = tiktoken.list_encoding_names()
    if name not in names:
        listed = ", ".join(f"'{known}'" for known in sorted(names))
        raise RequestError(
            f"Invalid value: '{name}'. Supported values are: {listed}.",
            "logit_bias_vocabulary",
            "invalid_value",
        )
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:
        raise EngineError(
            f"The vocabulary {name} cannot be loaded: {error}. Without a network, put its file "
            "into a folder and name that in TIKTOKEN_CACHE_DIR."
        ) from error


async def to_model(name: str, biases: Biases, backend: Backend) -> tuple[Biases, bool]:
    """Biases of another vocabulary's tokens as biases of the model's, and whether they are exact.

    A token whose bytes are one of the model's tokens is that token; of several the first gets the
    bias. Where two tokens have the same first one, the one that is exact counts, else the stronger.

    Raises:
        RequestError: an id is none of the vocabulary.
        Unsupported: the engine does not tell how it spells tokens.
    """
    encoding = _wanted(name)
    pieces = await backend.pieces()
    if pieces is None:
        capabilities = backend.capabilities
        field = "logit_bias_vocabulary"
        hint = capabilities.refused.get(field, "Send the model's own token ids.")
        raise Unsupported(field, capabilities.engine, hint)
    ids = _index(pieces)
    found: dict[int, tuple[bool, float]] = {}
    for token, bias in biases:
        data = _bytes_of(encoding, token, f"logit_bias.{token}")
        exact = ids.get(data)
        target = exact if exact is not None else await _first(data, pieces, ids, backend)
        rank = (exact is not None, abs(bias))
        known = found.get(target)
        if known is None or rank > (known[0], abs(known[1])):
            found[target] = (exact is not None, bias)
    inexact = not all(exact for exact, _ in found.values()) or len(found) < len(biases)
    return tuple((token, bias) for token, (_, bias) in found.items()), not inexact


def to_text(name: str, ids: Sequence[int]) -> Text:
    """A prompt of another vocabulary's ids as text, for the model's own tokeniser.

    Raises:
        RequestError: an id is none of the vocabulary, or the ids are no whole characters.
    """
    encoding = _wanted(name)
    data = b"".join(_bytes_of(encoding, token, "prompt") for token in ids)
    try:
        return Text(data.decode())
    except UnicodeDecodeError:
        raise RequestError(
            f"Invalid 'prompt': these ids of {name} are no whole characters, so no other model "
            "can read them. Send text.",
            "prompt",
            "invalid_value",
        ) from None


def _wanted(name: str) -> tiktoken.Encoding:
    """A vocabulary that a request names; one that cannot be had is refused."""
    try:
        return load(name)
    except EngineError as error:
        raise Unsupported("logit_bias_vocabulary", "this server", error.message) from error


def _bytes_of(encoding: tiktoken.Encoding, token: int, param: str) -> bytes:
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:
        raise RequestError(
            f"Invalid '{param}': {token} is not a token id of {encoding.name}; ids go from 0 to "
            f"{encoding.max_token_value}.",
            param,
            "invalid_value",
        ) from None


_indices: dict[int, tuple[Sequence[bytes], dict[bytes, int]]] = {}


def _index(pieces: Sequence[bytes]) -> dict[bytes, int]:
    """Ids by spelling; of tokens that are spelled alike the first that was made from text."""
    known = _indices.get(id(pieces))
    if known is None or known[0] is not pieces:
        ids = {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}
        _indices.clear()
        known = _indices[id(pieces)] = (pieces, ids)
    return known[1]


async def _first(
    data: bytes, pieces: Sequence[bytes], ids: dict[bytes, int], backend: Backend
) -> int:
    """The first of the model's tokens in a token's bytes: as its tokeniser cuts, where it can."""
    try:
        cut = await backend.tokenize(data.decode(), add_special=False, parse_special=False)
    except UnicodeDecodeError:
        cut = ()
    if cut and b"".join(pieces[token] for token in cut) == data:
        return cut[0]
    for end in range(len(data), 0, -1):
        if (token := ids.get(data[:end])) is not None:
            return token
    raise RequestError(
        f"Invalid 'logit_bias': no token of the model begins like {data!r}.",
        "logit_bias",
        "invalid_value",
    )
