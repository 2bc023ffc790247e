"""Tests of `latimer store` over SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from latimer.adapter.auth import owner_of
from latimer.adapter.cli import main
from latimer.adapter.store.records import Record
from support.copies import Latimer
from support.stored import PIXEL, record, store_at

DAY = 86_400_000_000


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the setting `store` for an empty database of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the signal handlers, which a command replaces, and hide the settings of others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.delenv("LATIMER_STORE", raising=False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(*words: str, code: int = 0) -> Result:
    """Run `latimer store` with these words, and check its exit code."""
    done = CliRunner().invoke(main, ["store", *words])
    assert done.exit_code == code, done.output
    return done


def filled(target: str, *records: Record, media: str | None = None) -> None:
    """Write records to a store."""

    async def write() -> None:
        store = store_at(target, media=media)
        await store.open()
        assert all(map(store.keep, records))
        await store.aclose()

    asyncio.run(write())


def aged(days: int, **fields: Any) -> Record:
    """Return a record that is some days old."""
    made = record(**fields)
    made.created_at = time.time_ns() // 1_000 - days * DAY
    made.id = f"chatcmpl-{made.created_at:014x}{made.id[-10:]}"
    message = {"role": "assistant", "content": "Hi", "refusal": None}
    made.reply = {**made.reply, "choices": [{"message": message}]}
    return made


def sql(target: str, statement: str) -> Any:
    """Run a statement on a database, and return the first column of its first row, if any."""
    if "://" in target:
        import psycopg

        with psycopg.connect(target, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchone()[0] if cursor.description else None  # type: ignore[index]
    connected = sqlite3.connect(target, isolation_level=None)
    try:
        row = connected.execute(statement).fetchone()
    finally:
        connected.close()
    return row and row[0]


@pytest.mark.parametrize("command", ["migrate", "stats", "export", "prune"])
@pytest.mark.parametrize("store", [None, "memory", "off"])
def test_a_store_that_ends_with_the_process_is_wrong_use(command: str, store: str | None) -> None:
    """A store in memory, or none, is exit code 2 with what to write."""
    done = run(command, *([] if store is None else ["--store", store]), code=2)
    assert store or "memory" in done.stderr
    assert "--store FILE.db" in done.stderr


def test_settings_come_from_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store can be named as for `latimer serve`: flag, environment, TOML."""
    target = str(tmp_path / "store.db")
    settings = tmp_path / "latimer.toml"
    settings.write_text(f"store = '{target}'\nport = 8080\n")
    run("migrate", "--config", str(settings))
    assert "version 2" in run("stats", "--config", str(settings)).stdout
    monkeypatch.setenv("LATIMER_STORE", target)
    assert "version 2" in run("stats").stdout


@pytest.mark.parametrize("command", ["stats", "export", "prune"])
def test_a_store_that_does_not_exist_is_not_made(command: str, tmp_path: Path) -> None:
    """A mistyped name is exit code 3, and makes no file."""
    words = ["--older-than", "1d"] if command == "prune" else []
    done = run(command, "--store", str(tmp_path / "none.db"), *words, code=3)
    assert "Nothing was ever stored there" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_password_is_not_shown() -> None:
    """A database that does not answer is one line and exit code 3, without the password."""
    done = run("stats", "--store", "postgresql://user:secret@127.0.0.1:1/name", code=3)
    assert "PostgreSQL at 127.0.0.1:1/name" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.output


def test_migrate_says_the_versions(target: str) -> None:
    """The first call makes the schema and the second one finds it; a dry run changes nothing."""
    place = ("--store", target)
    assert "Version 2 would be made" in run("migrate", "--dry-run", *place).stderr
    run("stats", *place, code=3)
    assert "had version 0, and now has version 2" in run("migrate", *place).stderr
    assert "version 2, the newest" in run("migrate", *place).stderr
    assert run("stats", *place).stdout


def test_a_newer_schema_is_refused(target: str) -> None:
    """No command touches a store that a newer Latimer has migrated."""
    run("migrate", "--store", target)
    sql(target, "UPDATE latimer_schema SET version = 99")
    for command in ("migrate", "stats", "export"):
        assert "version 99" in run(command, "--store", target, code=3).stderr


def test_stats_counts_everything(target: str) -> None:
    """The figures are those of the stored objects, as a table and as JSON."""
    secret = owner_of("secret")
    filled(
        target,
        aged(9, model="one", owner=secret),
        aged(5, model="two", image=PIXEL),
        aged(1, model="two", image=PIXEL),
    )
    found = json.loads(run("stats", "--json", "--store", target).stdout)
    groups = {(one["kind"], one["model"]): one["objects"] for one in found["groups"]}
    assert groups == {("chat.completion", "one"): 1, ("chat.completion", "two"): 2}
    assert (found["objects"], found["owners"], found["media"]) == (3, 2, 1)
    total = sql(target, "SELECT value FROM latimer_totals WHERE name = 'bytes'")
    assert found["object_bytes"] + found["media_bytes"] == total
    assert found["object_bytes"] == sum(one["bytes"] for one in found["groups"])
    assert found["oldest"] < found["newest"]
    assert found["database_bytes"] > 10_000
    table = run("stats", "--store", target).stdout
    assert "objects" in table
    assert "two" in table
    assert secret[:8] not in table


def test_stats_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    """The figures are read while another process holds the lock of the file."""
    target = str(tmp_path / "store.db")
    filled(target, record())
    other = sqlite3.connect(target, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert json.loads(run("stats", "--json", "--store", target).stdout)["objects"] == 1
    other.close()


def test_export_selects(target: str, tmp_path: Path) -> None:
    """Each filter selects its objects, oldest first; text for people is on standard error."""
    filled(
        target,
        aged(9, text="a", model="one", owner=owner_of("secret")),
        aged(5, text="b", model="two", metadata={"x": "1", "y": "=2"}),
        aged(1, text="c", model="two", metadata={"x": "1"}),
        aged(1, text="d", kind="response"),
    )

    def texts(*words: str) -> str:
        lines = run("export", "--store", target, *words).stdout.splitlines()
        return "".join(json.loads(line)["messages"][0]["content"] for line in lines)

    assert texts() == "abc"
    assert texts("--model", "two") == "bc"
    assert texts("--model", "two", "--metadata", "x=1", "--metadata", "y==2") == "b"
    assert texts("--since", "6d") == "bc"
    assert texts("--since", "6d", "--until", "3d") == "b"
    assert texts("--until", "2020-01-01") == ""
    assert texts("--since", "2020-01-01T12:00+01:00") == "abc"
    assert texts("--api-key", "secret") == "a"
    file = tmp_path / "lines.jsonl"
    done = run("export", "--store", target, "-o", str(file))
    assert done.stdout == ""
    assert "Exported 3 lines of 3 chat completions." in done.stderr
    assert len(file.read_text().splitlines()) == 3
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "words",
    [("--since", "soon"), ("--metadata", "x"), ("--metadata", "x=1", "--metadata", "x=2")],
)
def test_a_wrong_filter_is_wrong_use(words: tuple[str, ...], tmp_path: Path) -> None:
    """A filter that cannot be read is exit code 2."""
    run("export", "--store", str(tmp_path / "x.db"), *words, code=2)


def test_export_puts_media_back(target: str, tmp_path: Path) -> None:
    """Images are in the lines; an object whose image is gone has no line, and is counted."""
    media = str(tmp_path / "media")
    filled(target, aged(2, image=PIXEL), aged(1), media=media)
    words = ("export", "--store", target, "--store-media", media)
    first, second = run(*words).stdout.splitlines()
    assert json.loads(first)["messages"][0]["content"][0]["image_url"]["url"] == PIXEL
    for path in Path(media).rglob("?" * 64):
        path.unlink()
    done = run(*words)
    assert done.stdout.splitlines() == [second]
    assert "Skipped 1 choice without content or with a missing medium." in done.stderr


def test_export_reads_pages(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are read in many pages, by number and by bytes, are each exported once."""
    monkeypatch.setattr("latimer.adapter.store.export.SIZES", 3)
    monkeypatch.setattr("latimer.adapter.store.export.BYTES", 2_000)
    made = [aged(20 - i, text=str(i), image=PIXEL if i == 4 else None) for i in range(10)]
    filled(target, *made)
    found = [json.loads(line) for line in run("export", "--store", target).stdout.splitlines()]
    assert len(found) == 10
    assert [one["messages"][0]["content"] for one in found if found.index(one) != 4] == [
        str(i) for i in range(10) if i != 4
    ]


def test_an_export_that_cannot_be_written_fails(tmp_path: Path) -> None:
    """A full disk is exit code 3, and no part of a file looks like a whole one."""
    target = str(tmp_path / "store.db")
    filled(target, *(aged(1) for _ in range(3)))
    with open("/dev/full", "wb") as full:
        words = ["latimer", "store", "export", "--store", target]
        with Latimer[str](words, stdout=full, stderr=subprocess.PIPE, text=True) as done:
            said = done.communicate(timeout=60)[1]
    assert done.returncode == 3
    assert "cannot be written: No space left" in said
    run("export", "--store", target, "-o", str(tmp_path / "none" / "x.jsonl"), code=3)


def test_prune_needs_a_limit(tmp_path: Path) -> None:
    """Without any limit, nothing is deleted, and the message names the options."""
    target = str(tmp_path / "store.db")
    filled(target, record())
    assert "--older-than" in run("prune", "--store", target, code=2).stderr
    run("prune", "--store", target, "--older-than", "forever", code=2)
    said = run("prune", "--store", target, "--older-than", "30", code=2).stderr
    assert "not '30', which has no unit." in " ".join(said.split())
    assert sql(target, "SELECT count(*) FROM latimer_objects") == 1


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("--older-than", "3d"), 2),
        (("--store-age", "7d"), 3),
        (("--store-age", "2d", "--older-than", "7d"), 3),
        (("--older-than", "3d", "--model", "one"), 3),
        (("--older-than", "3d", "--metadata", "x=1"), 3),
        (("--older-than", "1s", "--model", "two", "--metadata", "x=1"), 3),
        (("--older-than", "1s"), 0),
        (("--max-size", "1"), 4),
    ],
)
def test_prune_by_age(target: str, words: tuple[str, ...], left: int) -> None:
    """Old objects are deleted; a dry run says the same number and deletes nothing."""
    filled(
        target,
        aged(9, model="one"),
        aged(5, model="two", metadata={"x": "1"}, image=PIXEL),
        aged(1, model="one", image=PIXEL),
        aged(1, model="two"),
    )
    gone = f"delete{{}} {4 - left} object{'s' * (left != 3)}"
    said = run("prune", "--store", target, "--dry-run", *words).stderr
    assert f"Would {gone.format('')}" in said
    assert sql(target, "SELECT count(*) FROM latimer_objects") == 4
    said = run("prune", "--store", target, *words).stderr
    assert gone.format("d").capitalize() in said
    assert sql(target, "SELECT count(*) FROM latimer_objects") == left
    assert sql(target, "SELECT value FROM latimer_totals WHERE name = 'objects'") == left
    assert sql(target, "SELECT count(*) FROM latimer_media") == (1 if left else 0)


def test_prune_by_size(target: str) -> None:
    """The oldest objects are deleted until the rest fits; the newest stay."""
    made = [aged(30 - i, text="x" * 100_000) for i in range(20)]
    filled(target, *made)
    said = run("prune", "--store", target, "--max-size", "1", "--dry-run").stderr
    assert run("prune", "--store", target, "--max-size", "1").stderr == said.replace(
        "Would delete", "Deleted"
    )
    assert sql(target, "SELECT value FROM latimer_totals WHERE name = 'bytes'") < 2**20
    assert sql(target, "SELECT max(id) FROM latimer_objects") == made[-1].id
    assert sql(target, "SELECT count(*) FROM latimer_objects") >= 5


def test_commands_know_conversations(target: str) -> None:
    """Conversations are counted and pruned with their items, and never exported."""
    text = {"id": "msg_1", "type": "message", "role": "user", "content": "x" * 10_000}
    image = {"id": "msg_2", "output": [{"type": "input_image", "image_url": PIXEL}]}

    async def make() -> None:
        store = store_at(target)
        await store.create_conversation("", "req_0", {}, [text, image])
        await store.aclose()

    asyncio.run(make())
    found = json.loads(run("stats", "--json", "--store", target).stdout)
    assert (found["objects"], found["media"]) == (1, 1)
    (group,) = found["groups"]
    assert (group["kind"], group["model"]) == ("conversation", "")
    assert group["bytes"] > 10_000
    assert run("export", "--store", target).stdout == ""
    sql(target, "UPDATE latimer_objects SET used_at = 0")
    said = run("prune", "--store", target, "--older-than", "1s", "--dry-run").stderr
    assert "delete 1 object " in said
    run("prune", "--store", target, "--older-than", "1s")
    for table in ("objects", "items", "media", "object_media"):
        assert sql(target, f"SELECT count(*) FROM latimer_{table}") == 0  # noqa: S608
    assert sql(target, "SELECT sum(value) FROM latimer_totals") == 0


def test_prune_makes_the_file_smaller(tmp_path: Path) -> None:
    """The space of deleted objects goes back to the disk, unless --no-vacuum is given."""
    file = tmp_path / "store.db"
    filled(str(file), *(aged(9, text="x" * 100_000) for _ in range(40)))
    full = file.stat().st_size
    run("prune", "--store", str(file), "--older-than", "1d", "--no-vacuum")
    assert json.loads(run("stats", "--json", "--store", str(file)).stdout)["free_bytes"] > full / 2
    run("prune", "--store", str(file), "--older-than", "1d")
    assert file.stat().st_size < full / 10


def test_prune_deletes_media_of_no_object(target: str, tmp_path: Path) -> None:
    """Files of media that no object has are deleted; new files and others stay."""
    media = tmp_path / "media"
    filled(target, aged(1, image=PIXEL), media=str(media))
    (used,) = media.rglob("?" * 64)
    old, new = ("b" * 64, "c" * 64)
    for name in (old, new):
        path = media / name[:2] / name[2:4] / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
        if name == old:
            os.utime(path, (0, 0))
    os.utime(used, (0, 0))
    words = ("prune", "--store", target, "--store-media", str(media), "--older-than", "30d")
    assert "Would delete 1 media of no object with 5 B" in run(*words, "--dry-run").stderr
    assert len([*media.rglob("?" * 64)]) == 3
    assert "Deleted 1 media" in run(*words).stderr
    assert {path.name for path in media.rglob("?" * 64)} == {used.name, new}
    assert "media" not in run(*words).stderr


@pytest.mark.timed
def test_others_write_while_a_store_is_pruned(target: str) -> None:
    """A server that stores objects while others are deleted waits less than a second for each."""
    filled(target, *(aged(9, text="x" * 5_000, metadata={"a": "b"}) for _ in range(1_500)))

    async def write(process: asyncio.subprocess.Process) -> tuple[list[str], float]:
        store = store_at(target)
        ids, longest = [], 0.0
        while process.returncode is None:
            made = record()
            ids.append(made.id)
            began = time.monotonic()
            assert await store.write([made]) == []
            longest = max(longest, time.monotonic() - began)
        await store.aclose()
        return ids, longest

    async def both() -> tuple[list[str], float, bytes]:
        words = ("latimer", "store", "prune", "--store", target, "--older-than", "1d")
        process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        (ids, longest), said = await asyncio.gather(write(process), process.stderr.read())
        return ids, longest, said

    ids, longest, said = asyncio.run(both())
    assert b"Deleted 1,500 objects" in said
    assert longest < 1, longest
    assert sql(target, "SELECT count(*) FROM latimer_objects") == len(ids) > 10
