"""The distances of a server's log-probabilities from those of the model.

The truth is one plain `llama_decode` of the prompt and the answer, without flash attention and
with a 32-bit KV cache, and a log-softmax in double precision (`support/reference.py`). The server
answers some prompts greedily, with five alternatives of each token. A server that has no
log-probabilities at temperature 0 is asked again at temperature 1.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import gguf
import httpx2
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from latimer.conformance.runner import Settings, connected
from pydantic import BaseModel, TypeAdapter
from support import gguf_files
from support.reference import Reference, reference
from support.texts import CAPITALS, OPPOSITES

FILE = Path(__file__).parent.parent.parent / "docs" / "conformance" / "servers" / "numbers.json"
TOKENS, ALTERNATIVES = 16, 5
TEMPERATURES = (0, 1)
# Beginnings that the demo model continues, without control tokens: every server evaluates the same
# tokens.
PROMPTS = (
    "The", "A", "How", "What", "What is", "Hello", "Hello!", "tell me", "1, 2, 3",
    "Once upon a time",
    *(f"The capital of {country}" for country in CAPITALS),
    *(f"The opposite of {word}" for word in OPPOSITES),
    *(f"Q: What is the capital of {country}?\nA:" for country in CAPITALS),
)  # fmt: skip

Weights: TypeAlias = Literal["Q8_0", "F32"]


class Deviation(BaseModel):
    """The distances of log-probabilities from the reference."""

    count: int
    mean: float
    largest: float


class Numbers(BaseModel):
    """The log-probabilities of one server.

    Attributes:
        weights: the weights that the server runs, which are also those of the reference.
        temperature: that of the requests.
        missing: why there are no distances; empty if there are.
    """

    weights: Weights
    temperature: int = 0
    chosen: Deviation | None = None
    alternatives: Deviation | None = None
    missing: str = ""


class Entry(NamedTuple):
    """A token of an answer, with its log-probability and those of its alternatives."""

    token: bytes
    logprob: float
    top: Mapping[bytes, float]


class Truth:
    """The tokens and the distributions of a model."""

    def __init__(self, vocabulary: Vocabulary, known: Reference) -> None:
        self._vocabulary, self._known = vocabulary, known
        spelled = [vocabulary.token(one)[0] for one in range(vocabulary.size)]
        times = Counter(spelled)
        # Two tokens of one spelling cannot be distinguished.
        self._ids = {data: at for at, data in enumerate(spelled) if times[data] == 1}

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt."""
        return tuple(self._vocabulary.tokenize(text, add_special=True, parse_special=True))

    def distances(
        self, prompt: Sequence[int], entries: Sequence[Entry]
    ) -> tuple[list[float], list[float]]:
        """Return the distances of the chosen tokens and of their alternatives.

        They end before a token whose spelling is not that of one token of the model.
        """
        ids = [*prompt]
        known = []
        for entry in entries:
            if entry.token not in self._ids:
                break
            known.append(entry)
            ids.append(self._ids[entry.token])
        rows = self._known.distributions(ids)[len(prompt) - 1 :]
        chosen, others = [], []
        for entry, row in zip(known, rows, strict=False):
            chosen.append(abs(entry.logprob - float(row[self._ids[entry.token]])))
            others += [
                abs(value - float(row[self._ids[token]]))
                for token, value in entry.top.items()
                if token in self._ids and token != entry.token
            ]
        return chosen, others


@contextmanager
def truth(weights: Weights) -> Iterator[Truth]:
    """Load the demo model with some weights, and its reference."""
    with tempfile.TemporaryDirectory() as folder:
        path = DEMO_MODEL
        if weights == "F32":
            plain = gguf.GGMLQuantizationType.F32
            path = gguf_files.copy(DEMO_MODEL, Path(folder) / "f32.gguf", kind=plain)
        loaded = LoadedModel(path, Options())
        vocabulary = Vocabulary(loaded)
        try:
            with reference(path) as known:
                yield Truth(vocabulary, known)
        finally:
            vocabulary.close()
            loaded.close()


def entries(logprobs: Any) -> list[Entry]:
    """Return the tokens of a completion's log-probabilities, in its own format or that of chat.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: they have neither format.
    """
    if "content" in logprobs:
        return [
            Entry(
                _spelled(one),
                float(one["logprob"]),
                {_spelled(other): float(other["logprob"]) for other in one["top_logprobs"]},
            )
            for one in logprobs["content"]
        ]
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    return [
        Entry(token.encode(), float(value), {one.encode(): float(of) for one, of in others.items()})
        for token, value, others in rows
    ]


def _spelled(entry: Mapping[str, Any]) -> bytes:
    return bytes(entry["bytes"]) if entry.get("bytes") else str(entry["token"]).encode()


async def measure(settings: Settings, weights: Weights) -> Numbers:
    """Ask a server for log-probabilities, and return their distances from the reference."""
    async with connected(settings) as (client, model):
        with truth(weights) as known:
            for temperature in TEMPERATURES:
                found = await _measured(client, model, known, temperature)
                if isinstance(found, str):
                    missing = found
                    continue
                chosen, alternatives = map(_deviation, found)
                return Numbers(
                    weights=weights,
                    temperature=temperature,
                    chosen=chosen,
                    alternatives=alternatives,
                )
    return Numbers(weights=weights, missing=missing)


async def _measured(
    client: httpx2.AsyncClient, model: str, known: Truth, temperature: int
) -> tuple[list[float], list[float]] | str:
    """Return the distances of chosen tokens and alternatives, or why there are none."""
    chosen: list[float] = []
    others: list[float] = []
    for prompt in PROMPTS:
        body = {
            "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": temperature,
            "logprobs": ALTERNATIVES, "seed": 1,
        }  # fmt: skip
        try:
            reply = await client.post("completions", json=body)
        except httpx2.HTTPError as error:
            return f"no response: {type(error).__name__}"
        if reply.status_code != 200:
            return f"status {reply.status_code}"
        ids = known.prompt(prompt)
        try:
            value = reply.json()
            counted = (value.get("usage") or {}).get("prompt_tokens", len(ids))
            if counted != len(ids):
                return f"the prompt has {counted} tokens instead of {len(ids)}"
            first = value["choices"][0]["logprobs"]
            if not first:
                return "no log-probabilities"
            one, other = known.distances(ids, entries(first))
        except (LookupError, TypeError, ValueError, AttributeError):
            return "log-probabilities of another format"
        chosen += one
        others += other
    return (chosen, others) if chosen else "no token of the model"


def _deviation(values: Sequence[float]) -> Deviation | None:
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    return Deviation(
        count=len(values), mean=_rounded(statistics.fmean(values)), largest=_rounded(max(values))
    )


def _rounded(value: float) -> float:
    return float(f"{value:.1e}")


_ALL = TypeAdapter(dict[str, Numbers])


def published() -> dict[str, Numbers]:
    """Return the published numbers, by the file name of the server's report."""
    return _ALL.validate_json(FILE.read_bytes()) if FILE.exists() else {}


def record(slug: str, numbers: Numbers) -> None:
    """Publish the numbers of a server."""
    known = {**published(), slug: numbers}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: known[name].model_dump(exclude_defaults=True) for name in sorted(known)}
    FILE.write_text(json.dumps(plain, indent=1) + "\n")
