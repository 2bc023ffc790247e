"""`POST /v1/completions` (contract, section 2)."""

from __future__ import annotations

import asyncio
import os
import time
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import (
    Backend,
    Capabilities,
    Content,
    Generation,
    Model,
    Prompt,
    Sampling,
    Stops,
    Text,
)
from ...backends.errors import LatimerError, Unsupported, check_length
from ...schemas import limits
from ...schemas.openai.common import Usage
from ...schemas.openai.completions import Completion, CompletionRequest
from ..admission import admitted
from ..errors import InvalidRequest, wrong_value
from ..generation.choice import Echo
from ..generation.frames import CompletionEncoder, in_stream
from ..generation.logprobs import Entry, to_legacy
from ..generation.run import CHOICE, Plan, naming
from ..generation.sinks import Answer, Result, pass_native, respond, usage_of
from ..generation.token_ids import in_model_vocabulary, loaded, to_text
from ..hosted import COMPLETION_LIMITS
from ..model_entry import ServedModel
from ..request import Exchange
from ..service import Service
from ..validation import (
    OF_GRAMMARS,
    check_stream_options,
    grammar_of,
    has_notes,
    notes,
    read,
    sampling_of,
    seeds_of,
    stops_of,
)

if TYPE_CHECKING:
    from ..generation.token_ids import Encoding

# Prompts to handle before the event loop runs other tasks.
AT_ONCE = 32
MOST_CHOICES = limits.CHOICES.maximum

_REQUEST = TypeAdapter(CompletionRequest)
# Fields that are only valid with others, and those of which the number of choices depends.
_COMBINED = frozenset({"best_of", "logprobs", "logprobs_token_ids", "stream_options"})
# The seeds of one choice with a random one.
_ANY_SEED = (None,)
# What `has_notes` expects of the nested fields.
_NO_FIELDS: frozenset[str] = frozenset()


async def create_completion(exchange: Exchange, service: Service) -> None:
    """Create a completion."""
    request = await read(exchange, _REQUEST, COMPLETION_LIMITS if service.hosted else ())
    if exchange.grant is None:
        served = service.latest(request.model, None) or await service.resolve(request.model)
        exchange.model = served.label
    else:
        most, each, count = request.max_tokens, request.n or 1, 1
        if request.best_of is not None:
            each = max(each, request.best_of)
        if type(request.prompt) is list:
            count = _prompt_count(request.prompt)
        served = await admitted(exchange, service, request.model, most, each, count)
    model, policy, capabilities = served.model, served.policy, served.backend.capabilities
    fields, include_usage, candidates = request.__pydantic_fields_set__, False, request.n or 1
    show: Callable[[Sequence[Entry]], Any] | None = None
    best: int | None = None
    if not _COMBINED.isdisjoint(fields):
        show = _shape(request)
        include_usage = check_stream_options(request)
        candidates, best = _count(request)
    # Each token id of a `logit_bias` is parsed here. Most requests save the coroutine of a thread.
    is_small = exchange.size <= offload.SMALL
    if is_small:
        sampling = sampling_of(request, capabilities)
    else:
        sampling = await offload.run(exchange.size, sampling_of, request, capabilities)
    inexact: Sequence[str] = ()
    if sampling.logit_bias:
        sampling, inexact = await in_model_vocabulary(request, sampling, served)
    vocabulary = request.logit_bias_vocabulary or policy.vocabulary
    encoding: Encoding | None = None
    if vocabulary and _has_ids(request.prompt):
        encoding = await loaded(vocabulary)
    if is_small:
        prompts = _prompts(request, served, encoding)
    else:
        prompts = await offload.run(exchange.size, _prompts, request, served, encoding)
    if len(prompts) * candidates > MOST_CHOICES:
        param = "n" if best is None else "best_of"
        raise wrong_value(
            param,
            f"{len(prompts)} prompts with {candidates} choices each are "
            f"{len(prompts) * candidates} choices; at most {MOST_CHOICES} are allowed. Send fewer "
            "prompts.",
        )
    strict = policy.strict
    if has_notes(exchange, request, sampling, capabilities, strict, (inexact,), _NO_FIELDS):
        await notes(exchange, request, sampling, capabilities, strict, inexact)
    grammar = None
    if not OF_GRAMMARS.isdisjoint(fields):
        grammar = await offload.run(exchange.size, grammar_of, request, capabilities)
    job = _job(request, prompts[0], sampling, candidates, best)
    job.owner, job.grammar, job.fingerprint = exchange.owner, grammar, model.fingerprint
    jobs = [job]
    if len(prompts) > 1:
        jobs = await offload.run(CHOICE * len(prompts), _each, job, prompts)
    if request.oai_compat is False:
        _check_native(request, jobs, capabilities)
        await pass_native(exchange, served, jobs[0], bool(request.stream))
        return
    echoes: Sequence[Echo] = ()
    if request.echo or request.logprobs is not None:
        echoes = await _echoes(request, jobs, served.backend)
    plan = Plan(jobs, candidates, usage_of, echoes)
    if job.logprobs is not None:
        plan.translate = partial(_translate, request)
    head = {
        "id": f"cmpl-{os.urandom(12).hex()}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": model.fingerprint,
    }
    frames = None
    if request.stream:
        frames = in_stream(request.stream_options, CompletionEncoder(head, include_usage, show))
    answer = Answer(partial(_whole, head), show, best)
    await respond(exchange, served, plan, answer, frames)


def _whole(head: Mapping[str, Any], results: Sequence[Result], usage: Usage) -> Completion:
    return {
        **head,  # type: ignore[typeddict-item]
        "choices": [
            {
                "text": result.text,
                "index": index,
                "logprobs": result.logprobs,
                "finish_reason": result.finish_reason,
            }
            for index, result in enumerate(results)
        ],
        "usage": usage,
    }


def _shape(request: CompletionRequest) -> Callable[[Sequence[Entry]], Any] | None:
    """Return the function that formats tokens, or None if the request does not ask for them.

    `logprobs: 0` shows tokens without alternatives.

    Raises:
        InvalidRequest: `logprobs_token_ids` is sent without `logprobs`.
    """
    if request.logprobs is None:
        if request.logprobs_token_ids:
            raise wrong_value(
                "logprobs_token_ids", "it needs 'logprobs'. Send 'logprobs': 0 for no alternatives."
            )
        return None
    return partial(to_legacy, top=request.logprobs, ids=bool(request.logprobs_token_ids))


def _translate(request: CompletionRequest, error: LatimerError) -> LatimerError:
    """Return an error that names the request's own field.

    An error about `logprobs` names `best_of` if only the ranking of candidates needs them.
    """
    if isinstance(error, Unsupported) and error.param in ("logprobs", "top_logprobs"):
        own = "best_of" if request.logprobs is None else "logprobs"
        return Unsupported(own, error.engine, error.hint)
    return error


def _count(request: CompletionRequest) -> tuple[int, int | None]:
    """Return the number of choices per prompt, and the number to keep (None keeps all).

    Contract 2.1 and 2.8: `best_of` must not be smaller than `n`, nor larger in a stream. If it is
    equal, all candidates are kept in their order, as in a stream, and no engine has to score them.
    """
    count = request.n or 1
    best_of = request.best_of
    if best_of is None or best_of == count:
        return count, None
    if best_of < count:
        raise InvalidRequest(
            "You requested that the server return more choices than it will generate (HINT: you "
            f"must set 'n' (currently {count}) to be at most 'best_of' (currently {best_of}), or "
            "omit either parameter if you don't specifically want to use them.)",
            "best_of",
        )
    if request.stream:
        raise InvalidRequest(
            f"Results cannot be streamed when 'best_of' ({best_of}) is greater than 'n' ({count}).",
            "best_of",
        )
    return best_of, count


def _prompt_count(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def _has_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and any(not isinstance(item, str) for item in prompt)


def _prompts(
    request: CompletionRequest, served: ServedModel, encoding: Encoding | None
) -> list[Content]:
    """Return the prompts; `parse_special: false` makes control tokens in them plain text.

    Args:
        encoding: the vocabulary of token ids; None for the model's own.
    """
    model, prompt = served.model, request.prompt
    if prompt is None or isinstance(prompt, str):
        # Without a prompt the model begins a new document.
        return [_text(request, model, prompt or "")]
    if isinstance(prompt[0], int):
        return [_ids(prompt, encoding, model)]
    found: list[Content] = []
    for index, one in enumerate(prompt):
        with naming(index, len(prompt)):
            if isinstance(one, str):
                found.append(_text(request, model, one))
            else:
                found.append(_ids(one, encoding, model))
    return found


def _text(request: CompletionRequest, model: Model, prompt: str) -> Text:
    size = len(prompt) + (0 if request.suffix is None else len(request.suffix))
    check_length(size, limits.TOKEN_SIZE.maximum, model.context, request.max_tokens)
    if request.parse_special is False:
        return Text(prompt, False)
    return _without_bos(prompt, model) if model.adds_bos else Text(prompt)


def _without_bos(prompt: str, model: Model) -> Text:
    """Return a prompt without the BOS at its start, which the engine adds, but which counts."""
    if model.bos_token and prompt.startswith(model.bos_token):
        return Text(prompt[len(model.bos_token) :], bos=model.bos_token)
    return Text(prompt)


def _ids(prompt: Sequence[Any], encoding: Encoding | None, model: Model) -> Content:
    if encoding is None:
        return tuple(prompt)
    text = to_text(encoding, prompt)
    return _without_bos(text.text, model) if model.adds_bos else text


def _each(job: Generation, contents: Sequence[Content]) -> list[Generation]:
    return [replace(job, prompt=replace(job.prompt, content=one)) for one in contents]


def _job(
    request: CompletionRequest,
    content: Content,
    sampling: Sampling,
    candidates: int,
    best: int | None,
) -> Generation:
    suffix = request.suffix or None
    if suffix is not None and request.echo and request.logprobs is not None:
        raise wrong_value(
            "suffix", "not supported together with 'echo' and 'logprobs'. Omit one of them."
        )
    return Generation(
        Prompt(content, suffix, logprobs=request.logprobs if request.echo else None),
        request.max_tokens,
        _ANY_SEED
        if request.seed is None and candidates == 1
        else seeds_of(request.seed, candidates),
        Stops(stops_of(request.stop) if request.stop else ()),
        sampling,
        # Ranking needs the log-probability of each token.
        logprobs=0 if request.logprobs is None and best is not None else request.logprobs,
    )


async def _echoes(
    request: CompletionRequest, jobs: Sequence[Generation], backend: Backend
) -> Sequence[Echo]:
    """Return the echo of each job, for a response that needs prompts or offsets."""
    echoes = []
    for index, job in enumerate(jobs):
        with naming(index, len(jobs)):
            echoes.append(await _echo(request, job, backend))
        if index % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
    return echoes


async def _echo(request: CompletionRequest, job: Generation, backend: Backend) -> Echo:
    """Return the prompt that a job's choices echo, or else its length (contract 2.4, 2.6.6)."""
    if job.prompt.logprobs is not None:
        return Echo(keep_end=True)
    prompt = job.prompt.content
    data = prompt.spelled.encode() if isinstance(prompt, Text) else await backend.detokenize(prompt)
    if request.echo:
        echo = Echo(data)
        job.prompt.is_cut = echo.is_cut
        return echo
    text, size = utf_8_decode(data, "replace", False)
    return Echo(base=len(text), incomplete=data[size:])


def _check_native(
    request: CompletionRequest, jobs: list[Generation], capabilities: Capabilities
) -> None:
    if not capabilities.native:
        # `Backend.native` refuses the request.
        return
    if len(jobs) > 1 or len(jobs[0].seeds) > 1:
        hint = "A native response has one choice of one prompt. Send one prompt, and omit 'n'."
    elif request.echo or jobs[0].max_tokens == 0 or jobs[0].prompt.suffix is not None:
        hint = "A native response supports neither 'echo' nor 'suffix' nor 'max_tokens': 0."
    else:
        return
    raise Unsupported("oai_compat", capabilities.engine, hint)
