"""A toy language model over bytes: deterministic, fast, and with every feature that checks need.

Its tokens are the 256 bytes and three control tokens. The next token depends only on the tokens
before it. A script answers chat messages; a hash of its last bytes continues any other text.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

END, TURN, TURN_END = 256, 257, 258
SIZE = 259
CONTEXT = 65_536
SPELLINGS = {END: b"<|endoftext|>", TURN: b"<|im_start|>", TURN_END: b"<|im_end|>"}
_CONTROL = re.compile("|".join(re.escape(name.decode()) for name in SPELLINGS.values()))
_LETTERS = b"etaoin shrdlu, 1234."
_ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Show me an emoji of fire.": "🔥 and 漢",
    "Translate to French: summer": "été",
    "Hello!": "Hello! How can I help you today?",
    "Hello": "Hello! How can I help you today? I can count, and I can say where Paris is.",
}


def tokenize(text: str, parse: bool) -> list[int]:
    """Return the bytes of a text as tokens; with `parse`, control tokens become their ids."""
    if not parse:
        return list(text.encode())
    ids: list[int] = []
    start = 0
    names = {name.decode(): token for token, name in SPELLINGS.items()}
    for match in _CONTROL.finditer(text):
        ids += [*text[start : match.start()].encode(), names[match.group()]]
        start = match.end()
    return [*ids, *text[start:].encode()]


def piece(token: int) -> bytes:
    """Return a token's byte, or a control token's name."""
    return bytes([token]) if token < 256 else SPELLINGS[token]


@lru_cache(maxsize=4096)
def script(question: str) -> bytes:
    """Return the answer to a question."""
    count = re.match(r"Count (?:from 1 )?to (\d+)", question)
    if count:
        return (", ".join(map(str, range(1, int(count.group(1)) + 1))) + ".").encode()
    answer = _ANSWERS.get(question, f"You said {len(question)} letters, and I heard them all.")
    return answer.encode()


@lru_cache(maxsize=4096)
def _question(before: tuple[int, ...]) -> str:
    """Return the user's last message."""
    said = bytes(token if token < 256 else 0 for token in before)
    return said[:-2].rpartition(b"user\n")[2].decode(errors="replace")


def expected(ids: Sequence[int]) -> int:
    """Return the likeliest next token."""
    begins = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] == TURN), -1)
    head = bytes(token for token in ids[begins + 1 : begins + 11] if token < 256)
    if begins >= 0 and head == b"assistant\n":
        written = len(ids) - begins - 11
        answer = script(_question(tuple(ids[:begins])))
        return answer[written] if written < len(answer) else TURN_END
    return _LETTERS[_key(ids) % len(_LETTERS)]


def _key(ids: Sequence[int]) -> int:
    return zlib.crc32(bytes(token % 256 for token in ids[-6:]))


@lru_cache(maxsize=20_000)
def _logits(best: int, key: int) -> tuple[float, ...]:
    rng = random.Random(key)
    logits = [rng.uniform(-3.0, 0.0) for _ in range(SIZE)]
    # Three likely alternatives, so that completions differ at temperatures above 0.
    for other in rng.sample(_LETTERS, 3):
        logits[other] = rng.uniform(3.5, 4.5)
    logits[best] = 8.0
    return tuple(logits)


def logits(ids: Sequence[int]) -> tuple[float, ...]:
    """Return the logits of the next token, one for each token of the vocabulary."""
    return _logits(expected(ids), _key(ids) % 997)


@lru_cache(maxsize=20_000)
def log_softmax(values: tuple[float, ...]) -> list[float]:
    """Return the natural logarithms of the probabilities."""
    highest = max(values)
    norm = highest + math.log(math.fsum(math.exp(value - highest) for value in values))
    return [value - norm for value in values]


def draw(
    values: Sequence[float],
    rng: random.Random,
    temperature: float,
    top_p: float,
    bias: Mapping[int, float],
    counts: Mapping[int, int],
    presence: float,
    frequency: float,
) -> int:
    """Sample the next token by OpenAI's parameters."""
    shaped = list(values)
    for token, value in bias.items():
        if token < SIZE:
            shaped[token] += value if value > -100 else -math.inf
    for token, count in counts.items():
        shaped[token] -= presence + frequency * count
    if temperature == 0:
        return shaped.index(max(shaped))
    kept, weights = _nucleus(tuple(shaped), temperature, top_p)
    return rng.choices(kept, cum_weights=weights)[0]


@lru_cache(maxsize=4096)
def _nucleus(
    values: tuple[float, ...], temperature: float, top_p: float
) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens that together reach `top_p`, with their cumulative weights."""
    chances = log_softmax(tuple(value / temperature for value in values))
    kept, sums, mass = [], [], 0.0
    for token in sorted(range(SIZE), key=chances.__getitem__, reverse=True):
        mass += math.exp(chances[token])
        kept.append(token)
        sums.append(mass)
        if mass >= top_p:
            break
    return kept, sums
