"""The number of tokens in a prompt, as the usage of its answer has it."""

from __future__ import annotations

from dataclasses import replace

from ...backends.base import Finish, Generation, Text
from ...backends.errors import EngineError
from ..service import Served


async def prompt_tokens(served: Served, job: Generation) -> int:
    """Return the number of tokens in the prompt of a job, without an added BOS.

    Images and audio have as many tokens as the engine makes of them. It evaluates such a prompt,
    and generates one token.
    """
    prompt = job.prompt
    if prompt.media:
        return await _evaluated(served, job)
    content = prompt.content
    if not isinstance(content, Text):
        return len(content) - prompt.bos_count
    ids = await served.backend.tokenize(
        content.text, add_special=False, parse_special=content.parse_special
    )
    return len(ids)


async def _evaluated(served: Served, job: Generation) -> int:
    async with served.backend.open(replace(job, max_tokens=1)) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Finish):
                    return event.prompt_tokens
    raise EngineError("The engine ended its response without its usage.")
