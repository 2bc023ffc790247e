"""`POST /v1/messages`, and the number of tokens of such a request (contract of messages)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Sampling, Text
from ...backends.errors import ContextExceeded, LatimerError
from ...schemas.anthropic.blocks import ThinkingBlock
from ...schemas.anthropic.messages import CountTokensRequest, InputMessage, MessagesRequest
from ...schemas.openai.messages import Message
from ..admission import admitted
from ..chat.prepare import ChatJob, ChatTurn, prepare, prepare_plain
from ..chat.tools import ToolSet
from ..generation.run import Plan
from ..generation.sinks import Answer, detailed_usage_of, respond
from ..generation.token_ids import in_model_vocabulary
from ..messages.errors import NAMES, dotted, error_event, in_messages
from ..messages.input import Conversation, conversation_of, plain_conversation
from ..messages.message import Draft, MessageEncoder
from ..messages.output import Shape
from ..messages.request import read
from ..messages.thinking import ReasoningDisplay, Thinking, thinking_of
from ..messages.tools import Tools, tools_of
from ..model_entry import ServedModel
from ..request import Exchange
from ..responses.files import UnreadPdfs, read_pdfs
from ..service import Service
from ..store.records import new_id
from ..validation import grammar_of, has_notes, notes, sampling_of
from .common import chosen_format, prompt_tokens

_REQUEST = TypeAdapter(MessagesRequest)
_COUNT = TypeAdapter(CountTokensRequest)
_NO_TOOLS, _NOTHING = Tools(), Conversation([])
_EXACT: Sequence[str] = ()
# The one edit of the context that has no effect: nothing is removed.
_KEEPS = "clear_thinking_20251015"
# The characters for each token of the context beyond which a prompt hardly fits.
_LONG = 8


class _Drafted(NamedTuple):
    """A request that can be answered, and what its response needs.

    Args:
        names: the path in the request for each path in chat's messages that differs.
    """

    served: ServedModel
    chat: ChatJob
    thinking: Thinking
    names: Mapping[str, str]


async def create_message(exchange: Exchange, service: Service) -> None:
    """Create a message."""
    _begin(exchange)
    request = await read(exchange, _REQUEST)
    drafted = await _drafted(exchange, service, request, request.max_tokens)
    content, context = drafted.chat.job.prompt.content, drafted.served.model.context
    if isinstance(content, Text) and len(content.text) > _LONG * context:
        await _check_context(drafted)
    if len(exchange.recent) > 1:
        await offload.give_way()
    await _answer(exchange, service, request, drafted)


async def _check_context(drafted: _Drafted) -> None:
    """Reject a prompt that exceeds the context, with its number of tokens.

    Engines reject a very long text without counting, but clients compact by the number (contract of
    messages, 2.3).

    Raises:
        ContextExceeded: it does.
    """
    context = drafted.served.model.context
    try:
        count = await prompt_tokens(drafted.served, drafted.chat.job, context)
    except LatimerError:
        # A word of millions of letters takes a tokenizer too long. The engine rejects it itself.
        return
    if count > context:
        raise in_messages(ContextExceeded(context, count), drafted.names)


async def count_message_tokens(exchange: Exchange, service: Service) -> None:
    """Return the number of input tokens that a message for a request would have."""
    _begin(exchange)
    request = await read(exchange, _COUNT)
    drafted = await _drafted(exchange, service, request, 0)
    try:
        count = await prompt_tokens(drafted.served, drafted.chat.job)
    except LatimerError as error:
        raise in_messages(error, drafted.names) from None
    await exchange.reply(200, orjson.dumps({"input_tokens": count}))


def _begin(exchange: Exchange) -> None:
    request_id = exchange.request_id
    exchange.response_headers.append((b"request-id", request_id.encode()))
    exchange.fault = partial(error_event, request_id=request_id)


async def _drafted(
    exchange: Exchange, service: Service, request: CountTokensRequest, most: int
) -> _Drafted:
    """Return the job of a request, and what its response needs.

    Args:
        most: the tokens of the answer at most.

    Raises:
        LatimerError: the request is invalid, or cannot be served.
    """
    if exchange.grant is None:
        served = service.latest(request.model, None) or await service.resolve(request.model)
    else:
        served = await admitted(exchange, service, request.model, most)
    exchange.model, capabilities = served.label, served.backend.capabilities
    conversation = _NOTHING
    try:
        thinking = thinking_of(request, served.model)
        plain = plain_conversation(request) if exchange.size <= offload.SMALL else None
        if plain is None:
            conversation = await _understood(exchange, service, request, served)
        tools = _NO_TOOLS
        if request.tools or request.tool_choice is not None:
            tools = await offload.run(exchange.size, tools_of, request)
        sampling, inexact = sampling_of(request, capabilities), _EXACT
        if sampling.logit_bias:
            sampling, inexact = await in_model_vocabulary(request, sampling, served)
        messages = conversation.messages if plain is None else plain
        arguments = exchange, request, served, sampling, messages, tools.tool_set, thinking
        if exchange.size <= offload.SMALL:
            turn = turn_of_message(*arguments, plain is not None)
        else:
            turn = await offload.run(exchange.size, turn_of_message, *arguments)
            if conversation.inexact:
                # The size of the request does not count the texts of PDF files.
                turn = turn._replace(size=max(turn.size, offload.UNKNOWN))
        chat = prepare_plain(turn, served) or await prepare(turn, served)
    except LatimerError as error:
        raise in_messages(error, conversation.names) from None
    strict = served.policy.strict
    found = inexact, chat.inexact, chat.dropped, thinking.ignored
    if (
        plain is None
        or tools is not _NO_TOOLS
        or request.context_management is not None
        or request.container is not None
        or request.mcp_servers is not None
        or has_notes(exchange, request, sampling, capabilities, strict, found)
    ):
        approximated = (*inexact, *chat.inexact, *conversation.inexact, *tools.inexact)
        unserved = [*tools.ignored, *conversation.ignored, *thinking.ignored, *_inert(request)]
        await notes(
            exchange,
            request,
            sampling,
            capabilities,
            strict,
            [NAMES.get(name, name) for name in approximated],
            [NAMES.get(name, name) for name in chat.dropped],
            unserved,
            shown=dotted,
        )
    return _Drafted(served, chat, thinking, conversation.names)


async def _understood(
    exchange: Exchange, service: Service, request: CountTokensRequest, served: ServedModel
) -> Conversation:
    """Return the conversation of a request; its PDF files are read first."""
    if any(map(_has_signature, request.messages)):
        await service.seal.load()
    unseal = partial(service.seal.unseal, owner=exchange.key)
    reads = partial(conversation_of, request, unseal, sees="image" in served.model.media)
    try:
        return await offload.run(exchange.size, reads)
    except UnreadPdfs as unread:
        pdfs = unread.pdfs
    texts = await read_pdfs(pdfs, exchange.owner)
    return await offload.run(max(exchange.size, offload.UNKNOWN), partial(reads, pdf_texts=texts))


def _has_signature(message: InputMessage) -> bool:
    return isinstance(message.content, list) and ThinkingBlock in map(type, message.content)


def turn_of_message(
    exchange: Exchange,
    request: CountTokensRequest,
    served: ServedModel,
    sampling: Sampling,
    messages: Sequence[Message],
    tool_set: ToolSet | None,
    thinking: Thinking,
    is_plain: bool = False,
) -> ChatTurn:
    """Return the `ChatTurn` of a Messages request; a large one is for a thread.

    Raises:
        InvalidRequest: the format of the answer or the adapter are invalid.
        Unsupported: the engine does not support a field of the request.
    """
    own = None
    if request.adapter is not None or served.policy.chat_format:
        own = chosen_format(request, served)
    return ChatTurn(
        messages,
        exchange.size,
        exchange.owner,
        # An answer without tokens only reads the prompt, which takes the engine one token.
        request.max_tokens or 1,
        (request.seed,),
        tuple(dict.fromkeys(request.stop_sequences or ())),
        sampling,
        None,
        tool_set,
        grammar_of(request, served.backend.capabilities),
        own,
        request.chat_template_kwargs,
        thinking.reasoning,
        None,
        is_plain,
        clips=True,
    )


def _inert(request: CountTokensRequest) -> list[str]:
    """Return the fields that have a value without effect here."""
    found = [] if request.container is None else ["container"]
    management = request.context_management
    if management is not None:
        edits = management.get("edits")
        if not (isinstance(edits, list) and all(map(_keeps, edits))):
            found.append("context_management")
    return found


def _keeps(edit: object) -> bool:
    """Return True for the edit of the context that removes nothing."""
    return isinstance(edit, dict) and edit.get("type") == _KEEPS and edit.get("keep") == "all"


async def _answer(
    exchange: Exchange, service: Service, request: MessagesRequest, drafted: _Drafted
) -> None:
    served, chat, thinking = drafted.served, drafted.chat, drafted.thinking
    job, form = chat.job, chat.form
    display: ReasoningDisplay = "omitted" if thinking.omitted else "shown"
    seal = None
    if served.policy.reasoning is None:
        display = "hidden"
    elif form is not None:
        await service.seal.load()
        seal = partial(service.seal.seal, owner=exchange.key)
    stops = request.stop_sequences or ()
    shape = Shape(display, seal, stops, request.max_tokens, form is None)
    draft = Draft(new_id("msg_")[0], served.name, shape, exchange.request_id)
    translate = partial(in_messages, names=drafted.names)
    plan = Plan([job], 1, detailed_usage_of, form=form, translate=translate)
    frames = MessageEncoder(draft) if request.stream else None
    await respond(exchange, served, plan, Answer(draft.whole), frames)
