"""The checks, one module for each group, in the order in which reports list them."""

from __future__ import annotations

from . import (
    chat,
    chat_logprobs,
    choices,
    completions,
    concurrency,
    echo,
    embeddings,
    engine,
    errors,
    headers,
    logprobs,
    models,
    responses,
    sampling,
    security,
    stops,
    stored,
    streaming,
    structured,
    tools,
    transport,
    types,
)

MODULES = (
    transport, errors, headers, models, completions, choices, sampling, stops, logprobs, echo,
    streaming, chat, chat_logprobs, tools, structured, embeddings, stored, responses,
    concurrency, security, engine, types,
)  # fmt: skip
GROUPS = [module.__name__.rpartition(".")[2] for module in MODULES]
