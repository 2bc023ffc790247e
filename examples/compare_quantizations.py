"""Measure the loss of a quantization: score texts with two llama-servers, token by token.

    llama-server -m model-Q8_0.gguf --port 8080 &
    llama-server -m model-Q4_0.gguf --port 8081 &
    python examples/compare_quantizations.py http://127.0.0.1:8080 http://127.0.0.1:8081 [FILE]

The file has one text per line. Without a file, the script scores texts made for the demo model.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from latimer.backends.base import Generation, Prompt, PromptTokens, Text, Token
from latimer.backends.llama_server import LlamaServer

TEXTS = [
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    for question, answer in (
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 3 plus 4?", "3 + 4 = 7"),
        ("Count to 7.", "1, 2, 3, 4, 5, 6, 7."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("Translate to French: summer", "été"),
        ("Spell river.", "r-i-v-e-r"),
    )
]


async def tokens_of(server: LlamaServer, text: str) -> Sequence[Token]:
    """Return a text's tokens but the first, each with its logprob and the most likely token."""
    async with server.open(Generation(Prompt(Text(text), logprobs=1), 0)) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, PromptTokens):
                    return event.tokens[1:]
    return ()


def perplexity(tokens: Sequence[Token]) -> float:
    """Return the perplexity of tokens: the model's average number of equally likely choices."""
    return math.exp(-math.fsum(token.logprob or 0.0 for token in tokens) / len(tokens))


async def main(addresses: Sequence[str], texts: Sequence[str]) -> None:
    """Score all texts on both servers, and print the differences."""
    one, other = (LlamaServer(address) for address in addresses)
    first: list[Token] = []
    second: list[Token] = []
    for text in texts:
        pair = await asyncio.gather(tokens_of(one, text), tokens_of(other, text))
        first += pair[0]
        second += pair[1]
    if [token.id for token in first] != [token.id for token in second]:
        sys.exit(
            "The servers return different tokens for the same text: these are not the same model."
        )
    changes = [(b.logprob or 0) - (a.logprob or 0) for a, b in zip(first, second, strict=True)]
    same = sum(a.top[0].id == b.top[0].id for a, b in zip(first, second, strict=True))
    count = len(first)
    print(f"tokens                        {count}")
    print(f"perplexity                    {perplexity(first):.4f}  {perplexity(second):.4f}")
    print(f"mean change of a logprob      {math.fsum(changes) / count:+.4f}")
    print(f"mean size of a change         {math.fsum(map(abs, changes)) / count:.4f}")
    print(f"same most likely token        {same / count:.1%}")
    print("most was lost at")
    for at in sorted(range(count), key=changes.__getitem__)[:5]:
        token = first[at].spelling.decode(errors="backslashreplace")
        print(f"  {token!r:<20} {first[at].logprob:8.3f} -> {second[at].logprob:8.3f}")
    await asyncio.gather(one.aclose(), other.aclose())


if __name__ == "__main__":
    lines = Path(sys.argv[3]).read_text().splitlines() if len(sys.argv) > 3 else TEXTS
    asyncio.run(main(sys.argv[1:3], [line for line in lines if line]))
