"""Turn a chat request, or a Responses request, into a `ChatTurn`."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends import offload
from ...backends.base import Sampling
from ...backends.errors import Unsupported
from ...schemas.openai.chat import ChatRequest, InstructAdapter
from ...schemas.openai.messages import Message
from ...schemas.openai.responses import ResponseRequest
from ..chat.instruct import FORMATS, ROLES, InstructFormat, Opening, Turn
from ..chat.prepare import ChatTurn
from ..chat.templates import AS_USUAL, Reasoning
from ..chat.tools import ToolSet, chat_tools_of
from ..errors import InvalidRequest
from ..exchange import Exchange
from ..generation.constraints import grammar_of
from ..service import Served
from ..validation import seeds_of, stops_of

# The fields about reasoning, and those about the end of the prompt.
_REASONING = frozenset({"reasoning_effort", "enable_thinking"})
_OPENING = frozenset({"add_generation_prompt", "continue_final_message"})


async def turn_of(
    exchange: Exchange, request: ChatRequest, served: Served, sampling: Sampling
) -> ChatTurn:
    """Return the `ChatTurn` of a request.

    Raises:
        InvalidRequest: the tools, the response format or the adapter are invalid.
        Unsupported: the engine does not support a field of the request.
    """
    tool_set = None
    if request.tools or request.functions:
        tool_set = await offload.run(exchange.size, chat_tools_of, request)
    fields = request.__pydantic_fields_set__
    return await _turn(
        exchange,
        request,
        served,
        sampling,
        request.messages,
        tool_set,
        request.n or 1,
        (request.top_logprobs or 0) if request.logprobs else None,
        AS_USUAL if fields.isdisjoint(_REASONING) else _reasoning(request),
        None if fields.isdisjoint(_OPENING) else _opening(request, request.messages),
    )


async def turn_of_response(
    exchange: Exchange,
    request: ResponseRequest,
    served: Served,
    sampling: Sampling,
    messages: Sequence[Message],
    tool_set: ToolSet | None,
) -> ChatTurn:
    """Return the `ChatTurn` of a Responses request.

    An assistant message at the end is not continued, unless the request asks for that.

    Raises:
        InvalidRequest: the text format or the adapter are invalid.
        Unsupported: the engine does not support a field of the request.
    """
    opening = _opening(request, messages)
    if opening is None and messages[-1].role == "assistant":
        opening = "begin"
    return await _turn(
        exchange,
        request,
        served,
        sampling,
        messages,
        tool_set,
        1,
        request.logprobs,
        Reasoning(request.effort, request.enable_thinking),
        opening,
    )


async def _turn(
    exchange: Exchange,
    request: ChatRequest | ResponseRequest,
    served: Served,
    sampling: Sampling,
    messages: Sequence[Message],
    tool_set: ToolSet | None,
    choices: int,
    logprobs: int | None,
    reasoning: Reasoning,
    opening: Opening | None,
) -> ChatTurn:
    capabilities, size = served.capabilities, exchange.size
    own = _format(request, served)
    if own is not None and request.chat_template_kwargs:
        hint = "An instruct format has no template variables. Omit one of them."
        raise Unsupported("chat_template_kwargs", capabilities.engine, hint)
    answer = (
        grammar_of(request, capabilities)
        if size <= offload.SMALL
        else await offload.run(size, grammar_of, request, capabilities)
    )
    return ChatTurn(
        messages,
        size,
        exchange.owner,
        request.most_tokens,
        seeds_of(request.seed, choices),
        stops_of(request.stop),
        sampling,
        logprobs,
        tool_set,
        answer,
        own,
        request.chat_template_kwargs,
        reasoning,
        opening,
    )


def _reasoning(request: ChatRequest) -> Reasoning:
    return Reasoning(request.reasoning_effort, request.enable_thinking)


def _opening(request: ChatRequest | ResponseRequest, messages: Sequence[Message]) -> Opening | None:
    """Return the end of the prompt that a request names, with vLLM's rules; None if it names none.

    Raises:
        InvalidRequest: it both continues a message and begins a turn, or there is no message to
            continue.
    """
    begins, continues = request.add_generation_prompt, request.continue_final_message
    if begins is None and continues is None:
        return None
    if not continues:
        return "end" if begins is False else "begin"
    name = "continue_final_message"
    if begins:
        raise InvalidRequest(
            f"Invalid '{name}': 'add_generation_prompt' must then be false.", name, "invalid_value"
        )
    if messages[-1].role != "assistant":
        raise InvalidRequest(
            f"Invalid '{name}': the last message must then be the assistant's.",
            name,
            "invalid_value",
        )
    return "continue"


def _format(request: ChatRequest | ResponseRequest, served: Served) -> InstructFormat | None:
    """Return the instruct format that replaces the model's chat template, or None."""
    if request.adapter is not None:
        return format_of(request.adapter)
    name = served.policy.chat_format
    return None if name is None else FORMATS[name]


def format_of(adapter: InstructAdapter) -> InstructFormat:
    """Return the instruct format of a request's `adapter`; missing parts are empty.

    Raises:
        InvalidRequest: a role is set twice, or no text separates user and assistant messages.
    """
    turns: dict[str, Turn] = {}
    for role in ROLES:
        nested = getattr(adapter.templates, role) if adapter.templates is not None else None
        flat = (getattr(adapter, f"{role}_start"), getattr(adapter, f"{role}_end"))
        if nested is not None and flat != (None, None):
            raise InvalidRequest(
                f"Invalid 'adapter.{role}_start': 'adapter.templates.{role}' sets it already. "
                "Omit one of them.",
                f"adapter.{role}_start",
                "invalid_value",
            )
        turns[role] = (
            Turn(nested.start or "", nested.end or "")
            if nested is not None
            else Turn(flat[0] or "", flat[1] or "")
        )
    if not (turns["user"].start or turns["user"].end or turns["assistant"].start):
        raise InvalidRequest(
            "Invalid 'adapter': no text separates user and assistant messages. Send at least "
            "'user_start' and 'assistant_start', or 'templates' with both.",
            "adapter",
            "invalid_value",
        )
    begin = turns["assistant"].start if adapter.assistant_gen is None else adapter.assistant_gen
    return InstructFormat(turns["system"], turns["user"], turns["assistant"], begin)
