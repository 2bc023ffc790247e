"""The models of an adapter as their settings describe them: backends, names and rules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from ..backends.base import Backend, Capabilities, Model
from ..backends.errors import shortened
from .errors import InvalidRequest
from .limits.leases import Grant

if TYPE_CHECKING:
    from ..backends.fleet.pool import Pool

# The fields that clients read reasoning from.
ReasoningField: TypeAlias = Literal["reasoning_content", "reasoning"]
REASONING_FIELDS: tuple[ReasoningField, ...] = ("reasoning_content", "reasoning")

# A function that returns the body at a URL; its second argument is the request's field, for errors.
Fetch: TypeAlias = Callable[[str, str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for requests to a model.

    Args:
        strict: reject unknown fields, and fields that the engine only approximates.
        parse_content: parse control tokens in message text.
        fetch: fetches a URL that a request names; None to accept only data: URLs.
        chat_format: the instruct format (`INSTRUCT_FORMATS`) that replaces the model's chat
            template.
        vocabulary: the vocabulary of the token ids in requests, by its name in tiktoken; by default
            the model's own.
        keepalive: seconds of silence after which a stream sends a comment; 0 sends none.
        reasoning: the field of messages for reasoning; None to omit it from responses.
        matryoshka: the model's vectors may be cut to fewer dimensions.
    """

    strict: bool = False
    parse_content: bool = False
    fetch: Fetch | None = None
    chat_format: str | None = None
    vocabulary: str | None = None
    keepalive: float = 0
    reasoning: ReasoningField | None = "reasoning_content"
    matryoshka: bool = False


@dataclass(slots=True)
class ServedModel:
    """A backend, its model, and the rules for requests to it.

    Args:
        name: the name of the model in responses: the request's, or else the first one.
        is_pooled: True if the backend is a `Pool` of several engines.
        replaces: True if it serves a request for a model that is not available.
        label: the name of the model in metrics, which no client can choose.
    """

    backend: Backend
    model: Model
    policy: Policy
    name: str = ""
    is_pooled: bool = False
    replaces: bool = False
    label: str = ""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine."""
        return self.backend.capabilities


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A backend, as `/v1/models` lists it.

    Args:
        names: the model names for clients; the engine's own name if empty.
        any_model: accept every model name.
        fallback: the names of models that serve its requests while it is not available.
        defaults: fields of requests that do not set them.

    Attributes:
        pool: the backend, if it is a model of several engines.
    """

    backend: Backend
    names: Sequence[str] = ()
    any_model: bool = False
    policy: Policy = Policy()
    fallback: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pool: Pool | None = field(init=False)

    def __post_init__(self) -> None:
        is_pooled = getattr(self.backend, "is_pooled", False)
        pool = cast("Pool", self.backend) if is_pooled else None
        object.__setattr__(self, "pool", pool)

    def names_of(self, model: Model) -> Sequence[str]:
        """Return the names of the model."""
        return self.names or (model.name,)

    @property
    def is_available(self) -> bool:
        """True unless it is a model of several engines, of which none is available."""
        return self.pool is None or self.pool.is_available


# A model, its name for the response, and True if it replaces another one.
Chosen: TypeAlias = tuple[ModelEntry, str, bool]


def first_name(names: Sequence[str], grant: Grant | None) -> str:
    """Return the first name of a model that a key may use.

    Raises:
        InvalidRequest: it may use none.
    """
    if grant is None or grant.names is None:
        return names[0]
    for name in names:
        if grant.allows(name):
            return name
    raise InvalidRequest(
        "you must provide a model parameter. This API key may use: "
        f"{shortened(grant.shown or 'no model')}."
    )


def may_use(grant: Grant, name: str, names: Sequence[str]) -> bool:
    """Return True if a key may use a model by a name, which is its own or any other."""
    return grant.allows(name) and (name in names or any(map(grant.allows, names)))
