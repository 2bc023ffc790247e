"""What the endpoints share: the backend, its names, and the rules it is served under."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..backends.base import Backend, Generation, Model, Sampling
from ..backends.errors import LatimerError, RequestError, shortened
from ..backends.upstream import whole
from ..schemas import limits
from ..schemas.openai.chat import ChatRequest
from ..schemas.openai.completions import CompletionRequest
from .exchange import Exchange
from .frames import error_event
from .instruct import Format
from .vocabularies import to_model

DEFAULT_MAX_BODY = limits.BODY.most

# The body at an address; the second argument is the request's field, for errors.
Fetch: TypeAlias = Callable[[str, str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Service:
    """One backend as it is served.

    Args:
        names: how clients call the model; the engine's own name where there are none.
        any_model: accept every name.
        strict: refuse unknown fields, and what the engine does only nearly.
        max_body: the largest body taken, in bytes.
        parse_content: whether what messages spell as control tokens counts as such.
        fetch: gets what a request names by its address, None where only data: URLs are taken.
        format: what stands around each turn, instead of the model's own template.
        vocabulary: the vocabulary that requests' token ids are of, by tiktoken's name; the
            model's own by default.
    """

    backend: Backend
    names: Sequence[str] = ()
    any_model: bool = False
    strict: bool = False
    max_body: int = DEFAULT_MAX_BODY
    parse_content: bool = False
    fetch: Fetch | None = None
    format: Format | None = None
    vocabulary: str | None = None

    def names_of(self, model: Model) -> Sequence[str]:
        """The names that `/v1/models` lists."""
        return self.names or (model.name,)

    async def resolve(self, name: str) -> Model:
        """The model that a request means; an unknown name is a 404 (contract 1.4)."""
        model = await self.backend.model()
        if not self.any_model and name not in self.names_of(model):
            raise RequestError(
                f"The model `{shortened(name)}` does not exist or you do not have access to it.",
                None,
                "model_not_found",
                404,
            )
        return model


async def in_model_vocabulary(
    request: CompletionRequest | ChatRequest, sampling: Sampling, service: Service
) -> tuple[Sampling, Sequence[str]]:
    """Sampling with the biases on the model's own tokens, and what of it is only nearly right."""
    vocabulary = request.logit_bias_vocabulary or service.vocabulary
    if vocabulary is None or not sampling.logit_bias:
        return sampling, ()
    biases, exact = await to_model(vocabulary, sampling.logit_bias, service.backend)
    return sampling._replace(logit_bias=biases), () if exact else ("logit_bias",)


async def pass_native(exchange: Exchange, service: Service, job: Generation, stream: bool) -> None:
    """Send the engine's own reply: its status, its type, its bytes as they come."""
    async with service.backend.native(job, stream) as reply:
        content_type = reply.content_type.encode("latin-1")
        if not stream:
            # A reply that breaks off in the middle is an error of its own.
            body = await whole(reply.status, reply.body)
            await exchange.reply(reply.status, body, content_type)
            return
        await exchange.start(reply.status, content_type)
        try:
            async for chunk in reply.body:
                await exchange.chunk(chunk)
        except LatimerError as error:
            await exchange.chunk(error_event(error), more=False)
            return
    await exchange.chunk(b"", more=False)
