"""Tests of the settings of the store: where objects are stored, and how long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from latimer.adapter.store.config import StoreConfig, seconds_of, store_config_of
from sqlalchemy.pool import NullPool

MIB = 2**20
SECRET = "s3cret"


def placed(store: str, **options: Any) -> StoreConfig:
    """Return the place of a store that is not off."""
    place = store_config_of(store, **options)
    assert place is not None
    return place


def test_memory_is_limited() -> None:
    """A store in memory keeps 64 MiB for 24 hours."""
    assert placed("memory") == StoreConfig("memory", "", 86_400.0, 64 * MIB)
    assert not placed("memory").durable


def test_off_is_no_place() -> None:
    """`off` has no place, also if limits are set."""
    assert store_config_of("off") is None
    assert store_config_of("off", age="24h", size=1, media="x") is None


@pytest.mark.parametrize("store", ["{}", "sqlite:///{}", "SQLite:///{}"])
def test_a_file_has_no_limits(store: str, tmp_path: Path) -> None:
    """An SQLite file has no limits, and a folder for media next to it."""
    file = tmp_path / "kept.db"
    media = str(tmp_path / "kept.media")
    assert placed(store.format(file)) == StoreConfig("sqlite", str(file), media=media)
    assert placed(store.format(file)).durable


@pytest.mark.parametrize("name", ["a b.db", "a#b.db", "a?b.db", "a%20b.db", "é.sqlite", "a@b.db"])
def test_every_file_name_is_taken_literally(name: str, tmp_path: Path) -> None:
    """A file name may contain characters that have a meaning in URLs."""
    assert placed(str(tmp_path / name)).target == str(tmp_path / name)


def test_a_relative_file_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is relative to the folder in which the process starts."""
    monkeypatch.chdir(tmp_path)
    assert placed("kept.db").target == str(tmp_path / "kept.db")
    assert placed("./kept").target == str(tmp_path / "kept")
    assert placed("sqlite:///kept").target == str(tmp_path / "kept")
    assert placed("kept.db", media="seen").media == str(tmp_path / "seen")


def test_only_files_of_one_name_share_no_media(tmp_path: Path) -> None:
    """The folder for media has the whole name of a file that does not end with `.db`."""
    assert placed(str(tmp_path / "kept.sqlite")).media == str(tmp_path / "kept.sqlite.media")


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "PostgreSQL"])
def test_a_url_gets_the_scheme_of_the_driver(scheme: str) -> None:
    """Every usual scheme of PostgreSQL is accepted, and media stay in the database."""
    place = placed(f"{scheme}://me:{SECRET}@db.example:6543/kept?sslmode=require")
    assert place.kind == "postgresql"
    assert place.target == (
        f"postgresql+psycopg://me:{SECRET}@db.example:6543/kept?sslmode=require"
    )
    assert (place.age, place.size, place.media) == (None, None, None)


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (f"postgresql://me:{SECRET}@db.example/kept", "PostgreSQL at db.example:5432/kept"),
        (f"postgresql://me:{SECRET}@[::1]:99/kept", "PostgreSQL at [::1]:99/kept"),
        ("postgresql:///kept?host=/run/pg", "PostgreSQL at /run/pg:5432/kept"),
        (f"postgres:///kept?password={SECRET}", "PostgreSQL at the local socket, database kept"),
        ("/x/y.db", "SQLite file /x/y.db"),
        ("memory", "in memory, 64 MiB, 24 h"),
    ],
)
def test_a_place_is_described_without_its_password(store: str, words: str) -> None:
    """The description of a place has no user name or password, and neither has its repr."""
    assert placed(store).describe() == words
    assert SECRET not in repr(placed(store))


def test_limits_are_described() -> None:
    """The description has the limits that are set, and media that are elsewhere."""
    place = placed("/x/y.db", age="30d", size=100, media="s3://bucket/prefix")
    assert place.describe() == "SQLite file /x/y.db, 100 MiB, 30 d, media in s3://bucket/prefix"
    assert placed("memory", age="forever", size=1).describe() == "in memory, 1 MiB"
    assert placed("memory", age=90).describe() == "in memory, 64 MiB, 90 s"
    assert placed("memory", age="15m").describe() == "in memory, 64 MiB, 15 min"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("15m", 900), ("24h", 86_400), ("30d", 2_592_000), (1.5, 1.5),
        (60, 60), ("forever", None),
    ],
)  # fmt: skip
def test_durations(text: str | float, seconds: float | None) -> None:
    """A duration is a number of seconds, or a text with a unit."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["30", "0", "86400"])
def test_a_duration_without_a_unit_is_refused(text: str) -> None:
    """A text without a unit can mean seconds, hours or days, so the error asks for one."""
    with pytest.raises(ValueError, match=rf"90s, 15m.* not '{text}', which has no unit$"):
        seconds_of(text)


@pytest.mark.parametrize(
    "store",
    [
        "", " ", "memroy", "Memory", "none", "/", "{folder}", "sqlite:////{folder}", "x.db\0",
        "x\udc80.db", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///x.db?mode=ro",
        "{folder}/new/", ":memory:", "file:x.db", "mysql://h/d", "http://127.0.0.1:8080", "redis://h/0",
    ],
)  # fmt: skip
def test_other_stores_are_refused(store: str, tmp_path: Path) -> None:
    """The error for another text says what is allowed."""
    with pytest.raises(ValueError, match=r"^store: .*(expected memory, off,|without sqlite:///)"):
        store_config_of(store.replace("{folder}", str(tmp_path)))


@pytest.mark.parametrize(
    "store",
    [
        f"me:{SECRET}@host.example/kept", f"postgresql:/me:{SECRET}@host/kept",
        f"mysql://me:{SECRET}@host/kept", f"postgresql://me:{SECRET}@host",
        f"postgresql://me:{SECRET}@host/", f"postgresql://me:{SECRET}@host:port/kept",
        f"postgresql://me:{SECRET}#x@host/kept", f"postgresql://me:12/{SECRET}@host/kept",
        f"postgresql://me:12?{SECRET}@host/kept", f"postgresql://me:1/2?{SECRET}@host/kept",
        f"postgresql://me:x@{SECRET}@host/kept", f"postgresql://me:{SECRET}@host:0/kept",
        f"postgresql://me:{SECRET}@host:/kept",
        f"postgresql://me:{SECRET}@a:1,b:2/kept", f"postgresql://me:{SECRET} x@host/kept",
        f"postgresql://me:{SECRET}@[::1/kept", f"postgresql://me:{SECRET}@host/kept\n",
    ],
)  # fmt: skip
def test_errors_show_no_password(store: str) -> None:
    """A URL that is wrong is refused, and no error repeats a part of it."""
    with pytest.raises(ValueError, match="store: expected") as caught:
        store_config_of(store)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"age": "5x"}, "store_age"), ({"age": ""}, "store_age"), ({"age": "0s"}, "store_age"),
        ({"age": "-1h"}, "store_age"), ({"age": "999999999999d"}, "store_age"),
        ({"age": True}, "store_age"), ({"age": float("nan")}, "store_age"),
        ({"age": float("inf")}, "store_age"), ({"age": "1e3"}, "store_age"),
        ({"size": 0}, "store_size"), ({"size": -1}, "store_size"), ({"size": True}, "store_size"),
        ({"size": 1.5}, "store_size"), ({"size": 2**50}, "store_size"),
        ({"media": ""}, "store_media"), ({"media": "http://x/y"}, "store_media"),
        ({"media": "s3://"}, "store_media"), ({"media": f"s3://me:{SECRET}@x"}, "store_media"),
        ({"media": __file__}, "store_media"),
    ],
)  # fmt: skip
def test_other_limits_are_refused(options: dict[str, Any], name: str) -> None:
    """The error for a limit that is wrong names it, and says what is allowed."""
    with pytest.raises(ValueError, match=f"^{name}: expected") as caught:
        store_config_of("/x/y.db", **options)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 5, b"x.db", ["memory"]])
def test_a_store_is_text(wrong: Any) -> None:
    """A store of another type is an error that says what is allowed."""
    with pytest.raises(ValueError, match=r"^store: expected memory"):
        store_config_of(wrong)
    if wrong is not None:
        with pytest.raises(ValueError, match=r"^store_media: expected a folder"):
            store_config_of("/x/y.db", media=wrong)


def test_options_that_contradict_are_refused() -> None:
    """A store that is required cannot be off, and media of a store in memory stay in memory."""
    with pytest.raises(ValueError, match="store_required: expected a store, but store is off"):
        store_config_of("off", required=True)
    with pytest.raises(ValueError, match=r"store_media: .* store is memory"):
        store_config_of("memory", media="x")


def test_no_database_is_imported() -> None:
    """The settings of a store need neither SQLAlchemy nor SQLite."""
    code = (
        "import sys; from latimer.adapter.store.config import store_config_of;"
        "store_config_of('x.db');"
        "sys.exit(' '.join({'sqlalchemy', 'sqlite3', 'psycopg'} & set(sys.modules)) or None)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgresql_is_connected(scheme: str, postgresql_url: str) -> None:
    """Every scheme of PostgreSQL reaches the database that the URL names."""
    place = placed(postgresql_url.replace("postgresql", scheme, 1))
    engine = sqlalchemy.create_engine(place.target, poolclass=NullPool)
    with engine.connect() as connection:
        name = connection.execute(sqlalchemy.text("SELECT current_database()")).scalar_one()
    assert place.describe().endswith(f"/{name}")


def test_a_password_with_every_character_is_sent(postgresql_url: str) -> None:
    """A password that is percent-encoded arrives as it was meant."""
    url = postgresql_url.replace("postgres@", "postgres:%40%2F%3F%23%25@")
    place = placed(url)
    assert sqlalchemy.make_url(place.target).password == "@/?#%"
    assert "127.0.0.1" in place.describe()
