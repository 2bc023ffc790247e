"""The checks, one module for each group, in the order in which they are told."""

from __future__ import annotations

from . import (
    chat,
    chat_logprobs,
    choices,
    completions,
    concurrency,
    echo,
    errors,
    headers,
    logprobs,
    models,
    sampling,
    security,
    stops,
    streaming,
    transport,
    types,
)

MODULES = (
    transport, errors, headers, models, completions, choices, sampling, stops, logprobs, echo,
    streaming, chat, chat_logprobs, concurrency, security, types,
)  # fmt: skip
GROUPS = [module.__name__.rpartition(".")[2] for module in MODULES]
