"""What is served: backends, their names, and the rules they are served under."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..backends.base import Backend, Capabilities, Model
from ..backends.errors import LatimerError, shortened
from ..schemas import limits
from ..schemas.openai.common import Usage
from .errors import InvalidRequest

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


@dataclass(slots=True)
class Served:
    """What answers a request: an engine, the model that it serves, and the rules for it."""

    backend: Backend
    model: Model
    policy: Policy

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self.backend.capabilities


class Observer(Protocol):
    """Sees how a request goes.

    Attributes:
        keeps: whether it wants the reply of a stream, too, as it would have been sent whole.
    """

    keeps: bool

    def start(self) -> None:
        """The engine is given the request's jobs."""
        ...

    def first_token(self) -> None:
        """The first of what was generated is there."""
        ...

    def finish(self, usage: Usage, reply: Mapping[str, Any] | None) -> None:
        """Every choice has ended; a request that fails has no such end.

        Args:
            reply: OpenAI's object; None for a stream that nobody keeps.
        """
        ...


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
            InvalidRequest: no model has the name.
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
        raise InvalidRequest(
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
