"""`POST /v1/chat/completions` (contract, section 3)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from pydantic import TypeAdapter

from ...backends.base import Capabilities, Generation, Model, Text
from ...backends.errors import ContextExceeded, LatimerError, RequestError, Unsupported
from ...schemas.openai.chat import (
    AssistantMessage,
    ChatCompletion,
    ChatRequest,
    RefusalPart,
    TextPart,
)
from ..choice import detailed_usage_of
from ..content import Rendered, prompt_of
from ..errors import chat_context_error
from ..exchange import Exchange, unless_disconnected
from ..formats import grammar_of
from ..frames import ChatFrames
from ..instruct import FORMATS, format_of
from ..logprobs import to_chat
from ..run import Plan, fold, stream
from ..service import Service, in_model_vocabulary, pass_native
from ..templates import Talk, plain, render, variables_of
from ..validation import (
    check_stream_options,
    notes,
    parse,
    refuse_unserved,
    sampling_of,
    seeds_of,
    stops_of,
)

_REQUEST = TypeAdapter(ChatRequest)

_LEAVE_OUT = "Leave it out."


def _never(_value: Any) -> bool:
    return False


def _falsy(value: Any) -> bool:
    return not value


_UNSERVED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "audio": (_never, _LEAVE_OUT),
    "function_call": (lambda value: value == "none", _LEAVE_OUT),
    "functions": (_falsy, _LEAVE_OUT),
    "modalities": (lambda value: "audio" not in value, "Ask for text only."),
    "moderation": (_never, _LEAVE_OUT),
    "store": (_falsy, _LEAVE_OUT),
    "tools": (_falsy, _LEAVE_OUT),
    "web_search_options": (_never, _LEAVE_OUT),
}

# What `service_tier` turns into in a reply (contract 3.9).
_TIERS = {"auto": "default", "fast": "priority"}


async def create_chat_completion(exchange: Exchange, service: Service) -> None:
    """Answer a request for chat completions."""
    request = parse(_REQUEST, await exchange.read_json(service.max_body))
    model = await service.resolve(request.model)
    capabilities = service.backend.capabilities
    include_usage = check_stream_options(request)
    _check_combinations(request)
    refuse_unserved(request, _UNSERVED, capabilities.engine)
    _check_messages(request, capabilities)
    sampling, inexact = await in_model_vocabulary(
        request, sampling_of(request, capabilities), service
    )
    rendered, markers = await _prompt(request, model, service)
    inexact = (*inexact, "messages") if rendered.changed else inexact
    notes(exchange, request, sampling, capabilities, service.strict, inexact)
    count = request.n or 1
    job = Generation(
        rendered.prompt,
        request.max_tokens or request.max_completion_tokens,
        seeds_of(request.seed, count),
        tuple(dict.fromkeys((*stops_of(request.stop), *markers))),
        sampling,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        owner=exchange.owner,
        grammar=grammar_of(request, capabilities),
        hidden=rendered.hidden,
    )
    if request.oai_compat is False:
        _check_native(job, capabilities)
        work = pass_native(exchange, service, job, bool(request.stream))
    else:
        work = _answer(exchange, service, request, model, job, include_usage)
    await unless_disconnected(exchange, work)


async def _prompt(
    request: ChatRequest, model: Model, service: Service
) -> tuple[Rendered, Sequence[str]]:
    """The prompt, and what begins somebody else's turn where only text tells that."""
    form = service.format if request.adapter is None else format_of(request.adapter)
    engine = service.backend.capabilities.engine
    if form is not None and request.chat_template_kwargs:
        hint = "An instruct format has no variables; leave one of them out."
        raise Unsupported("chat_template_kwargs", engine, hint)
    if form is not None:
        model = replace(model, template=None)
    talk: Talk = {
        "messages": plain(model, request.messages),
        "variables": variables_of(request, model, engine),
    }
    if form is None and model.template is None:
        form = FORMATS["alpaca"]

    def show(talk: Talk) -> str:
        return render(model, talk) if form is None else form.render(talk["messages"])

    markers = () if form is None else form.stops(talk["messages"])
    if service.parse_content:
        return Rendered(Text(show(talk))), markers
    return await prompt_of(model, talk, service.backend, show), markers


async def _answer(
    exchange: Exchange,
    service: Service,
    request: ChatRequest,
    model: Model,
    job: Generation,
    include_usage: bool,
) -> None:
    count = len(job.seeds)
    head: dict[str, Any] = {
        "id": f"chatcmpl-{random.getrandbits(96):024x}",
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": request.model,
    }
    if request.service_tier is not None:
        head["service_tier"] = _TIERS.get(request.service_tier, request.service_tier)
    head["system_fingerprint"] = model.fingerprint
    show = to_chat if job.logprobs is not None else None
    plan = Plan(
        [job],
        count,
        detailed_usage_of,
        logprobs=show,
        strict=service.strict,
        translate=_translate,
    )
    if request.stream:
        frames = ChatFrames(head, include_usage, to_chat(()) if show is not None else None)
        await stream(exchange, service.backend, plan._replace(frames=frames))
        return
    results, usage = await fold(exchange, service.backend, plan)
    reply: ChatCompletion = {
        **head,  # type: ignore[typeddict-item]
        "choices": [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": result.text,
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": result.logprobs,
                "finish_reason": result.finish_reason,
            }
            for index, result in enumerate(results)
        ],
        "usage": usage,
    }
    await exchange.reply(200, orjson.dumps(reply))


def _translate(error: LatimerError) -> LatimerError:
    if isinstance(error, ContextExceeded):
        return chat_context_error(error)
    if isinstance(error, RequestError) and error.param == "prompt":
        return RequestError(error.message, "messages", error.code, error.status)
    return error


def _check_combinations(request: ChatRequest) -> None:
    """Fields that need, or exclude, another one (contract 3.1)."""
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            "top_logprobs",
        )
    if request.metadata is not None and not request.store:
        raise RequestError(
            "The 'metadata' parameter is only allowed when 'store' is enabled.", "metadata"
        )
    for name, needs in (
        ("tool_choice", "tools"),
        ("parallel_tool_calls", "tools"),
        ("function_call", "functions"),
    ):
        if getattr(request, name) is not None and not getattr(request, needs):
            raise RequestError(
                f"Invalid value for '{name}': '{name}' is only allowed when '{needs}' are "
                "specified.",
                name,
            )
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError(
            f"Invalid 'max_tokens': {both[0]} differs from 'max_completion_tokens', {both[1]}. "
            "Send 'max_completion_tokens' only; 'max_tokens' is its older name.",
            "max_tokens",
            "invalid_value",
        )
    if request.audio is None and "audio" in (request.modalities or ()):
        raise RequestError(
            "Missing required parameter: 'audio'.", "audio", "missing_required_parameter"
        )


def _check_messages(request: ChatRequest, capabilities: Capabilities) -> None:
    """Refuse what a template cannot show, before it is silently left out."""
    for index, message in enumerate(request.messages):
        here = f"messages[{index}]"
        if message.role in ("tool", "function"):
            raise Unsupported(f"{here}.role", capabilities.engine, "Send what it said as text.")
        if isinstance(message, AssistantMessage):
            for name in ("tool_calls", "function_call", "audio"):
                if getattr(message, name) is not None:
                    raise Unsupported(f"{here}.{name}", capabilities.engine, _LEAVE_OUT)
            if message.content is None and message.refusal is None:
                raise RequestError(
                    f"Missing required parameter: '{here}.content'.",
                    f"{here}.content",
                    "missing_required_parameter",
                )
        if isinstance(message.content, list):
            for number, part in enumerate(message.content):
                if not isinstance(part, TextPart | RefusalPart):
                    path = f"{here}.content[{number}].type"
                    raise Unsupported(path, capabilities.engine, "Send text parts only.")


def _check_native(job: Generation, capabilities: Capabilities) -> None:
    if not capabilities.native:
        hint = capabilities.refused["oai_compat"]
    elif len(job.seeds) > 1:
        hint = "One native call gives one choice."
    else:
        return
    raise Unsupported("oai_compat", capabilities.engine, hint)
