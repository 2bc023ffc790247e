"""Facts about a llama-server that reporting tokens needs: vocabulary, slots, speculation."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from .. import offload
from ..base import Model, Special, TokenIds
from ..errors import EngineError, LatimerError, ids_of
from .events import ENGINE
from .translate import to_error
from .vocabulary import Vocabulary, read_pieces

Ask = Callable[..., Awaitable[Any]]
Reply = Callable[[str, str, bytes | None], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a server that reporting tokens needs.

    Args:
        model: the model that the server served when they were read.
        slots: the number of calls that it runs at a time.
        speculative: True if it invents log-probabilities, since it decodes speculatively.
        rolls_back: True if the model's memory can drop its last tokens. A recurrent model's memory
            cannot, and the server then reports other numbers for a prompt with a cached part.
    """

    model: Model
    vocabulary: Vocabulary
    slots: int
    speculative: bool
    rolls_back: bool


async def read_facts(reply: Reply, ask: Ask, model: Model, slots: int) -> Facts:
    """Ask a server for its facts.

    Args:
        reply: `reply(method, path, body)` returns the status and the body of a response.
        ask: `ask(method, path, payload)` returns the JSON of a response.
        model: the model that the server serves.
        slots: the number of calls that the server runs at a time.
    """
    pieces = await _read_pieces(reply)
    control = [token for token, piece in enumerate(pieces) if not piece]
    plain = {"content": "a", "add_special": False, "parse_special": False}
    first = ids_of((await ask("POST", "/tokenize", plain))["tokens"])[:1]
    adds_space = any(pieces[token][:1] == b" " for token in first)
    vocabulary = Vocabulary(pieces, await _names(control, pieces, ask), adds_space)
    await offload.run(len(pieces), vocabulary.index)
    return Facts(
        model,
        vocabulary,
        slots,
        await _speculates(ask),
        await _rolls_back(ask, vocabulary.ordinary),
    )


async def _rolls_back(ask: Ask, token: int) -> bool:
    """Return True if a prompt that diverges halfway reuses the common part.

    A request that runs in between can make the result False. The only cost is that no later call
    reuses the cache.
    """
    payload = {"n_predict": 1, "id_slot": 0, "response_fields": ["timings"]}
    first = {**payload, "prompt": [token] * 16, "cache_prompt": False}
    await ask("POST", "/completion", first)
    second = {**payload, "prompt": [*[token] * 8, token + 1], "cache_prompt": True}
    timings = (await ask("POST", "/completion", second)).get("timings") or {}
    return bool(timings.get("cache_n") == 8)


async def _read_pieces(reply: Reply) -> list[bytes]:
    """Return every token's bytes, from one call with all alternatives."""
    payload = {"prompt": [0], "n_predict": 1, "n_probs": 1_000_000, "cache_prompt": False}
    # A server-side ban or an end token still yields the whole distribution; a token that ends
    # inside a character yields no entry, so an ordinary one is forced.
    for bias in ([], [[" a", 1000]], [["a", 1000]]):
        body = orjson.dumps({**payload, "logit_bias": bias})
        status, data = await reply("POST", "/completion", body)
        if status != 200:
            raise to_error(status, data)
        if b'"completion_probabilities"' in data:
            return await offload.run(len(data), read_pieces, data)
    raise EngineError(f"{ENGINE} does not expose its vocabulary.")


async def _names(control: Sequence[int], pieces: Sequence[bytes], ask: Ask) -> dict[int, bytes]:
    """Return the spellings of control tokens, from one call with line ends between them."""
    line_end = next((token for token, piece in enumerate(pieces) if piece == b"\n"), None)
    if line_end is not None and control:
        tokens = [token for one in control for token in (one, line_end)]
        reply = await ask("POST", "/detokenize", {"tokens": tokens})
        names = str(reply["content"]).encode().split(b"\n")[:-1]
        if len(names) == len(control):
            return dict(zip(control, names, strict=True))
    found = {}
    for token in control:
        reply = await ask("POST", "/detokenize", {"tokens": [token]})
        found[token] = str(reply["content"]).encode()
    return found


async def _speculates(ask: Ask) -> bool:
    try:
        slots = await ask("GET", "/slots")
    except LatimerError:
        # `--no-slots`: a reply also reports speculation, if the draft model proposed tokens.
        return False
    return any(slot.get("speculative") for slot in slots)


async def read_specials(
    vocabulary: Vocabulary, tokenize: Callable[[str], Awaitable[TokenIds]]
) -> list[Special]:
    """Return the control tokens, and the added tokens that the tokenizer finds anywhere.

    Args:
        tokenize: returns the ids of a text without parsing control tokens.
    """
    found, candidates = await offload.run(len(vocabulary), _candidates, vocabulary)
    for token, text in candidates:
        # Doubling the first character rarely leaves an ordinary token in one piece.
        if (await tokenize(text[0] + text))[-1:] == (token,):
            found.append(Special(text, False))
    return found


def _candidates(vocabulary: Vocabulary) -> tuple[list[Special], list[tuple[int, str]]]:
    """Return the control tokens, and the tokens that look like added ones."""
    found = []
    candidates = []
    for token in range(len(vocabulary)):
        spelling, control = vocabulary.token(token)
        if control and spelling:
            found.append(Special(spelling.decode(errors="replace"), True))
        elif _LIKE_A_MARK.fullmatch(spelling):
            candidates.append((token, spelling.decode(errors="replace")))
    return found, candidates


_LIKE_A_MARK = re.compile(rb"<[^<>]{2,}>|\[[^\[\]]{2,}\]")
