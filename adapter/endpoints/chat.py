"""`POST /v1/chat/completions` (contract, section 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Capabilities, Generation, Sampling
from ...backends.errors import LatimerError, Unsupported
from ...schemas.openai.chat import ChatCompletion, ChatRequest
from ...schemas.openai.common import Usage
from ...schemas.openai.messages import FilePart, are_plain
from ..admission import admitted
from ..chat.message import ChatEncoder, Shape, message_of
from ..chat.prepare import ChatJob, ChatTurn, prepare, prepare_plain
from ..chat.templates import AS_USUAL, Reasoning
from ..chat.tools import chat_tools_of, check_messages
from ..errors import InvalidRequest, in_chat, missing, wrong_value
from ..generation.frames import in_stream
from ..generation.logprobs import to_chat, to_chat_with_ids
from ..generation.run import Plan
from ..generation.sinks import (
    Answer,
    Result,
    detailed_usage_of,
    pass_native,
    predicted_usage_of,
    respond,
)
from ..generation.token_ids import in_model_vocabulary
from ..hosted import CHAT_LIMITS, lacking, no_logprobs
from ..model_entry import ServedModel
from ..request import Exchange
from ..service import Service
from ..store.records import new_id
from ..validation import (
    check_stream_options,
    grammar_of,
    has_notes,
    notes,
    read,
    refuse_unserved,
    sampling_of,
    seeds_of,
    stops_of,
)
from .common import check_store, chosen_format, name_of, opening_of, store_reply, ticket_of_tier

_REQUEST = TypeAdapter(ChatRequest)

_UNSERVED: Mapping[str, tuple[Callable[[Any], bool] | None, str]] = {
    "moderation": (None, "Omit it."),
    "web_search_options": (None, "Omit it."),
}

_CONTENT = attrgetter("content")
# Fields that request a call, and the fields with the tools.
_CALLS = {"tool_choice": "tools", "function_call": "functions"}
_NO_CALL = (None, "none", "auto")
# Fields that are only valid with others.
_COMBINED = frozenset(
    {
        "logprobs_token_ids", "max_completion_tokens", "metadata", "modalities", "stream_options",
        "top_logprobs", *_CALLS,
    }
)  # fmt: skip
# Runs a plan and speaks its answers (`spoken.answer_aloud`): the answer without speech, the keys of
# each chunk, and True if the stream is to end with its usage.
Aloud: TypeAlias = Callable[[Plan, Answer, Mapping[str, Any], bool], Awaitable[None]]
# Fields that change the way to the engine, and its speed.
_FOR_ENGINE = frozenset({"prediction", "prompt_cache_key", "service_tier"})
# No engine has a setting for the length of an answer; and the values that ask for none.
_VERBOSITY, _USUAL, _NOTHING = ("verbosity",), (None, "medium"), ()


async def create_chat_completion(exchange: Exchange, service: Service) -> None:
    """Create a chat completion."""
    request = await read(exchange, _REQUEST, CHAT_LIMITS if service.hosted else ())
    most = request.most_tokens
    if exchange.grant is None:
        served = service.latest(request.model, None) or await service.resolve(request.model)
    else:
        served = await admitted(exchange, service, request.model, most, request.n or 1)
    exchange.model = served.label
    capabilities, strict = served.backend.capabilities, served.policy.strict
    fields, include_usage = request.__pydantic_fields_set__, False
    spoken: Any = None
    output: Any = None
    aloud: Aloud | None = None
    if not _COMBINED.isdisjoint(fields):
        include_usage = check_stream_options(request)
        _check_combinations(request)
        if "audio" in (request.modalities or ()):
            spoken = await _spoken()
            output = await spoken.audio_output_of(request, service, served)
    if exchange.to_store is not None:
        await check_store(request, service.store)
    if not _UNSERVED.keys().isdisjoint(fields):
        refuse_unserved(request, _UNSERVED, capabilities.engine)
    is_small = exchange.size <= offload.SMALL
    # Each token id of a `logit_bias` is parsed here.
    if is_small:
        is_plain, has_audio, sampling = _checked(request, capabilities)
    else:
        is_plain, has_audio, sampling = await offload.run(
            exchange.size, _checked, request, capabilities
        )
    inexact: Sequence[str] = ()
    if has_audio:
        await (await _spoken()).read_transcripts(exchange, service, request.messages)
    if sampling.logit_bias:
        sampling, inexact = await in_model_vocabulary(request, sampling, served)
    try:
        arguments = exchange, request, served, sampling, most, is_plain
        if is_small:
            turn = turn_of(*arguments)
        else:
            turn = await offload.run(exchange.size, turn_of, *arguments)
        files: Sequence[str] = ()
        if not is_plain and list in map(type, map(_CONTENT, turn.messages)):
            turn, files = await _with_files(turn)
        if len(exchange.recent) > 1:
            await offload.give_way()
        chat = prepare_plain(turn, served) or await prepare(turn, served)
    except LatimerError as error:
        raise in_chat(error) from None
    inexact = (*inexact, *chat.inexact, *files)
    if spoken is not None:
        spoken.check_spoken(turn.answer)
        aloud = partial(spoken.answer_aloud, exchange, service, served, request, output, chat.shape)
        inexact += () if output.voice.is_exact else (spoken.VOICE,)
    unserved = _NOTHING if request.verbosity in _USUAL else _VERBOSITY
    found = inexact, chat.dropped, unserved
    if not is_plain or has_notes(exchange, request, sampling, capabilities, strict, found):
        await notes(exchange, request, sampling, capabilities, strict, *found)
    if not _FOR_ENGINE.isdisjoint(fields):
        _pass_on(exchange, request, chat.job)
    if request.oai_compat is False:
        _check_native(chat.job, capabilities)
        await pass_native(exchange, served, chat.job, bool(request.stream))
    else:
        if len(exchange.recent) > 1:
            await offload.give_way()
        await _answer(exchange, service, served, request, chat, include_usage, aloud)


async def _with_files(turn: ChatTurn) -> tuple[ChatTurn, Sequence[str]]:
    """Replace the files in a turn by their texts; return it and the paths of PDF files."""
    contents = [message.content for message in turn.messages if type(message.content) is list]
    if FilePart not in map(type, chain.from_iterable(contents)):
        return turn, ()
    # Chat needs nothing else of Responses, and the event loop cannot wait for the import.
    files = await offload.importing(import_module, "..responses.files", __package__ or "")
    messages, pdfs = await files.files_as_text(turn.messages, turn.size, turn.owner)
    if pdfs:
        # The size of the request does not count their texts.
        turn = turn._replace(size=max(turn.size, offload.UNKNOWN))
    return turn._replace(messages=messages), pdfs


def _pass_on(exchange: Exchange, request: ChatRequest, job: Generation) -> None:
    """Pass on the fields of `_FOR_ENGINE`."""
    if request.service_tier is not None:
        job.ticket = ticket_of_tier(request.service_tier)
    if request.prompt_cache_key is not None:
        exchange.cache_key = request.prompt_cache_key
    if request.prediction is not None:
        job.prediction = request.prediction.text


# The fields about reasoning, and those about the end of the prompt.
_REASONING = frozenset({"reasoning_effort", "enable_thinking"})
_OPENING = frozenset({"add_generation_prompt", "continue_final_message"})
# The fields of which the seeds depend; one choice has a random seed without them.
_SEEDS, _ANY_SEED = frozenset({"n", "seed"}), (None,)


def turn_of(
    exchange: Exchange,
    request: ChatRequest,
    served: ServedModel,
    sampling: Sampling,
    most: int | None,
    is_plain: bool,
) -> ChatTurn:
    """Return the `ChatTurn` of a request; a large one is for a thread.

    Args:
        most: the tokens of an answer at most; None if there is no limit.
        is_plain: see `ChatTurn`.

    Raises:
        InvalidRequest: the tools, the response format or the adapter are invalid.
        Unsupported: the engine does not support a field of the request.
    """
    fields = request.__pydantic_fields_set__
    tool_set = chat_tools_of(request) if request.tools or request.functions else None
    opening = None if fields.isdisjoint(_OPENING) else opening_of(request, request.messages)
    own = chosen_format(request, served) if request.adapter or served.policy.chat_format else None
    return ChatTurn(
        request.messages,
        exchange.size,
        exchange.owner,
        most,
        _ANY_SEED if fields.isdisjoint(_SEEDS) else seeds_of(request.seed, request.n or 1),
        stops_of(request.stop) if request.stop else (),
        sampling,
        (request.top_logprobs or 0) if request.logprobs else None,
        tool_set,
        grammar_of(request, served.backend.capabilities),
        own,
        request.chat_template_kwargs,
        AS_USUAL
        if fields.isdisjoint(_REASONING)
        else Reasoning(request.reasoning_effort, request.enable_thinking),
        opening,
        is_plain,
        request.reply_token_ids or (),
    )


def _answer(
    exchange: Exchange,
    service: Service,
    served: ServedModel,
    request: ChatRequest,
    chat: ChatJob,
    include_usage: bool,
    aloud: Aloud | None,
) -> Awaitable[None]:
    job = chat.job
    usage_of = predicted_usage_of if job.prediction else detailed_usage_of
    plan = Plan([job], len(job.seeds), usage_of, (chat.echo,), chat.form, in_chat, job.ticket)
    id_, created_at = new_id("chatcmpl-")
    head: dict[str, Any] = {
        "id": id_,
        "object": "chat.completion",
        "created": created_at // 1_000_000,
        "model": served.name,
    }
    if request.service_tier is not None:
        head["service_tier"] = name_of(request.service_tier)
    head["system_fingerprint"] = served.model.fingerprint
    show = None
    if job.logprobs is not None:
        show = to_chat_with_ids if request.logprobs_token_ids else to_chat
    frames = None
    chunk = {**head, "object": "chat.completion.chunk"} if request.stream else head
    if request.stream and aloud is None:
        own = ChatEncoder(chunk, include_usage, show, chat.shape)
        frames = in_stream(request.stream_options, own)
    store = None
    if exchange.to_store is not None and service.store is not None:
        head["metadata"] = request.metadata or {}
        store = partial(store_reply, exchange, service.store, request)
    answer = Answer(partial(_whole, head, chat.shape), show, store=store)
    if aloud is not None:
        return aloud(plan, answer, chunk, include_usage)
    return respond(exchange, served, plan, answer, frames)


def _whole(
    head: Mapping[str, Any], shape: Shape, results: Sequence[Result], usage: Usage
) -> ChatCompletion:
    return {
        **head,  # type: ignore[typeddict-item]
        "choices": [
            {
                "index": index,
                "message": message_of(result.deltas, shape),
                "logprobs": result.logprobs,
                "finish_reason": result.finish_reason,
            }
            for index, result in enumerate(results)
        ],
        "usage": usage,
    }


def _check_combinations(request: ChatRequest) -> None:
    """Reject fields that need another field, or contradict one (contract 3.1)."""
    if request.top_logprobs and not request.logprobs:
        raise no_logprobs()
    if request.logprobs_token_ids and not request.logprobs:
        raise wrong_value("logprobs_token_ids", "it needs 'logprobs': true.")
    for name in sorted(request.__pydantic_fields_set__ & _CALLS.keys()):
        if getattr(request, name) not in _NO_CALL and not getattr(request, _CALLS[name]):
            raise lacking(name, _CALLS[name])
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise wrong_value(
            "max_tokens",
            f"{both[0]} differs from 'max_completion_tokens', {both[1]}. Send only "
            "'max_completion_tokens'; 'max_tokens' is its deprecated name.",
        )
    if request.metadata and not request.store:
        raise InvalidRequest(
            "The 'metadata' parameter is only allowed when 'store' is enabled.", "metadata"
        )
    if request.audio is None and "audio" in (request.modalities or ()):
        raise missing("audio")


def _checked(request: ChatRequest, capabilities: Capabilities) -> tuple[bool, bool, Sampling]:
    """Check the messages and the sampling.

    Returns:
        True if the messages are plain, True if one has audio of an earlier answer, the sampling.
    """
    is_plain = are_plain(request.messages)
    has_audio = not is_plain and check_messages(request.messages)
    return is_plain, has_audio, sampling_of(request, capabilities)


async def _spoken() -> Any:
    """Return the module for spoken answers; the event loop cannot wait for the import."""
    return await offload.importing(import_module, ".spoken", __package__)


def _check_native(job: Generation, capabilities: Capabilities) -> None:
    if capabilities.native and len(job.seeds) > 1:
        hint = "A native response has one choice. Omit 'n'."
        raise Unsupported("oai_compat", capabilities.engine, hint)
