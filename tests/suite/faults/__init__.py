"""What can be wrong with a server, one thing at a time, and the checks that must notice it."""

from __future__ import annotations

from suite.faults import (
    bodies,
    embeddings,
    engine,
    fields,
    logprobs,
    responses,
    stored,
    streams,
    structured,
    tools,
    transport,
)
from suite.faults.base import FAULTS

__all__ = ["FAULTS", "bodies", "embeddings", "engine", "fields", "logprobs", "responses",
           "stored", "streams", "structured", "tools", "transport"]  # fmt: skip
