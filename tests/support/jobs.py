"""A function that runs a generation on a backend to its end."""

from __future__ import annotations

from latimer.backends.base import Backend, Finish, Generation, Piece


async def run(backend: Backend, job: Generation) -> tuple[list[bytes], list[Finish]]:
    """Return the text and finish event of each choice."""
    texts = [b""] * len(job.seeds)
    finishes: dict[int, Finish] = {}
    async with backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    texts[event.choice] += event.data
                elif isinstance(event, Finish):
                    finishes[event.choice] = event
    return texts, [finishes[index] for index in range(len(job.seeds))]
