"""What is served: backends, their names, and the rules they are served under."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..backends.base import Backend, Capabilities, Generation, Model, Sampling
from ..backends.errors import LatimerError, RequestError, shortened
from ..backends.upstream import whole
from ..schemas import limits
from ..schemas.openai.chat import ChatRequest
from ..schemas.openai.completions import CompletionRequest
from .errors import error_event
from .exchange import Exchange
from .run import Observer
from .vocabularies import to_model

DEFAULT_MAX_BODY = limits.BODY.most

# The body at an address; the second argument is the request's field, for errors.
Fetch: TypeAlias = Callable[[str, str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules that a model is served under.

    Args:
        strict: refuse unknown fields, and what the engine does only nearly.
        parse_content: whether what messages spell as control tokens counts as such.
        fetch: gets what a request names by its address, None where only data: URLs are taken.
        chat_format: the instruct format (`instruct.FORMATS`) that stands in for the model's own
            template.
        vocabulary: the vocabulary that requests' token ids are of, by tiktoken's name; the
            model's own by default.
    """

    strict: bool = False
    parse_content: bool = False
    fetch: Fetch | None = None
    chat_format: str | None = None
    vocabulary: str | None = None


class Served(NamedTuple):
    """What answers a request: an engine, the model that it serves, and the rules for it."""

    backend: Backend
    model: Model
    policy: Policy

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.backend.capabilities


@dataclass(frozen=True, slots=True)
class Listing:
    """A backend, as `/v1/models` lists it.

    Args:
        names: how clients call the model; the engine's own name where there are none.
        any_model: accept every name.
    """

    backend: Backend
    names: Sequence[str] = ()
    any_model: bool = False
    policy: Policy = Policy()

    def names_of(self, model: Model) -> Sequence[str]:
        """The names that it has."""
        return self.names or (model.name,)


class Service:
    """All that is served.

    Args:
        listings: one for each backend; a name belongs to the first that has it.
        max_body: the largest body taken, in bytes.
        observers: makes what sees how a request to a model goes.
    """

    def __init__(
        self,
        listings: Sequence[Listing],
        max_body: int = DEFAULT_MAX_BODY,
        observers: Callable[[Served], Sequence[Observer]] = lambda _served: (),
    ) -> None:
        self._listings = listings
        self.max_body = max_body
        self.observers = observers

    async def resolve(self, name: str) -> Served:
        """What a request's model means; an unknown name is a 404 (contract 1.4).

        Raises:
            RequestError: no model has the name.
            EngineUnavailable: an engine that may have it is not there.
        """
        missing: LatimerError | None = None
        for listing in self._listings:
            try:
                model = await listing.backend.model()
            except LatimerError as error:
                if name in listing.names:
                    raise
                missing = missing or error
                continue
            if listing.any_model or name in listing.names_of(model):
                return Served(listing.backend, model, listing.policy)
        if missing is not None:
            raise missing
        raise RequestError(
            f"The model `{shortened(name)}` does not exist or you do not have access to it.",
            None,
            "model_not_found",
            404,
        )

    async def first(self) -> Served:
        """What answers where a request names no model."""
        listing = self._listings[0]
        return Served(listing.backend, await listing.backend.model(), listing.policy)

    async def models(self) -> dict[str, Model]:
        """Every name that requests may use, and its model.

        Raises:
            EngineUnavailable: an engine is not there.
        """
        found: dict[str, Model] = {}
        for listing in self._listings:
            model = await listing.backend.model()
            for name in listing.names_of(model):
                found.setdefault(name, model)
        return found

    async def health(self) -> None:
        """Return when every engine can answer."""
        for listing in self._listings:
            await listing.backend.health()

    async def aclose(self) -> None:
        """Release the backends."""
        for listing in self._listings:
            await listing.backend.aclose()


async def in_model_vocabulary(
    request: CompletionRequest | ChatRequest, sampling: Sampling, served: Served
) -> tuple[Sampling, Sequence[str]]:
    """Sampling with the biases on the model's own tokens, and what of it is only nearly right."""
    vocabulary = request.logit_bias_vocabulary or served.policy.vocabulary
    if vocabulary is None or not sampling.logit_bias:
        return sampling, ()
    biases, exact = await to_model(vocabulary, sampling.logit_bias, served.backend)
    return sampling._replace(logit_bias=biases), () if exact else ("logit_bias",)


async def pass_native(exchange: Exchange, backend: Backend, job: Generation, stream: bool) -> None:
    """Send the engine's own reply: its status, its type, its bytes as they come."""
    async with backend.native(job, stream) as reply:
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
