"""Tests of the store at the start of `latimer serve`, and in the table of `latimer check`."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from pathlib import Path

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.cli import serve
from latimer.adapter.engines import backend_of, describe_store
from latimer.adapter.settings import Settings
from latimer.adapter.store.config import store_config_of
from latimer.adapter.store.errors import StoreError
from latimer.backends.llama_server import LlamaServer
from support.copies import run, unprivileged
from support.postgresql import STRANGER, PostgreSQL
from support.servers import begun, free_port
from support.stored import store_at

# Nothing listens there, so no test waits for a model.
ENGINE = "http://127.0.0.1:1"
SECRET = "pa55word"


async def started(store: str, **settings: object) -> None:
    """Open a store as `latimer serve` does."""
    loaded = Settings.load(None, model=ENGINE, store=store, **settings)
    app = serve.adapter_of(loaded, backend_of(loaded))
    opening = await serve._open_store(app, loaded)
    if opening is not None:
        opening.cancel()
    await app.aclose()


async def create(store: str) -> None:
    """Create the tables of a store."""
    made = store_at(store)
    await made.open()
    await made.aclose()


def make_newer(file: Path) -> None:
    """Write a version of the schema that no Latimer has."""
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE latimer_schema SET version = 999")
    connection.close()


def test_a_damaged_file_is_no_start(tmp_path: Path) -> None:
    """A damaged file is a failed start: exit code 3 and one line that names the file."""
    file = tmp_path / "kept.db"
    file.write_bytes(b"no database" * 1000)
    done = run("serve", ENGINE, "--port", "0", "--store", str(file), "--no-log-requests")
    assert done.returncode == 3
    assert done.stderr.startswith(f"Latimer cannot start: SQLite file {file}: the file is not a ")
    assert done.stderr.count("\n") == 1
    assert file.read_bytes() == b"no database" * 1000


async def test_a_missing_folder_is_no_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in a folder that does not exist is a failed start, and makes no folder."""
    with pytest.raises(SystemExit) as caught:
        await started(str(tmp_path / "no" / "kept.db"))
    assert caught.value.code == 3
    assert f"The folder of the store does not exist: {tmp_path}/no." in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("mode", "where", "reason"),
    [
        (0o000, ("{}/kept.db",), "The folder of the store cannot be entered: {}."),
        (0o000, ("{}/deep/kept.db",), "The folder of the store cannot be entered: {}/deep."),
        (0o555, ("{}/kept.db",), "The folder of the store cannot be written: {}."),
        (0o555, ("{}.db", "--store-media", "{}/deep"), "The folder of store_media cannot be "
         "written: {}."),
        (0o000, ("{}.db", "--store-media", "{}/deep"), "The folder of store_media cannot be "
         "entered: {}."),
    ],
)  # fmt: skip
def test_a_folder_without_permission_is_no_start(
    tmp_path: Path, mode: int, where: tuple[str, ...], reason: str
) -> None:
    """A folder that may not be entered or written is a failed start and check, with its path."""
    folder = tmp_path / "closed"
    folder.mkdir(mode)
    store = [word.format(folder) for word in where]
    for command, code in (("serve", 3), ("check", 1)):
        done = unprivileged(command, ENGINE, "--store", *store)
        assert done.returncode == code
        assert reason.format(folder) in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_without_permission_is_no_start(tmp_path: Path) -> None:
    """A file that may only be read is a failed start, and `latimer store stats` reads it."""
    file = tmp_path / "kept.db"
    asyncio.run(create(str(file)))
    file.chmod(0o444)
    for command, code, words in (
        (["serve", ENGINE], 3, f"SQLite file {file}: The file cannot be written."),
        (["store", "stats"], 0, "objects     0"),
    ):
        done = unprivileged(*command, "--store", str(file))
        assert (done.returncode, words in done.stdout + done.stderr) == (code, True)


async def test_a_newer_schema_is_no_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store of a newer Latimer is a failed start, with both versions of the schema."""
    file = tmp_path / "kept.db"
    await create(str(file))
    make_newer(file)
    with pytest.raises(SystemExit) as caught:
        await started(str(file))
    assert caught.value.code == 3
    said = capsys.readouterr().err
    assert "has version 999, and this Latimer knows versions up to" in said
    assert said.count("\n") == 1


async def test_a_durable_store_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A durable store is named at the start, with its limits; a store in memory is not."""
    await started(str(tmp_path / "kept.db"), store_age="30d")
    assert capsys.readouterr().err == (
        f"Latimer stores responses and completions: SQLite file {tmp_path}/kept.db, 30 d.\n"
    )
    await started("memory")
    await started("off")
    assert capsys.readouterr().err == ""


async def test_a_required_postgresql_has_to_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """A required PostgreSQL that is not reachable is a failed start, without its password."""
    port = free_port()
    with pytest.raises(SystemExit) as caught:
        await started(f"postgresql://me:{SECRET}@127.0.0.1:{port}/kept", store_required=True)
    assert caught.value.code == 3
    said = capsys.readouterr().err
    assert f"PostgreSQL at 127.0.0.1:{port}/kept: the database does not answer (" in said
    assert SECRET not in said
    assert said.count("\n") == 1


REFUSED = {
    "no such database": ("postgres", "none", 'FATAL:  database "none" does not exist'),
    "no such user": ("nobody", "postgres", 'FATAL:  role "nobody" does not exist'),
    "a wrong password": (
        f"{STRANGER}:{SECRET}", "postgres", "FATAL:  password authentication failed for user",
    ),
    "no password": (STRANGER, "postgres", "no password supplied"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_a_postgresql_that_refuses_is_no_start(
    postgresql_server: PostgreSQL, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waiting does not help against a wrong address: exit code 3, and one line with the reason."""
    user, name, words = REFUSED[case]
    place = f"127.0.0.1:{postgresql_server.port}/{name}"
    url = f"postgresql://{user}@{place}"
    with pytest.raises(SystemExit) as caught:
        await started(url)
    assert caught.value.code == 3
    said = capsys.readouterr().err
    assert said.startswith(f"Latimer cannot start: PostgreSQL at {place}: the database ")
    assert words in said
    assert SECRET not in said
    assert said.count("\n") == 1
    app = OpenAIAdapter(LlamaServer(ENGINE), store=url)
    with pytest.raises(StoreError) as raised:
        await app.open_store()
    (note,) = raised.value.__notes__
    assert note in said
    await app.aclose()


async def test_a_user_without_permission_is_no_start(
    postgresql_server: PostgreSQL, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user of PostgreSQL who may not create the tables is a failed start."""
    postgresql_server.execute("CREATE ROLE reader LOGIN")
    try:
        with pytest.raises(SystemExit):
            await started(postgresql_server.url().replace("postgres@", "reader@"))
    finally:
        postgresql_server.execute("DROP ROLE reader")
    assert "the user has no permission (permission denied for " in capsys.readouterr().err


@pytest.mark.slow
def test_a_postgresql_can_start_later(llama_server_url: str) -> None:
    """The server starts without its PostgreSQL, says so in one line, and serves chat."""
    port = free_port()
    url = f"postgresql://me:{SECRET}@127.0.0.1:{port}/kept"
    with begun(llama_server_url, LATIMER_STORE=url) as (process, _, line):
        assert line.startswith(
            f"The store is not available yet: PostgreSQL at 127.0.0.1:{port}/kept: "
        )
        assert SECRET not in line
        assert process.stderr is not None
        address = process.stderr.readline().split(" at ")[1].strip().removesuffix("/v1")
        health = httpx2.get(f"{address}/health")
        assert (health.status_code, health.json()) == (
            200, {"status": "ok", "store": {"status": "unavailable", "waiting": 0, "lost": 0}},
        )  # fmt: skip


async def test_a_postgresql_that_starts_later_is_opened(
    postgresql_server: PostgreSQL,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A database that takes connections later is opened without a request, and named."""
    monkeypatch.setattr(serve, "_REOPEN", 0.02)
    postgresql_server.execute("CREATE DATABASE later WITH ALLOW_CONNECTIONS false")
    loaded = Settings.load(None, model=ENGINE, store=postgresql_server.url("later"))
    app = serve.adapter_of(loaded, backend_of(loaded))
    opening = await serve._open_store(app, loaded)
    assert opening is not None
    assert "The store is not available yet: " in capsys.readouterr().err
    postgresql_server.execute("ALTER DATABASE later WITH ALLOW_CONNECTIONS true")
    try:
        await asyncio.wait_for(opening, 10)
        assert capsys.readouterr().err == (
            "Latimer stores responses and completions: PostgreSQL at "
            f"127.0.0.1:{postgresql_server.port}/later.\n"
        )
    finally:
        await app.aclose()
        postgresql_server.execute("DROP DATABASE later WITH (FORCE)")


async def row_of(store: str, **options: str) -> tuple[bool, str]:
    """Return the row of the store in the table of `latimer check`."""
    is_open, (name, value) = await describe_store(store_config_of(store, **options))  # type: ignore[arg-type]
    assert name == "store"
    return is_open, value


async def test_check_shows_the_store(tmp_path: Path, postgresql_url: str) -> None:
    """`latimer check` shows the store, opens a durable one, and changes nothing."""
    assert await row_of("off") == (True, "off")
    assert await row_of("memory") == (True, "in memory, 64 MiB, 24 h")
    file = tmp_path / "kept.db"
    name = postgresql_url.split("@")[1]
    for store, words in (
        (str(file), f"SQLite file {file}, 30 d"),
        (postgresql_url, f"PostgreSQL at {name}, 30 d"),
    ):
        for _ in range(2):
            assert await row_of(store, age="30d") == (True, f"{words}, new")
        await create(store)
        assert await row_of(store, age="30d") == (True, words)


async def test_a_file_of_another_program_is_no_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The SQLite file of another program is a failed start, and does not change."""
    file = tmp_path / "other.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE notes (a)")
    connection.close()
    before = file.read_bytes()
    with pytest.raises(SystemExit) as caught:
        await started(str(file))
    assert caught.value.code == 3
    assert capsys.readouterr().err == (
        f"Latimer cannot start: SQLite file {file}: It is a database of another program, with "
        "tables that are not Latimer's. Name a new file, or a file of Latimer, in a folder that "
        "exists and can be written, or correct --store. --store memory needs neither.\n"
    )
    is_open, words = await row_of(str(file))
    assert not is_open
    assert "of another program" in words
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


async def test_check_changes_no_file(tmp_path: Path) -> None:
    """`latimer check` does not change an empty file."""
    file = tmp_path / "other.db"
    file.touch()
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 0")
    connection.close()
    before = file.read_bytes()
    assert await row_of(str(file)) == (True, f"SQLite file {file}, new")
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


async def test_check_says_why_a_store_cannot_be_opened(tmp_path: Path) -> None:
    """`latimer check` has the reason for a store that cannot be opened, without a password."""
    begin = time.monotonic()
    file = tmp_path / "kept.db"
    await create(str(file))
    make_newer(file)
    before = file.read_bytes()
    for store, reason in (
        (str(file), "has version 999"),
        (str(tmp_path / "no" / "kept.db"), "The folder of the store does not exist"),
        (f"postgresql://me:{SECRET}@127.0.0.1:{free_port()}/kept", "the database does not answer"),
    ):
        is_open, value = await row_of(store)
        assert not is_open
        assert value.startswith("no: ")
        assert reason in value
        assert SECRET not in value
    assert file.read_bytes() == before
    assert time.monotonic() - begin < 10


def test_the_exit_code_of_check_has_the_store(llama_server_url: str, tmp_path: Path) -> None:
    """`latimer check` exits with 1 if the engine is reached and the store cannot be opened."""
    done = run("check", llama_server_url, "--store", str(tmp_path / "no" / "kept.db"))
    assert done.returncode == 1
    assert "reachable         yes" in done.stdout
    assert "\nstore             no: SQLite file " in done.stdout
