"""A call that waits for a place on an engine, and what makes two engines different models."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from ..base import Capabilities, Embedding, Generation, Model, Ranking, Text
from ..queue import Ticket
from .affinity import Blocks, blocks_of
from .config import Affinity
from .replica import Replica

Job: TypeAlias = Generation | Embedding | Ranking


class Place:
    """A call that waits for a place, or has one.

    Attributes:
        party: its request.
        width: the places that it takes: one for each choice.
        tokens: the approximate number of tokens in its prompt.
        blocks: the hashes of its prompt.
        fingerprint: the pool's model for which it was made; empty if any will do.
        failed: the engines that have failed it.
        replica: the engine that it runs on.
        matched: the blocks of its prompt that the engine had.
        until: the time until which it waits for a busy engine that has its prompt, or 0.
    """

    __slots__ = (
        "blocks", "charged", "failed", "fingerprint", "future", "matched", "party", "replica",
        "since", "taken", "tokens", "until", "width",
    )  # fmt: skip

    def __init__(
        self, party: Ticket, width: int, tokens: int, blocks: Blocks, fingerprint: str = ""
    ) -> None:
        self.party = party
        self.width = width
        self.tokens = tokens
        self.blocks = blocks
        self.fingerprint = fingerprint
        self.failed: set[Replica] = set()
        self.replica: Replica | None = None
        self.taken = 0
        self.matched = 0
        self.charged = 0.0
        self.until = 0.0
        self.since = 0.0
        self.future: asyncio.Future[Replica] | None = None


def place_of(job: Job, name: str, affinity: Affinity) -> Place:
    """Return the place that a job for a model needs."""
    party = job.party or Ticket()
    if not isinstance(job, Generation):
        return Place(party, 1, 0, (), job.fingerprint)
    content = job.prompt.content
    tokens = len(content.text) // 4 if isinstance(content, Text) else len(content)
    blocks: Blocks = ()
    if affinity == "prefix":
        blocks = blocks_of(content, (name, job.owner))
    return Place(party, len(job.seeds), tokens, blocks, job.fingerprint)


def difference(model: Model, known: Model, own: Capabilities, others: Capabilities) -> str:
    """Return how an engine's model differs from that of the others; empty if it does not.

    Args:
        own, others: the capabilities of the engine, and those of the others.
    """
    if known == model:
        return ""
    for what, here, there in (
        ("its chat template", model.template, known.template),
        ("its BOS token", (model.bos_token, model.adds_bos), (known.bos_token, known.adds_bos)),
        ("its end token", model.eos_token, known.eos_token),
        ("the media that it accepts", model.media, known.media),
        ("its size", _weights(model), _weights(known)),
        ("what it can do", own, others),
    ):
        if here != there:
            return f"it serves another model ({model.name}): {what} is not that of the others"
    if model.context < known.context:
        return f"its context is {model.context} tokens, less than {known.context}"
    return ""


def _weights(model: Model) -> tuple[int | None, ...]:
    """Return the sizes that distinguish models of one name."""
    return tuple(model.sizes.get(name) for name in ("n_vocab", "n_params", "size"))
