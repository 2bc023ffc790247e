"""The checks, one module for each group, in the order in which reports list them."""

from __future__ import annotations

from . import (
    agents,
    agents_loops,
    agreement,
    audio,
    audio_chat,
    audio_transcription,
    chat,
    chat_logprobs,
    choices,
    completions,
    concurrency,
    constraints,
    custom_tools,
    echo,
    embeddings,
    engine,
    errors,
    headers,
    history,
    hosted,
    keepalive,
    logprobs,
    mcp,
    messages,
    messages_errors,
    messages_input,
    messages_stream,
    messages_tools,
    models,
    responses,
    responses_connection,
    responses_conversations,
    responses_custom,
    responses_errors,
    responses_input,
    responses_reasoning,
    responses_state,
    responses_stream,
    responses_tools,
    sampling,
    security,
    stops,
    stored,
    streaming,
    structured,
    tools,
    transport,
    types,
    websocket,
)

MODULES = (
    transport, errors, headers, models, completions, choices, sampling, stops, logprobs, echo,
    streaming, keepalive, chat, history, chat_logprobs, tools, custom_tools, mcp, structured,
    constraints, embeddings, stored, responses, websocket, messages, audio, agents, concurrency,
    security, engine, types,
)  # fmt: skip
# Checks of limits, in the groups of the fields that they limit.
LIMITS = hosted
# Checks of values that are stated more than once, in the groups of their endpoints.
AGREEMENT = agreement
# The rest of the group responses.
RESPONSES = (
    responses_input, responses_stream, responses_tools, responses_custom, responses_reasoning,
    responses_state, responses_conversations, responses_errors, responses_connection,
)  # fmt: skip
# The rest of the group messages.
MESSAGES = (messages_input, messages_tools, messages_stream, messages_errors)
# The rest of the group agents.
AGENTS = (agents_loops,)
# The rest of the group audio.
AUDIO = (audio_chat, audio_transcription)
GROUPS = [module.__name__.rpartition(".")[2] for module in MODULES]
