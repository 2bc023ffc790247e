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
    responses_errors,
    responses_state,
    responses_stream,
    responses_tools,
    stored,
    streams,
    structured,
    tools,
    transport,
)
from suite.faults.base import FAULTS

__all__ = [
    "FAULTS", "agents", "bodies", "embeddings", "engine", "fields", "logprobs", "responses",
    "responses_errors", "responses_state", "responses_stream", "responses_tools", "stored",
    "streams", "structured", "tools", "transport",
]  # fmt: skip
