"""The tables `[keys.NAME]` and `[admission]` of the settings' file.

This module has no I/O, and imports no client of a database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

# The largest number that a limit can have; it is exact in Lua, too.
MOST = 2**40
MEMORY = "memory"
EXPECTED = (
    "expected memory, or a URL such as redis://:PASSWORD@HOST:6379/0 or "
    "postgresql://USER:PASSWORD@HOST:5432/NAME"
)
_REDIS = ("redis", "rediss", "unix")
_POSTGRESQL = ("postgres", "postgresql")
_PREFIX = "sha256:"

# Names are parts of the names of keys in Redis, and of error messages.
KeyName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
StoreKind: TypeAlias = Literal["memory", "redis", "postgresql"]


def digest_of(key: str) -> str:
    """Return the digest of a key, as the table of the key has it."""
    return _PREFIX + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class _Table(BaseModel):
    # An input can be a key, which somebody wrote instead of its digest.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, strict=True)


class KeyConfig(_Table):
    """A key of clients: its digest, the models that it may use, its share and its limits."""

    digest: str = Field(
        description="SHA-256 of the key; `latimer config digest` prints it.",
        pattern=r"^sha256:[0-9a-f]{64}$",
        repr=False,
    )
    models: list[str] | None = Field(
        None, description="Names of models, * at the end for all that begin so; default: all."
    )
    weight: float = Field(
        1.0,
        description="Share of a busy engine, relative to other keys.",
        ge=0.01,
        le=100,
        allow_inf_nan=False,
    )
    requests_per_minute: int | None = Field(
        None, description="Requests in any 60 seconds.", ge=1, le=MOST
    )
    tokens_per_minute: int | None = Field(
        None, description="Tokens of prompts and completions in any 60 seconds.", ge=1, le=MOST
    )
    concurrent: int | None = Field(
        None, description="Requests that run or wait at the same time.", ge=1, le=MOST
    )

    @field_validator("models")
    @classmethod
    def _check_models(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if not name.strip() or "*" in name[:-1]:
                raise ValueError(
                    f"{name!r} is not the name of a model, with or without * at the end"
                )
        return names

    @field_validator("weight", mode="before")
    @classmethod
    def _as_float(cls, weight: Any) -> Any:
        return float(weight) if type(weight) is int else weight


class AdmissionConfig(_Table):
    """The store of the limits, which several processes can share."""

    # A URL can contain a password.
    store: str = Field(
        MEMORY,
        description="Where the limits are counted: memory for one process, redis://HOST, or "
        "postgresql://HOST/NAME.",
        repr=False,
    )
    unavailable: Literal["admit", "refuse"] = Field(
        "admit",
        description="What happens while the store does not answer: each process counts by itself, "
        "or requests get status 503.",
    )

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: str) -> str:
        kind_of(store)
        return store

    def describe(self) -> str:
        """Return the store in words, without a user name or password."""
        kind = kind_of(self.store)
        if kind == "memory":
            return "in memory"
        parts = urlsplit(self.store)
        query = parse_qs(parts.query)
        if kind == "redis":
            if parts.scheme == "unix":
                return f"Redis at {parts.path}"
            return f"Redis at {_host(parts.hostname or 'localhost')}:{parts.port or 6379}"
        host = parts.hostname or next(iter(query.get("host", [])), None)
        name = parts.path.removeprefix("/")
        if host is None:
            return f"PostgreSQL at the local socket, database {name}"
        return f"PostgreSQL at {_host(host)}:{parts.port or 5432}/{name}"


def kind_of(store: str) -> StoreKind:
    """Return the kind of a store.

    Raises:
        ValueError: it is none; the message shows no password.
    """
    if store == MEMORY:
        return "memory"
    try:
        parts = urlsplit(store)
        # A port that is no number raises an error, whose message can be part of a password.
        scheme, _port = parts.scheme, parts.port
    except ValueError:
        scheme = ""
    if scheme in _REDIS:
        return "redis"
    if scheme in _POSTGRESQL:
        return "postgresql"
    raise ValueError(EXPECTED)


def check_keys(keys: Mapping[str, KeyConfig]) -> None:
    """Check that no two tables have the digest of the same key.

    Raises:
        ValueError: two have; the message names them.
    """
    names: dict[str, str] = {}
    for name, key in keys.items():
        other = names.setdefault(key.digest, name)
        if other != name:
            raise ValueError(
                f"keys.{name}: has the digest of keys.{other}; each key needs one table"
            )


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name
