"""The tables `[keys.NAME]` and `[admission]` of the settings' file.

This module has no I/O, and imports no client of a database.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qs, urlsplit

from pydantic import ConfigDict, Field, field_validator

from ...backends.errors import shortened
from ...backends.fleet.config import Table
from ..errors import printable
from .leases import NO_RATES, Grant, LeaseStore, LimitsError, Rates
from .memory import MemoryLimits

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
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
StoreKind: TypeAlias = Literal["memory", "redis", "postgresql"]


def digest_of(key: str) -> str:
    """Return the digest of a key, as the table of the key has it."""
    return _PREFIX + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class _Strict(Table):
    # Numbers are numbers: neither texts nor booleans.
    model_config = ConfigDict(strict=True)


class KeyConfig(_Strict):
    """A key of clients: its digest, the models that it may use, its share and its limits."""

    # Somebody may write the key instead of its digest.
    digest: str = Field(
        description="SHA-256 of the key; `latimer config digest` prints it.", repr=False
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

    @field_validator("digest")
    @classmethod
    def _check_digest(cls, digest: str) -> str:
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(
                "expected sha256: and 64 hexadecimal digits, as 'latimer config digest' prints them"
            )
        return digest

    @field_validator("models", mode="before")
    @classmethod
    def _as_list(cls, names: Any) -> Any:
        return [*names] if isinstance(names, tuple) else names

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


class AdmissionConfig(_Strict):
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
        ValueError: the store is of an unknown kind; the message shows no password.
    """
    if store == MEMORY:
        return "memory"
    try:
        parts = urlsplit(store)
        # A wrong port raises an error, whose message can be part of a password.
        scheme, _port = parts.scheme, parts.port
    except ValueError:
        scheme = ""
    if scheme in _REDIS:
        return "redis"
    if scheme in _POSTGRESQL:
        return "postgresql"
    raise ValueError(EXPECTED)


def wrong_keys(keys: Mapping[str, KeyConfig]) -> Iterator[tuple[str, str]]:
    """Yield the place of each table that cannot be used, and the reason."""
    names: dict[str, str] = {}
    for name, key in keys.items():
        if _NAME.fullmatch(name) is None:
            shown = shortened(printable(name))
            yield f"keys.{shown}", "a name has up to 64 letters, digits and any of '._-'"
        other = names.setdefault(key.digest, name)
        if other != name:
            yield f"keys.{name}.digest", f"it is the digest of keys.{other}, too; omit one of them"


def keys_of(keys: Mapping[str, KeyConfig | Mapping[str, Any]]) -> dict[str, KeyConfig]:
    """Return the tables of keys, from classes or dictionaries.

    Raises:
        ValueError: a table cannot be used.
    """
    found = {name: KeyConfig.model_validate(key) for name, key in keys.items()}
    for place, reason in wrong_keys(found):
        raise ValueError(f"{place}: {reason}")
    return found


def grants_of(keys: Mapping[str, KeyConfig]) -> dict[bytes, Grant]:
    """Return the permissions of each key by its digest."""
    return {
        bytes.fromhex(key.digest[len(_PREFIX) :]): _grant(name, key) for name, key in keys.items()
    }


def _grant(name: str, key: KeyConfig) -> Grant:
    rates = Rates(key.requests_per_minute, key.tokens_per_minute, key.concurrent)
    if rates == NO_RATES:
        rates = NO_RATES
    if key.models is None or "*" in key.models:
        return Grant(name, rates, key.weight)
    names = frozenset(one for one in key.models if not one.endswith("*"))
    prefixes = tuple(one[:-1] for one in key.models if one.endswith("*"))
    return Grant(name, rates, key.weight, names, prefixes)


def store_of(config: AdmissionConfig) -> LeaseStore:
    """Return the store of the limits; it connects when it is used.

    Raises:
        LimitsError: the package of its client is missing.
    """
    kind, admits = kind_of(config.store), config.unavailable == "admit"
    try:
        if kind == "redis":
            from .redis import RedisLimits

            return RedisLimits(config.store, admits)
        if kind == "postgresql":
            from .postgresql import PostgresLimits

            return PostgresLimits(config.store, admits)
    except ModuleNotFoundError as error:
        if error.name not in ("redis", "psycopg"):
            raise
        extra = "redis" if kind == "redis" else "postgres"
        raise LimitsError(
            f"it requires the extra '{extra}': run pip install '.[{extra}]' in a clone of Latimer"
        ) from None
    return MemoryLimits()


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name
