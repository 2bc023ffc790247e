"""Numbers to compare engines with: of one plain llama_decode, and of requests that run alone."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import numpy as np
from latimer.backends.base import (
    Backend,
    Generation,
    Piece,
    Prompt,
    PromptTokens,
    Sampling,
    Text,
    Token,
    TokenIds,
)
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.library import start
from latimer.backends.llama_cpp.options import default_threads
from latimer.backends.llama_server import LlamaServer
from numpy.typing import NDArray

from support.recordings import prompts
from support.servers import llama_server


class Reference:
    """A model that evaluates a text in one batch, with no flash attention and an F32 KV cache."""

    def __init__(self, path: Path, context: int) -> None:
        start()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, path
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        settings.n_threads = settings.n_threads_batch = default_threads()
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        assert self._context, path

    def distributions(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Return log-probabilities of shape (tokens, vocabulary): row i predicts token i + 1."""
        count = len(ids)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        try:
            for at, token in enumerate(ids):
                batch.token[at] = token
                batch.pos[at] = at
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = 0
                batch.logits[at] = 1
            batch.n_tokens = count
            assert llama_cpp.llama_decode(self._context, batch) == 0
            pointer = ctypes.cast(
                llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float)
            )
            logits = np.ctypeslib.as_array(pointer, shape=(count, self._vocabulary))
            wide = logits.astype(np.float64)
        finally:
            llama_cpp.llama_batch_free(batch)
        wide -= wide.max(axis=1, keepdims=True)
        result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        return result

    def scores(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, given those before it."""
        rows = self.distributions(ids)[:-1]
        return [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]

    def close(self) -> None:
        """Free the model and the context."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


@contextmanager
def reference(path: Path, context: int = 512) -> Iterator[Reference]:
    """Return a model's reference, which is freed at the end."""
    made = Reference(path, context)
    try:
        yield made
    finally:
        made.close()


EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")


@asynccontextmanager
async def engines(
    path: Path, *, exact: bool = True, slots: int = 4, context: int = 512
) -> AsyncIterator[dict[str, Backend]]:
    """Run a model in process and in a real llama-server."""
    with llama_server(path, *(EXACT if exact else ()), slots=slots, context=context) as address:
        made: dict[str, Backend] = {
            "in process": LlamaCpp(path, exact=exact),
            "llama-server": LlamaServer(address),
        }
        yield made
        for backend in made.values():
            await backend.aclose()


async def prompt_tokens(backend: Backend, prompt: Text | TokenIds, top: int = 1) -> Sequence[Token]:
    """Return a prompt's tokens with their log-probabilities."""
    job = Generation(Prompt(prompt, logprobs=top), 0)
    tokens: list[Token] = []
    async with backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, PromptTokens):
                    tokens += event.tokens
    return tokens


AT_ONCE = 16


class Apart(NamedTuple):
    """The differences between two runs of the same requests.

    Args:
        texts: the number of requests whose texts differ.
        worst: the largest difference of a log-probability before the texts diverge.
    """

    requests: int
    texts: int
    worst: float


def requests(count: int) -> list[Generation]:
    """Return greedy and seeded generations of different lengths, with log-probabilities."""
    known = itertools.islice(itertools.cycle(prompts()), count)
    return [
        Generation(
            Prompt(Text(prompt["prompt"])),
            20 + number % 30,
            (number,),
            sampling=Sampling(0.0 if number % 2 else 1.0, logit_bias=((0, -100.0), (2, -100.0))),
            logprobs=2,
        )
        for number, prompt in enumerate(known)
    ]


async def tokens_of(backend: Backend, job: Generation) -> Sequence[Token]:
    """Return the tokens that a generation yields."""
    tokens: list[Token] = []
    async with backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    tokens += event.tokens
    return tokens


async def apart(backend: Backend, count: int) -> Apart:
    """Run requests one by one, then sixteen at a time, and compare the results."""
    jobs = requests(count)
    alone = [await tokens_of(backend, job) for job in jobs]
    beside: list[Sequence[Token]] = []
    for first in range(0, count, AT_ONCE):
        part = jobs[first : first + AT_ONCE]
        beside += await asyncio.gather(*(tokens_of(backend, job) for job in part))
    texts, worst = 0, 0.0
    for one, other in zip(alone, beside, strict=True):
        same = [a.id == b.id for a, b in zip(one, other, strict=False)]
        texts += not all(same)
        # Tokens after the first different one have a different prefix.
        until = same.index(False) + 1 if False in same else len(same)
        for a, b in zip(one[:until], other[:until], strict=True):
            values = {entry.id: entry.logprob for entry in b.top}
            worst = max([worst, *(abs(e.logprob - values[e.id]) for e in a.top if e.id in values)])
    return Apart(count, texts, worst)
