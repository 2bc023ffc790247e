"""`POST /v1/completions` (contract, section 2)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic import TypeAdapter

from ...backends.base import Capabilities, Generation, Model, Prompt, Sampling, Text
from ...backends.errors import RequestError, Unsupported
from ...schemas.openai.completions import Completion, CompletionRequest
from ..choice import usage_of
from ..exchange import Exchange, unless_disconnected
from ..frames import CompletionFrames
from ..run import Plan, fold, stream
from ..service import Service, pass_native
from ..templates import without_bos
from ..validation import (
    check_stream_options,
    notes,
    parse,
    refuse_unserved,
    sampling_of,
    seeds_of,
    stops_of,
)

DEFAULT_MAX_TOKENS = 16

_REQUEST = TypeAdapter(CompletionRequest)

_UNSERVED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "logprobs": (lambda value: False, "Leave it out."),
    "suffix": (lambda value: value == "", "Leave it out."),
}


async def create_completion(exchange: Exchange, service: Service) -> None:
    """Answer a request for completions."""
    request = parse(_REQUEST, await exchange.read_json(service.max_body))
    model = await service.resolve(request.model)
    capabilities = service.backend.capabilities
    include_usage = check_stream_options(request)
    choices = _count(request)
    refuse_unserved(request, _UNSERVED, capabilities.engine)
    sampling = sampling_of(request, capabilities)
    prompts = _prompts(request, model, capabilities)
    exchange.headers += notes(request, sampling, capabilities, service.strict)
    jobs = [_job(request, prompt, sampling, choices) for prompt in prompts]
    if request.oai_compat is False:
        _check_native(request, jobs, capabilities)
        work = pass_native(exchange, service, jobs[0], bool(request.stream))
        await unless_disconnected(exchange, work)
        return
    await unless_disconnected(
        exchange, _answer(exchange, service, request, model, jobs, choices, include_usage)
    )


async def _answer(
    exchange: Exchange,
    service: Service,
    request: CompletionRequest,
    model: Model,
    jobs: list[Generation],
    choices: int,
    include_usage: bool,
) -> None:
    echoes = await _echoes(request, service, choices)
    head = {
        "id": f"cmpl-{random.getrandbits(96):024x}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": model.fingerprint,
    }
    if request.stream:
        frames = CompletionFrames(head, include_usage, echoes)
        await stream(exchange, service.backend, Plan(jobs, choices, usage_of, frames))
        return
    results, usage = await fold(service.backend, Plan(jobs, choices, usage_of, None))
    reply: Completion = {
        **head,  # type: ignore[typeddict-item]
        "choices": [
            {
                "text": echoes[index] + result.text if echoes else result.text,
                "index": index,
                "logprobs": None,
                "finish_reason": result.finish_reason,
            }
            for index, result in enumerate(results)
        ],
        "usage": usage,
    }
    await exchange.reply(200, orjson.dumps(reply))


def _count(request: CompletionRequest) -> int:
    """How many choices each prompt has; `best_of` must not be smaller (contract 2.1)."""
    count = request.n or 1
    best_of = request.best_of
    if best_of is None or best_of == count:
        return count
    if best_of < count:
        raise RequestError(
            "You requested that the server return more choices than it will generate (HINT: you "
            f"must set 'n' (currently {count}) to be at most 'best_of' (currently {best_of}), or "
            "omit either parameter if you don't specifically want to use them.)",
            "best_of",
        )
    if request.stream:
        raise RequestError(
            f"Results cannot be streamed when 'best_of' ({best_of}) is greater than 'n' ({count}).",
            "best_of",
        )
    raise Unsupported("best_of", "this server", "Set it to 'n', or leave it out.")


def _prompts(request: CompletionRequest, model: Model, capabilities: Capabilities) -> list[Prompt]:
    """Each prompt; `parse_special: false` makes control tokens in them plain text."""
    parse_special = request.parse_special is not False
    if not parse_special and "parse_special" in capabilities.refused:
        raise Unsupported(
            "parse_special", capabilities.engine, capabilities.refused["parse_special"]
        )

    def text(prompt: str) -> Text:
        return Text(without_bos(prompt, model) if parse_special else prompt, parse_special)

    prompt = request.prompt
    if prompt is None or isinstance(prompt, str):
        # Without a prompt a new document begins, as after the end of another.
        return [text(prompt or "")]
    if isinstance(prompt[0], int):
        return [tuple(prompt)]
    return [text(item) if isinstance(item, str) else tuple(item) for item in prompt]


def _job(
    request: CompletionRequest, prompt: Prompt, sampling: Sampling, choices: int
) -> Generation:
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return Generation(
        prompt, max_tokens, seeds_of(request.seed, choices), stops_of(request.stop), sampling
    )


async def _echoes(request: CompletionRequest, service: Service, choices: int) -> list[str]:
    """The text that `echo` puts in front of each choice: the prompt, as the client wrote it."""
    if not request.echo:
        return []
    prompt = request.prompt
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""] * choices
    prompts = [prompt] if isinstance(prompt[0], int) else prompt
    texts = [
        item
        if isinstance(item, str)
        else (await service.backend.detokenize(tuple(item))).decode(errors="replace")
        for item in prompts
    ]
    return [text for text in texts for _ in range(choices)]


def _check_native(
    request: CompletionRequest, jobs: list[Generation], capabilities: Capabilities
) -> None:
    if not capabilities.native:
        hint = capabilities.refused["oai_compat"]
    elif len(jobs) > 1 or len(jobs[0].seeds) > 1:
        hint = "One native call gives one choice of one prompt."
    elif request.echo or jobs[0].max_tokens == 0:
        hint = "No native call does 'echo' or generates nothing."
    else:
        return
    raise Unsupported("oai_compat", capabilities.engine, hint)
