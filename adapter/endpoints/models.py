"""The models: their list and their objects (contract, section 5), and the tokenizer.

The paths of the tokenizer are those of vLLM, which evaluation harnesses use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Capabilities, EmbeddingModel, GrammarKind, MediaKind
from ...backends.errors import Busy, EngineError, UnknownToken
from ...backends.speech.base import Speaker
from ...schemas.openai.models import (
    Detokenized,
    DetokenizeRequest,
    ModelList,
    ModelObject,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)
from ..audio.voices import voices_of
from ..chat.profile import known_profile
from ..limits.leases import Grant
from ..messages.errors import speaks_anthropic
from ..messages.models import info_of, page_of
from ..model_entry import ServedModel
from ..request import Exchange, parameters
from ..service import Service
from ..validation import read

T = TypeVar("T")

# Seconds that the engines of a fleet may take to say what they do besides text. A llama-server that
# generates for others says after two that it does not know yet what it embeds.
PATIENCE = 3.0
# The words of llama-server, Ollama and LM Studio for the capabilities of a model.
_MEDIA: Mapping[MediaKind, tuple[str, ...]] = {"image": ("vision",), "audio": ("audio",)}
_ANY_MEDIA = ("multimodal",)
_TOOLS = ("tools", "tool_use")
_REASONING = ("thinking", "reasoning")
# Ollama's word, and that of other servers, for what a model makes besides text.
_OUTPUTS: Mapping[str, str] = {"embeddings": "embedding", "rerank": "rerank"}

# The parameters that OpenRouter lists and that every engine supports, by OpenRouter's names.
_PARAMETERS = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed",
    "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs",
    "response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
# The field that some of them need, and the language of grammars that others need.
_NEEDED = {"top_logprobs": "logprobs"}
_GRAMMARS: Mapping[str, GrammarKind] = {
    "response_format": "json_schema", "structured_outputs": "json_schema", "tool_choice": "gbnf",
}  # fmt: skip
# Those that only some engines support, by the names of requests.
_EXTRAS = ("top_k", "min_p")


class Abilities(NamedTuple):
    """The capabilities that a model's chat template indicates."""

    tools: bool
    reasoning: bool


async def list_models(exchange: Exchange, service: Service) -> None:
    """List every model name that requests may use; the speaker and the transcriber come last."""
    models = await service.models(exchange.grant)
    if speaks_anthropic(exchange.scope):
        infos = [await _info(name, served) for name, served in models.items()]
        page = page_of(infos, parameters(exchange.scope["query_string"]))
        await _reply_to_anthropic(exchange, page)
        return
    known = [(name, served) for name, served in models.items() if served is not None]
    # One engine after another would add up what each takes.
    found = await asyncio.gather(*(_described(service, *one) for one in known))
    described = {one["id"]: one for one in found}
    reply: ModelList = {
        "object": "list",
        "data": [described.get(name) or _unknown(name) for name in models],
    }
    reply["data"] += [
        one for name, one in _audio_models(service, exchange.grant).items() if name not in models
    ]
    await exchange.reply(200, orjson.dumps(reply))


async def retrieve_model(exchange: Exchange, service: Service, name: str) -> None:
    """Return one model; slashes in its name may be URL-encoded, once or twice, or doubled."""
    names = await service.models(exchange.grant)
    spellings = (name, unquote(name), name.lstrip("/"))
    name = next((spelling for spelling in spellings if spelling in names), name)
    known = names.get(name)
    if speaks_anthropic(exchange.scope):
        if name not in names:
            known = await service.resolve(name, exchange.grant)
        await _reply_to_anthropic(exchange, await _info(name, known))
        return
    spoken = {} if name in names else _audio_models(service, exchange.grant)
    if name in names and known is None:
        reply = _unknown(name)
    elif name in spoken:
        reply = spoken[name]
    else:
        known = known or await service.resolve(name, exchange.grant)
        reply = await _described(service, name, known)
    await exchange.reply(200, orjson.dumps(reply))


async def _info(name: str, served: ServedModel | None) -> dict[str, Any]:
    """Return Anthropic's object for a model; `served` is None if no engine has described it."""
    if served is None:
        return info_of(name)
    reasons = (await abilities_of(served)).reasoning
    return info_of(name, served.model, reasons, "json_schema" in served.capabilities.grammars)


async def _reply_to_anthropic(exchange: Exchange, reply: Any) -> None:
    own = (b"request-id", exchange.request_id.encode())
    await exchange.reply(200, orjson.dumps(reply), headers=[own])


def _unknown(name: str) -> ModelObject:
    """Return OpenAI's four keys for a model that no engine has described yet."""
    return {"id": name, "object": "model", "created": _STARTED, "owned_by": "latimer"}


def _audio_models(service: Service, grant: Grant | None) -> dict[str, ModelObject]:
    """Return the server's own speaker and transcriber by their names, if a key may use these.

    Neither is loaded or asked for it: voices are listed once they are known.
    """
    found: dict[str, ModelObject] = {}
    if service.speaker is not None:
        facts = service.speaker.known()
        voices = {"voices": voices_of(facts)} if facts.voices else {}
        speech = _audio_model(facts.name, "text", "audio", ["speech"])
        found[facts.name] = cast("ModelObject", {**speech, **voices})
    if service.transcriber is not None:
        transcriber = service.transcriber.known()
        abilities = ["transcription", *(("translation",) if transcriber.translates else ())]
        found.setdefault(
            transcriber.name, _audio_model(transcriber.name, "audio", "text", abilities)
        )
    return {name: one for name, one in found.items() if grant is None or grant.allows(name)}


def _audio_model(name: str, takes: str, makes: str, abilities: list[str]) -> ModelObject:
    return {
        **_unknown(name),
        "architecture": {"input_modalities": [takes], "output_modalities": [makes]},
        "capabilities": abilities,
    }


async def _described(service: Service, name: str, served: ServedModel) -> ModelObject:
    """Return OpenAI's object for a model; in a fleet, without what its engines do not say in time.

    An engine that is lost or hangs takes no other model along.
    """
    # An engine that hangs takes the time of one question, and not of two.
    own, facts = await asyncio.gather(
        _own_speaker(service, served),
        _in_time(served, served.backend.embedding_model(), _NOT_SAID),
    )
    if facts is _NOT_SAID:
        return _unknown(name)
    found = await object_of(name, served, facts, service.speaker is not None or own is not None)
    if own is not None:
        found["voices"] = voices_of(own.known())
    return found


async def _own_speaker(service: Service, served: ServedModel) -> Speaker | None:
    """Return what speaks in the engine, unless the server has a speaker for all models."""
    if service.speaker is not None:
        return None
    return await _in_time(served, served.backend.speaker(), None)


# An engine that may embed and may generate.
_NOT_SAID = EmbeddingModel(None, None, None)


async def _in_time(served: ServedModel, answer: Awaitable[T], otherwise: T) -> T:
    """Return the answer of a fleet's engines, or `otherwise`; wait for that of an only engine."""
    if not served.is_pooled:
        return await answer
    try:
        return await asyncio.wait_for(answer, PATIENCE)
    except (TimeoutError, EngineError, Busy):
        return otherwise


async def object_of(
    name: str, served: ServedModel, facts: EmbeddingModel | None, speaks: bool = False
) -> ModelObject:
    """Return OpenAI's object for a model.

    Args:
        facts: those about its embeddings.
        speaks: True if its answers can be spoken.
    """
    model, abilities = served.model, await abilities_of(served)
    outputs = _outputs(facts)
    if speaks and "text" in outputs:
        outputs = (*outputs, "audio")
    context = model.context
    if facts is not None and facts.context is not None and not facts.generates:
        context = facts.context
    return {
        "id": name,
        "object": "model",
        "created": model.modified,
        "owned_by": "latimer",
        "context_length": context,
        "max_model_len": context,
        "architecture": {
            "input_modalities": ["text", *(kind for kind in _MEDIA if kind in model.media)],
            "output_modalities": list(outputs),
        },
        "capabilities": [
            *(_capabilities(served, abilities) if "text" in outputs else ()),
            *(_OUTPUTS[kind] for kind in outputs if kind in _OUTPUTS),
        ],
        "supported_parameters": [
            *(_parameters(served, abilities) if "text" in outputs else ()),
            *(("dimensions",) if "embeddings" in outputs and served.policy.matryoshka else ()),
        ],
        "meta": {"n_ctx": context, **model.sizes},
    }


def _outputs(facts: EmbeddingModel | None) -> Sequence[str]:
    """Return what the model makes, as OpenRouter names it."""
    if facts is None:
        return ("text",)
    text = ("text",) if facts.generates else ()
    return (*text, "rerank" if facts.pooling == "rank" else "embeddings")


async def abilities_of(served: ServedModel) -> Abilities:
    """Return the capabilities of the template that chat requests use by default."""
    model = served.model
    if served.policy.chat_format is not None:
        model = replace(model, template=None)
    if model.template is None:
        return Abilities(tools=False, reasoning=False)
    profile = await known_profile(model)
    reasoning = profile.style.reasons or profile.tags is not None
    return Abilities(profile.style.native, reasoning)


def _capabilities(served: ServedModel, abilities: Abilities) -> list[str]:
    media = [word for kind in _MEDIA if kind in served.model.media for word in _MEDIA[kind]]
    return [
        "completion",
        *(_ANY_MEDIA if media else ()),
        *media,
        *(_TOOLS if abilities.tools else ()),
        *(_REASONING if abilities.reasoning else ()),
    ]


def _parameters(served: ServedModel, abilities: Abilities) -> list[str]:
    capabilities = served.capabilities
    return [
        *(name for name in _PARAMETERS if _is_served(name, capabilities)),
        *(("reasoning_effort",) if abilities.reasoning else ()),
        *(name for name in _EXTRAS if name in capabilities.extras),
    ]


def _is_served(name: str, capabilities: Capabilities) -> bool:
    refused, grammars = capabilities.refused, capabilities.grammars
    if name in refused or _NEEDED.get(name) in refused:
        return False
    return name not in _GRAMMARS or _GRAMMARS[name] in grammars


# Seconds since 1970.
_STARTED = int(time.time())

_TOKENIZE = TypeAdapter(TokenizeRequest)
_DETOKENIZE = TypeAdapter(DetokenizeRequest)


async def tokenizer_info(exchange: Exchange, service: Service) -> None:
    """Return the model's special tokens, context length and chat template."""
    model = (await service.first(exchange.grant)).model
    info: TokenizerInfo = {
        "tokenizer_class": "LatimerTokenizer",
        "bos_token": model.bos_token or None,
        "eos_token": model.eos_token or None,
        "pad_token": None,
        "add_bos_token": model.adds_bos,
        "model_max_length": model.context,
        "chat_template": model.template,
    }
    await exchange.reply(200, orjson.dumps(info))


async def _named(exchange: Exchange, service: Service, name: str | None) -> ServedModel:
    """Return the model that a request names; the first one if it names none that is served."""
    if name is not None and name in await service.models(exchange.grant):
        return await service.resolve(name, exchange.grant)
    return await service.first(exchange.grant)


async def tokenize(exchange: Exchange, service: Service) -> None:
    """Return the token ids of a text, with special tokens unless the request turns them off."""
    request = await read(exchange, _TOKENIZE)
    served = await _named(exchange, service, request.model)
    ids = await served.backend.tokenize(
        request.prompt,
        add_special=request.add_special_tokens is not False,
        parse_special=True,
    )
    context = served.model.context

    def reply() -> bytes:
        response: Tokenized = {"count": len(ids), "max_model_len": context, "tokens": list(ids)}
        return orjson.dumps(response)

    await exchange.reply(200, await offload.run(8 * len(ids), reply))


async def detokenize(exchange: Exchange, service: Service) -> None:
    """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
    request = await read(exchange, _DETOKENIZE)
    served = await _named(exchange, service, request.model)
    try:
        data = await served.backend.detokenize(tuple(request.tokens))
    except UnknownToken as error:
        raise UnknownToken("tokens", error.size, error.token) from None

    def reply() -> bytes:
        response: Detokenized = {"prompt": data.decode(errors="replace")}
        return orjson.dumps(response)

    await exchange.reply(200, await offload.run(len(data), reply))
