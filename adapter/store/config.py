"""Read where objects are stored and how long, from the settings of the store.

This module has no I/O but a look at a path that is a folder, and imports no database.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import SplitResult, parse_qs, urlsplit

from ...backends.errors import shortened

Kind: TypeAlias = Literal["memory", "sqlite", "postgresql"]

MEMORY, OFF = "memory", "off"
EXPECTED = (
    "expected memory, off, the path of an SQLite file such as FILE.db, or a URL such as "
    "postgresql://USER:PASSWORD@HOST:5432/NAME"
)
EXPECTED_AGE = "expected a duration such as 90s, 15m, 24h or 30d, or forever"
EXPECTED_MEDIA = "expected a folder, or s3://BUCKET/PREFIX"

_MIB = 2**20
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
# The largest size in MiB, and the longest age but for ever: 100 years.
LARGEST, _LONGEST = 2**40, 36_500 * 86_400
_AGE, _SIZE = 24 * 3_600.0, 64 * _MIB

_DURATION = re.compile(r"([0-9]{1,12})([smhd])")
# One letter is a drive of Windows.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# A URL without its scheme, or with a mistyped one; it can contain a password.
_USER = re.compile(r"[^/\\]{2,}:.*@")
_SQLITE = "sqlite:///"
_POSTGRESQL = ("postgres", "postgresql", "postgresql+psycopg")
_PORT = 5432
_BUCKET = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9._-]*(/[^@?#]*)?")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A database for stored objects, and its limits.

    Args:
        target: "" in memory, the absolute path of the file, or the URL with SQLAlchemy's scheme.
            A URL can contain a password.
        age: the seconds that an object is kept; None for ever.
        size: the bytes that all objects may take, media included; None for no limit.
        media: the folder or the `s3://BUCKET/PREFIX` for media; None to keep them in the database.
        required: reject a request that cannot be stored.
    """

    kind: Kind
    target: str = field(default="", repr=False)
    age: float | None = None
    size: int | None = None
    media: str | None = None
    required: bool = False

    @property
    def durable(self) -> bool:
        """True if objects outlive the process."""
        return self.kind != "memory"

    def describe(self) -> str:
        """Return the place and its limits in words, without a user name or password."""
        own = _media_next_to(self.target) if self.kind == "sqlite" else None
        words = (
            self._where(),
            "" if self.size is None else f"{self.size / _MIB:g} MiB",
            "" if self.age is None else _in_words(self.age),
            "" if self.media in (None, own) else f"media in {self.media}",
        )
        return ", ".join(filter(None, words))

    def _where(self) -> str:
        if self.kind == "memory":
            return "in memory"
        if self.kind == "sqlite":
            return f"SQLite file {self.target}"
        parts = urlsplit(self.target)
        name = parts.path.removeprefix("/")
        host = parts.hostname or next(iter(parse_qs(parts.query).get("host", [])), None)
        if host is None:
            return f"PostgreSQL at the local socket, database {name}"
        shown = f"[{host}]" if ":" in host else host
        return f"PostgreSQL at {shown}:{parts.port or _PORT}/{name}"


def store_config_of(
    store: str,
    age: str | float | None = None,
    size: int | None = None,
    media: str | None = None,
    required: bool = False,
) -> StoreConfig | None:
    """Return the place that the options of a store name; None for `off`.

    Args:
        age: a duration (`24h`, `forever`) or seconds; by default 24 hours in memory, else for ever.
        size: in MiB; by default 64 in memory, else no limit.
        media: by default a folder next to an SQLite file, else the database.

    Raises:
        ValueError: an option is wrong; the message names it and shows no URL.
    """
    options = {"store": store, "store_age": age, "store_size": size, "store_media": media}
    values: dict[str, Any] = {}
    for name, check in _CHECKS.items():
        if options[name] is not None or name == "store":
            try:
                values[name] = check(options[name])  # type: ignore[operator]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    if values["store"] is None:
        if required:
            raise ValueError("store_required: expected a store, but store is off")
        return None
    kind, target = values["store"]
    longest, largest = (_AGE, _SIZE) if kind == "memory" else (None, None)
    if kind == "memory" and media is not None:
        raise ValueError("store_media: expected a database on disk: store is memory")
    return StoreConfig(
        kind,
        target,
        values.get("store_age", longest),
        values.get("store_size", largest),
        values.get("store_media", _media_next_to(target) if kind == "sqlite" else None),
        required,
    )


def target_of(store: str) -> tuple[Kind, str] | None:
    """Return the kind of a store and its target (see `StoreConfig`); None for `off`.

    Raises:
        ValueError: the text names no store.
    """
    if store == OFF:
        return None
    if store == MEMORY:
        return "memory", ""
    if not store or not isinstance(store, str):
        raise ValueError(f"{EXPECTED}, but got {'another type' if store else 'nothing'}")
    scheme = _SCHEME.match(store)
    if scheme is None:
        if _USER.match(store):
            raise ValueError(f"{EXPECTED}; for a file name with ':' and '@' write its folder too")
        if not any(one in store for one in (".", os.sep, os.altsep or os.sep)):
            # A mistyped word must not become a file.
            raise ValueError(
                f"{EXPECTED}, not '{shortened(store)}'; for a file of this name write "
                f"./{shortened(store)}"
            )
        return "sqlite", _file(store)
    if scheme[1].lower() in _POSTGRESQL:
        # SQLAlchemy needs this scheme.
        return "postgresql", f"postgresql+psycopg://{_checked(store)}"
    if scheme[1].lower() != "sqlite":
        raise ValueError(f"{EXPECTED}, not a URL with {shortened(scheme[1])}://")
    path = store[len(_SQLITE) :]
    if not store.lower().startswith(_SQLITE) or path in ("", ":memory:"):
        raise ValueError(f"{EXPECTED}; for a database in memory write memory")
    if "?" in path:
        raise ValueError(
            "a URL of SQLite must not have options after '?'; for a file name with '?' write the "
            "path without sqlite:///"
        )
    return "sqlite", _file(path)


def seconds_of(age: str | float) -> float | None:
    """Return the seconds of a duration: `90s`, `15m`, `24h`, `30d`; None for `forever`.

    Args:
        age: a text with a unit, or a number of seconds.

    Raises:
        ValueError: it is not a duration, or is 0 or longer than 100 years.
    """
    if age == "forever":
        return None
    if isinstance(age, str):
        found = _DURATION.fullmatch(age)
        if found is None:
            unit = ", which has no unit" if age.isdecimal() else ""
            raise ValueError(f"{EXPECTED_AGE}, not '{shortened(age)}'{unit}")
        seconds = float(int(found[1]) * _SECONDS[found[2]])
    elif isinstance(age, bool) or not isinstance(age, int | float) or not math.isfinite(age):
        raise ValueError(f"{EXPECTED_AGE}, not {shortened(str(age))}")
    else:
        seconds = float(age)
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{EXPECTED_AGE}: more than 0 and at most 36500d, not {age}")
    return seconds


def bytes_of(size: int) -> int:
    """Return the bytes of a size in MiB.

    Raises:
        ValueError: it is not a whole number from 1.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST:
        raise ValueError(
            f"expected a whole number of MiB from 1 to {LARGEST}, not {shortened(str(size))}"
        )
    return size * _MIB


def media_of(media: str) -> str:
    """Return the absolute path of a folder for media, or its `s3://BUCKET/PREFIX`.

    Raises:
        ValueError: it is a file, a URL of another scheme, or one that contains a password.
    """
    if not isinstance(media, str):
        raise ValueError(EXPECTED_MEDIA)
    if _SCHEME.match(media):
        if _BUCKET.fullmatch(media) is None:
            raise ValueError(f"{EXPECTED_MEDIA}, without a user name or password")
        return media
    _check_path(media, EXPECTED_MEDIA)
    if os.path.exists(media) and not os.path.isdir(media):
        raise ValueError(f"{EXPECTED_MEDIA}; '{shortened(media)}' is a file")
    return os.path.abspath(media)


_CHECKS = {
    "store": target_of,
    "store_age": seconds_of,
    "store_size": bytes_of,
    "store_media": media_of,
}


def _file(path: str) -> str:
    """Return the absolute path of an SQLite file.

    Raises:
        ValueError: it cannot be the path of a file.
    """
    _check_path(path, EXPECTED)
    if path == ":memory:" or path.lower().startswith("file:"):
        raise ValueError(f"{EXPECTED}; for a database in memory write memory")
    if path.endswith(("/", os.sep)) or os.path.isdir(path):
        raise ValueError(f"{EXPECTED}; '{shortened(path)}' is a folder")
    return os.path.abspath(path)


def _check_path(path: str, expected: str) -> None:
    try:
        usable = path.strip() != "" and b"\0" not in path.encode()
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ValueError(f"{expected}; a path is UTF-8 text that is not empty")


def _media_next_to(file: str) -> str:
    return file.removesuffix(".db") + ".media"


def _checked(url: str) -> str:
    """Return a URL of PostgreSQL without its scheme.

    Raises:
        ValueError: it is invalid, or `describe` could take a part of its password for its host.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises for a wrong one)
    except ValueError:
        # The text that is read as a port can be the beginning of a password.
        parts = SplitResult("", "", "", "", "")
    name = parts.path.removeprefix("/")
    rest = url.partition("://")[2]
    if (
        not name
        or any(one in name for one in "@/")
        or not url.isprintable()
        or " " in url
        or "#" in url
        or "@" in parts.query
        or parts.netloc.count("@") > 1
        or parts.port == 0
        # SQLAlchemy fails without a number.
        or parts.netloc.endswith(":")
    ):
        raise ValueError(
            "expected postgresql://USER:PASSWORD@HOST:5432/NAME with one host and the name of the "
            "database; in a user name or password write @, /, ?, # and % as %40, %2F, %3F, %23 and "
            "%25"
        )
    return rest


def _in_words(seconds: float) -> str:
    """Return a duration in the largest unit that it is at least two of."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds % size == 0 and seconds >= 2 * size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
