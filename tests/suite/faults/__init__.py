"""Faults of a server, to switch on one at a time."""

from __future__ import annotations

from suite.faults import (
    agents,
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

__all__ = ["FAULTS", "agents", "bodies", "embeddings", "engine", "fields", "logprobs", "responses",
           "stored", "streams", "structured", "tools", "transport"]  # fmt: skip
