"""`POST /v1/responses` (contract of responses)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Capabilities, Finish, Generation, Sampling, Text
from ...backends.errors import ContextExceeded, LatimerError
from ...schemas.openai.common import Usage
from ...schemas.openai.responses import InputTokensRequest, ResponseRequest
from ..admission import admitted
from ..chat.prepare import ChatJob, ChatTurn, prepare, prepare_plain
from ..chat.profile import known_profile
from ..chat.templates import AS_USUAL, Reasoning
from ..chat.tools import ToolSet
from ..errors import RESPONSE_NAMES, InvalidRequest, in_responses
from ..generation.frames import in_stream
from ..generation.logprobs import to_response
from ..generation.run import Plan
from ..generation.sinks import Answer, detailed_usage_of, respond
from ..generation.token_ids import in_model_vocabulary
from ..hosted import RESPONSE_LIMITS
from ..model_entry import ServedModel
from ..request import FRAME, Exchange
from ..responses.files import UnreadPdfs, read_pdfs
from ..responses.input import Conversation, conversation_of, placed, plain_messages
from ..responses.items import new_response_id
from ..responses.lanes import Create
from ..responses.output import ReasoningDisplay, Shape
from ..responses.response import (
    Draft,
    FrameEncoder,
    ResponseEncoder,
    SocketEncoder,
    WarmUpEncoder,
    begun,
    fault,
)
from ..responses.tools import NO_TOOLS, Tools, tools_of
from ..responses.truncation import droppable, fewest
from ..service import Service
from ..validation import (
    APPROXIMATED,
    check_stream_options,
    grammar_of,
    has_notes,
    notes,
    read,
    refuse_unserved,
    sampling_of,
    stops_of,
)
from .background import Work, begin
from .common import chosen_format, name_of, opening_of, prompt_tokens, ticket_of_tier
from .response_state import (
    NO_STATE,
    State,
    check_store,
    keep_turn,
    state_of,
    store_response,
    stored_request,
)

_REQUEST = TypeAdapter(ResponseRequest)
_INPUT_TOKENS = TypeAdapter(InputTokensRequest)

# The fields of a warm-up that a later request can have in common with it.
_EVALUATED = ("input", "instructions", "previous_response_id", "tools")

_Understood: TypeAlias = tuple[Sampling, Tools, Conversation]
_Prepared: TypeAlias = tuple[_Understood, ChatJob, Sequence[str]]

# The part of the context that a truncated conversation leaves for an answer without a limit.
_ROOM = 8
_UNSERVED: Mapping[str, tuple[Callable[[Any], bool] | None, str]] = {
    "moderation": (None, "Omit it."),
    "oai_compat": (bool, "An engine has no native response of this kind. Omit it."),
    "prompt": (None, "Send its text in 'instructions' and 'input'."),
}  # fmt: skip

# Fields of OpenAI's own service, without an effect on the answer.
_HARMLESS = frozenset(
    {"access_programs", "background_options", "client_metadata", "context_management", "image"}
)
# The fields that name the conversation before a request; those about its reasoning, about the end
# of its prompt and about log-probabilities; and what a text alone has of fields with fields.
_BEFORE = frozenset({"previous_response_id", "conversation"})
_REASONING = frozenset({"reasoning", "enable_thinking"})
_OPENING = frozenset({"add_generation_prompt", "continue_final_message"})
_LOGPROBS = frozenset({"include", "top_logprobs"})
_ONLY_INPUT = frozenset({"input"})
# The fields of a text that need no more than its sampling, and their repetition in the response.
_OF_TEXT = frozenset(
    {
        "input", "instructions", "max_output_tokens", "metadata", "model", "prompt_cache_key",
        "safety_identifier", "store", "stream", "temperature", "top_p", "user",
    }
)  # fmt: skip
_SHOWN, _HIDDEN = Shape(), Shape(reasoning="hidden")
# Paths of fields that only some values make inert, with those values.
_INERT: Mapping[tuple[str, str], frozenset[Any]] = {
    ("prompt_cache_options", "comparison_response_id"): frozenset(),
    ("prompt_cache_options", "prewarm"): frozenset({False}),
    ("reasoning", "context"): frozenset({"auto"}),
    ("reasoning", "mode"): frozenset({"standard"}),
    ("text", "verbosity"): frozenset({"medium"}),
}


class _Drafted(NamedTuple):
    """A request that can be answered, and what its response needs.

    Args:
        names: see `Conversation`.
    """

    served: ServedModel
    chat: ChatJob
    shape: Shape
    stored: bool
    tools: Tools = NO_TOOLS
    names: Mapping[str, str] = MappingProxyType({})
    state: State = NO_STATE


async def create_response(exchange: Exchange, service: Service) -> None:
    """Create a response."""
    request = await read(exchange, _REQUEST, RESPONSE_LIMITS if service.hosted else ())
    frame: Create | None = exchange.scope.get(FRAME)
    if frame is not None:
        # A WebSocket has no comments.
        exchange.keepalive = 0.0
        if not (frame.generates or request.input or request.previous_response_id):
            # Codex warms up before the first message. No template takes a conversation without one.
            request.input = "."
    else:
        exchange.fault = fault
    draft = await _drafted(exchange, service, request, generates=True)
    if len(exchange.recent) > 1:
        await offload.give_way()
    if frame is None:
        await _answer(exchange, service, request, draft)
    else:
        await _answer_frame(exchange, service, request, draft, frame)


async def count_input_tokens(exchange: Exchange, service: Service) -> None:
    """Return the number of input tokens that a response to a request would have."""
    request = await read(exchange, _INPUT_TOKENS, RESPONSE_LIMITS if service.hosted else ())
    draft = await _drafted(exchange, service, request, generates=False)
    count = await prompt_tokens(draft.served, draft.chat.job)
    reply = {"object": "response.input_tokens", "input_tokens": count}
    await exchange.reply(200, orjson.dumps(reply))


async def _drafted(
    exchange: Exchange, service: Service, request: ResponseRequest, generates: bool
) -> _Drafted:
    """Return the job of a request, and what its response needs.

    Args:
        generates: False for a request that only counts its tokens.

    Raises:
        LatimerError: the request is invalid, or cannot be served.
    """
    try:
        if exchange.grant is None:
            served = service.latest(request.model, None) or await service.resolve(request.model)
        else:
            most = request.most_tokens if generates else 0
            served = await admitted(exchange, service, request.model, most)
    except LatimerError as error:
        raise in_responses(error) from None
    exchange.model, capabilities = served.label, served.backend.capabilities
    fields = request.__pydantic_fields_set__
    is_text = fields <= _OF_TEXT and type(request.input) is str and bool(request.input)
    if not is_text:
        if request.stream_options is not None:
            check_stream_options(request)
        if not _UNSERVED.keys().isdisjoint(fields):
            refuse_unserved(request, _UNSERVED, capabilities.engine)
    # Responses are stored by default, where anything is, and counts of tokens are not.
    stored = request.store
    if stored is None:
        stored = request.is_stored_by_default and service.store is not None
    if stored:
        await check_store(service.store)
    if is_text and (drafted := await _text_drafted(exchange, request, served, stored)) is not None:
        # Most requests are no more than that: it saves 300 instructions.
        return drafted
    state = NO_STATE
    if type(request.input) is not str or not _BEFORE.isdisjoint(fields):
        state = await state_of(exchange, service, request)
    prepared = _truncated if request.truncation == "auto" else _prepared
    understood, chat, inexact = await prepared(exchange, service, request, served, state)
    sampling, tools, conversation = understood
    display = _reasoning_display(request, served)
    if display == "summarised" and (await known_profile(served.model)).tags is not None:
        inexact = (*inexact, "reasoning.summary")
    strict = served.policy.strict
    found = inexact, chat.inexact, chat.dropped
    if (
        not conversation.is_plain
        or type(request.input) is not str
        or not _HARMLESS.isdisjoint(fields)
        or has_notes(exchange, request, sampling, capabilities, strict, found, _ONLY_INPUT)
    ):
        await notes(
            exchange,
            request,
            sampling,
            capabilities,
            strict,
            map(_renamed, (*inexact, *conversation.own(chat.inexact), *conversation.inexact)),
            [*map(_renamed, chat.dropped)],
            [*tools.ignored, *conversation.ignored, *_inert(request)],
            [name for name in _HARMLESS if getattr(request, name) is not None],
        )
    if request.service_tier is not None:
        chat.job.ticket = ticket_of_tier(request.service_tier)
    seal = None
    if "reasoning.encrypted_content" in (request.include or ()):
        await service.seal.load()
        seal = partial(service.seal.seal, owner=exchange.key)
    show = None if chat.job.logprobs is None else to_response
    shape = Shape(tools.names, display, show, seal)
    return _Drafted(served, chat, shape, stored, tools, conversation.names, state)


async def _text_drafted(
    exchange: Exchange, request: ResponseRequest, served: ServedModel, stored: bool
) -> _Drafted | None:
    """Return the same for a text with the fields of `_OF_TEXT`; None if there is more to do.

    More is to do for a large request, and where a field can be inexact or refused.

    Raises:
        LatimerError: the model cannot do what is asked; the error has Responses' field names.
    """
    policy, capabilities = served.policy, served.backend.capabilities
    if (
        exchange.size > offload.SMALL
        or exchange.draft is not None
        or policy.strict
        or policy.chat_format
        or not capabilities.inexact <= APPROXIMATED
    ):
        return None
    turn = ChatTurn(
        plain_messages(request) or (),
        exchange.size,
        exchange.owner,
        request.max_output_tokens,
        (None,),
        (),
        sampling_of(request, capabilities),
        is_plain=True,
    )
    try:
        chat = prepare_plain(turn, served) or await prepare(turn, served)
    except LatimerError as error:
        raise in_responses(error) from None
    if chat.inexact or chat.dropped:
        return None
    shape = _HIDDEN if policy.reasoning is None else _SHOWN
    return _Drafted(served, chat, shape, stored)


async def _prepared(
    exchange: Exchange,
    service: Service,
    request: ResponseRequest,
    served: ServedModel,
    state: State,
    dropped: Container[int] = (),
) -> _Prepared:
    """Return what a request asks for, its job, and the fields that are only approximated.

    Args:
        dropped: see `conversation_of`.

    Raises:
        LatimerError: the request is invalid, or the model cannot do what is asked; the error has
            Responses' field names.
    """
    capabilities = served.backend.capabilities
    if type(request.input) is str and state is NO_STATE and exchange.size <= offload.SMALL:
        # A text has nothing to wait for.
        understood = _read(request, capabilities, state, _no_seal, {}, dropped)
    else:
        understood = await _understood(exchange, service, request, capabilities, state, dropped)
    sampling, tools, conversation = understood
    inexact: Sequence[str] = ()
    if sampling.logit_bias:
        sampling, inexact = await in_model_vocabulary(request, sampling, served)
    try:
        arguments = exchange, request, served, sampling, conversation, tools.tool_set
        if exchange.size <= offload.SMALL:
            turn = turn_of_response(*arguments)
        else:
            turn = await offload.run(exchange.size, turn_of_response, *arguments)
        if state.before or conversation.inexact:
            # The size of the request does not count stored items and the texts of PDF files.
            turn = turn._replace(size=max(turn.size, offload.UNKNOWN))
        chat = prepare_plain(turn, served) or await prepare(turn, served)
    except LatimerError as error:
        raise in_responses(error, conversation.names) from None
    return (sampling, tools, conversation), chat, inexact


async def _truncated(
    exchange: Exchange,
    service: Service,
    request: ResponseRequest,
    served: ServedModel,
    state: State,
) -> _Prepared:
    """Return what `_prepared` does, without as many items as needed for the rest to fit."""
    arguments = exchange, service, request, served, state
    context, most = served.model.context, request.most_tokens
    units: list[list[int]] = []

    async def attempt(count: int) -> _Prepared | None:
        try:
            prepared = await _prepared(*arguments, {at for unit in units[:count] for at in unit})
            # A conversation that is cut must leave room for an answer.
            room = most or (context // _ROOM if count else 1)
            return prepared if await _fits(served, prepared[1].job, context - room) else None
        except ContextExceeded:
            return None
        except InvalidRequest as error:
            if error.code == "context_length_exceeded":
                return None
            raise

    found = await attempt(0)
    if found is None:
        units = await offload.run(max(exchange.size, offload.UNKNOWN), _units, request, state)
        found = await fewest(len(units), attempt)
    # What does not fit without all that may be dropped is the usual error.
    return found or await _prepared(*arguments)


def _units(request: ResponseRequest, state: State) -> list[list[int]]:
    """Return the places of the items that may be dropped; see `droppable`."""
    return droppable([*placed(request, state.before, state.resolve)])


async def _fits(served: ServedModel, job: Generation, most: int) -> bool:
    """Return True if the prompt of a job has at most some tokens."""
    content = job.prompt.content
    if isinstance(content, Text) and not job.prompt.media and len(content.text.encode()) < most:
        # A token has at least one byte; the one more is a BOS.
        return True
    return await prompt_tokens(served, job, most) < most


async def _understood(
    exchange: Exchange,
    service: Service,
    request: ResponseRequest,
    capabilities: Capabilities,
    state: State,
    dropped: Container[int],
) -> _Understood:
    """Return what a request asks for; its PDF files are read first."""
    unseal = partial(service.seal.unseal, owner=exchange.key)
    size = offload.UNKNOWN if state.before else exchange.size
    arguments = request, capabilities, state, unseal
    try:
        if size <= offload.SMALL:
            return _read(*arguments, {}, dropped)
        return await offload.run(size, _read, *arguments, {}, dropped)
    except UnreadPdfs as unread:
        pdfs = unread.pdfs
    texts = await read_pdfs(pdfs, exchange.owner)
    return await offload.run(max(size, offload.UNKNOWN), _read, *arguments, texts, dropped)


def turn_of_response(
    exchange: Exchange,
    request: ResponseRequest,
    served: ServedModel,
    sampling: Sampling,
    conversation: Conversation,
    tool_set: ToolSet | None,
) -> ChatTurn:
    """Return the `ChatTurn` of a Responses request; a large one is for a thread.

    An assistant message at the end is not continued, unless the request asks for that.

    Raises:
        InvalidRequest: the text format or the adapter are invalid.
        Unsupported: the engine does not support a field of the request.
    """
    fields, messages = request.__pydantic_fields_set__, conversation.messages
    opening = None if fields.isdisjoint(_OPENING) else opening_of(request, messages)
    if opening is None and messages[-1].role == "assistant":
        opening = "begin"
    own = chosen_format(request, served) if request.adapter or served.policy.chat_format else None
    return ChatTurn(
        messages,
        exchange.size,
        exchange.owner,
        request.max_output_tokens,
        (request.seed,),
        stops_of(request.stop) if request.stop else (),
        sampling,
        None if fields.isdisjoint(_LOGPROBS) else request.logprobs,
        tool_set,
        grammar_of(request, served.backend.capabilities),
        own,
        request.chat_template_kwargs,
        AS_USUAL
        if fields.isdisjoint(_REASONING)
        else Reasoning(request.effort, request.enable_thinking),
        opening,
        conversation.is_plain,
    )


def _read(
    request: ResponseRequest,
    capabilities: Capabilities,
    state: State,
    unseal: Callable[[str], str | None],
    pdf_texts: Mapping[str, str],
    dropped: Container[int],
) -> _Understood:
    conversation = conversation_of(request, state.before, state.resolve, unseal, pdf_texts, dropped)
    try:
        sampling = sampling_of(request, capabilities)
    except LatimerError as error:
        raise in_responses(error) from None
    return sampling, tools_of(request, state.before, state.resolve), conversation


def _reasoning_display(request: ResponseRequest, served: ServedModel) -> ReasoningDisplay:
    if served.policy.reasoning is None:
        return "hidden"
    reasoning = request.reasoning
    return "shown" if reasoning is None or reasoning.summary is None else "summarised"


def _no_seal(_sealed: str) -> None:
    """Open nothing: a text has no sealed reasoning."""


def _renamed(name: str) -> str:
    return RESPONSE_NAMES.get(name, name)


def _inert(request: ResponseRequest) -> list[str]:
    """Return the paths of fields that have a value without effect here."""
    found = []
    for (outer, inner), neutral in _INERT.items():
        options = getattr(request, outer)
        value = None if options is None else getattr(options, inner)
        if value is not None and value not in neutral:
            found.append(f"{outer}.{inner}")
    return found


def _answer(
    exchange: Exchange, service: Service, request: ResponseRequest, drafted: _Drafted
) -> Awaitable[None]:
    place = new_response_id(service.background.mark)
    work = _work(exchange, service, request, drafted, place)
    if request.background:

        async def again(recorder: Exchange) -> Work:
            """Prepare the response once more; it keeps its id."""
            drafted = await _drafted(recorder, service, request, generates=True)
            return _work(recorder, service, request, drafted, place)

        body = stored_request(exchange.to_store or {}, drafted.state)
        return begin(exchange, service, request, work, body, again)
    keep = None if work.store is None else partial(work.store, exchange)
    if not request.stream:
        answer = Answer(work.draft.whole, work.show, store=keep)
        return respond(exchange, work.served, work.plan, answer, None)
    made = ResponseEncoder(work.draft)
    answer = Answer(made.whole, work.show, keeps=True, store=keep)
    frames = in_stream(request.stream_options, made) if request.stream_options else made
    return respond(exchange, work.served, work.plan, answer, frames)


def _answer_frame(
    exchange: Exchange,
    service: Service,
    request: ResponseRequest,
    drafted: _Drafted,
    frame: Create,
) -> Awaitable[None]:
    """Answer a frame of a WebSocket, which can continue the response then."""
    place = new_response_id(service.background.mark)
    work = _work(exchange, service, request, drafted, place)

    keep = partial(keep_turn, frame, request, drafted.state)
    if work.store is not None:
        keep = partial(_stored_and_kept, partial(work.store, exchange), keep)
    plan, show = work.plan, work.show
    # A middleware of the user reads lines.
    write = None if exchange.write is None else frame.write_frames
    options = request.stream_options
    made: SocketEncoder
    if not frame.generates:
        made, show = WarmUpEncoder(work.draft), None
        # An engine evaluates the whole prompt only to generate a token.
        most = 1 if any(map(frame.body.get, _EVALUATED)) else 0
        job = replace(plan.jobs[0], max_tokens=most, grammar=None, logprobs=None)
        plan = replace(plan, jobs=[job], usage=_warm_up_usage, form=None)
    elif write is None or (options is not None and options.include_obfuscation):
        made = SocketEncoder(work.draft)
    else:
        made, exchange.write = FrameEncoder(work.draft), write
        exchange.pushes, frame.offer = True, partial(setattr, exchange, "push")
    answer = Answer(made.whole, show, keeps=True, store=keep)
    frames = in_stream(options, made) if options else made
    return respond(exchange, work.served, plan, answer, frames)


async def _stored_and_kept(
    store: Callable[[Any], Awaitable[None]], keep: Callable[[Any], Awaitable[None]], reply: Any
) -> None:
    """Store a response, and keep it for the frames that continue it."""
    await store(reply)
    await keep(reply)


def _warm_up_usage(finishes: Sequence[Finish], choices: int) -> Usage:
    """Return the token counts of a prompt that was evaluated only."""
    usage = detailed_usage_of(finishes, choices)
    usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
    return usage


def _work(
    exchange: Exchange,
    service: Service,
    request: ResponseRequest,
    drafted: _Drafted,
    place: tuple[str, int],
) -> Work:
    """Return what is left to do for a request that can be answered.

    Args:
        place: the id of the response, and its time in microseconds since 1970.
    """
    served, job, shape = drafted.served, drafted.chat.job, drafted.shape
    names = drafted.names
    translate = partial(in_responses, names=names) if names else in_responses
    form = drafted.chat.form
    plan = Plan([job], 1, detailed_usage_of, form=form, translate=translate, ticket=job.ticket)
    conversation = request.conversation.id if request.conversation is not None else None
    exchange.cache_key = request.prompt_cache_key or conversation or drafted.state.chain or place[0]
    start = begun(request, place, served.name, drafted.tools, drafted.stored)
    draft = Draft(start, shape, name_of(start["service_tier"]))
    # The items have the log-probabilities, each of its own tokens.
    show = None if shape.show is None else list
    store = None
    if (drafted.stored or conversation is not None) and service.store is not None:
        store = partial(store_response, store=service.store, request=request, state=drafted.state)
    return Work(served, plan, draft, show, store)
