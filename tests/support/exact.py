"""Both engines that score prompts, with exact arithmetic: F32 weights and KV cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from latimer.backends.base import Backend, Generation, Prompt, PromptTokens, Text, Token, TokenIds
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer

from support.servers import llama_server

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
