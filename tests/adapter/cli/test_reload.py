"""Tests of the settings file that a running server reads again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.cli import terminal
from latimer.adapter.cli.reload import follow, reload
from latimer.adapter.fleet import Fleet
from latimer.adapter.limits.config import digest_of
from latimer.adapter.settings import Settings
from latimer.backends.fleet import groups
from latimer.backends.llama_server import LlamaServer
from support.clients import client_of
from support.engines.echo import Echo
from support.servers import begun, command

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")


def key(name: str) -> str:
    """Return the table of a key."""
    return f'[keys.{name}]\ndigest = "{digest_of("sk-" + name)}"\n'


def status(address: str, name: str) -> int:
    """Return the status of a request with a key."""
    headers = {"authorization": f"Bearer sk-{name}"}
    return httpx2.get(f"{address}/v1/models", headers=headers).status_code


def test_a_server_of_one_engine_follows_its_keys(tmp_path: Path) -> None:
    """The keys of a server of one engine change with the file; other changes need a restart."""
    file = tmp_path / "latimer.toml"
    file.write_text(key("one"))
    with command("--config", str(file), LATIMER_REASONING_KEY="x") as (process, address):
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        assert next(lines).startswith(b"Latimer serves demo")
        assert next(lines).startswith(b"The playground is at")
        assert (status(address, "one"), status(address, "two")) == (200, 401)
        file.write_text("queue = 3\n" + key("two"))
        process.send_signal(signal.SIGHUP)
        assert next(lines).decode() == (
            f"Latimer has read {file} again: key two added, key one removed.\n"
        )
        assert next(lines) == b"Start the server again to change: queue.\n"
        assert (status(address, "one"), status(address, "two")) == (401, 200)
        for text, reason in (
            ("", "it has no table of a key any more."),
            (key("two") + '[engines.a]\nurl = "http://127.0.0.1:1"\n', "it has tables of engines"),
        ):
            file.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert f"Latimer keeps its settings: {file}: {reason}" in next(lines).decode()
            assert status(address, "two") == 200


def test_a_hangup_without_a_file_is_a_line() -> None:
    """SIGHUP without a settings file is a line of the log, and the server serves on."""
    with begun() as (process, address, _):
        assert process.stderr is not None
        assert process.stderr.readline().startswith("The playground is at")
        process.send_signal(signal.SIGHUP)
        assert process.stderr.readline() == f"{terminal.NO_FILE}\n"
        assert httpx2.get(f"{address}/health").status_code == 200


@pytest.mark.slow
def test_a_hangup_of_the_terminal_ends_the_server() -> None:
    """SIGHUP ends a server whose input is a terminal and that has no settings file."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        # The tests may run without hangups.
        ["env", "--default-signal=HUP", "latimer", "serve", "--port", "0"],
        stdin=theirs, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        assert process.stderr.readline()
        process.send_signal(signal.SIGHUP)
        assert process.wait(10) == -signal.SIGHUP
    os.close(ours)
    os.close(theirs)


async def test_the_file_of_keys_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A change of the file of keys counts without one of the settings file, and the log says so.

    The log has no key.
    """
    monkeypatch.setattr("latimer.adapter.cli.reload._LOOK", 0.02)
    file, keys = tmp_path / "latimer.toml", tmp_path / "keys.txt"
    file.write_text(f'api_key_file = "{keys}"\n')
    keys.write_text("sk-old\nsk-kept\n")
    settings = Settings.load(file)
    app = OpenAIAdapter(Echo(), api_keys=settings.api_keys())
    door: Any = Doorway()
    following = asyncio.create_task(follow(settings, None, app, door))
    await asyncio.sleep(0.1)
    async with client_of(app) as client, asyncio.timeout(20):

        async def statuses() -> list[int]:
            found = []
            for name in ("old", "new", "kept"):
                headers = {"authorization": f"Bearer sk-{name}"}
                found.append((await client.get("/v1/models", headers=headers)).status_code)
            return found

        for text, expected, words in (
            ("old\nsk-new\nsk-kept", [200, 200, 200], f"1 key in {keys} added."),
            ("new", [401, 200, 401], f"2 keys in {keys} removed."),
        ):
            (tmp_path / "draft").write_text(f"sk-{text}\n")
            before = door.reloaded
            (tmp_path / "draft").rename(keys)
            while door.reloaded == before:
                await asyncio.sleep(0.02)
            said = capfd.readouterr().err
            assert said == f"Latimer has read {file} again: {words}\n"
            assert await statuses() == expected
        keys.write_text("")
        while "contains no key" not in capfd.readouterr().err:
            await asyncio.sleep(0.02)
        assert await statuses() == [401, 200, 401]
    following.cancel()
    await app.aclose()


async def test_another_file_of_keys_needs_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A settings file that no longer names the file of keys changes no key, also if read again."""
    file, keys = tmp_path / "latimer.toml", tmp_path / "keys.txt"
    file.write_text(f'api_key_file = "{keys}"\n')
    keys.write_text("sk-one\n")
    started = settings = Settings.load(file)
    app = OpenAIAdapter(Echo(), api_keys=settings.api_keys())
    file.write_text("")
    for _ in range(2):
        settings = await reload(settings, None, app, started)
        said = capfd.readouterr().err
        assert "again: the same keys." in said
        assert "Start the server again to change: api_key_file." in said
    async with client_of(app) as client:
        headers = {"authorization": "Bearer sk-one"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    await app.aclose()


async def test_a_file_that_is_not_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log has an error for a file that a server does not use, with the reason."""
    file = tmp_path / "latimer.toml"
    file.write_text(key("one"))
    settings = Settings.load(file)
    app = OpenAIAdapter(LlamaServer("http://127.0.0.1:9"), keys=settings.keys)
    monkeypatch.setattr(terminal, "_is_json", True)
    file.write_text("queue = true")
    assert await reload(settings, None, app, settings) is settings
    line = orjson.loads(capsys.readouterr().err)
    assert (line["level"], line["event"]) == ("error", "reload")
    assert line["message"] == f"Latimer keeps its settings: {line['reason']}"
    await app.aclose()


class Doorway:
    """A door through which nobody asks for a reload."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.reloaded = 0

    def reloads(self) -> asyncio.Event:
        """Return the event that asks for a reload."""
        return self.asked

    def has_reloaded(self) -> None:
        """Count a reload."""
        self.reloaded += 1


async def test_a_file_that_is_deleted_is_an_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A settings file that is gone is one line of the log, and is followed when it is back."""
    monkeypatch.setattr(terminal, "_is_json", True)
    monkeypatch.setattr("latimer.adapter.cli.reload._LOOK", 0.02)
    file = tmp_path / "latimer.toml"
    file.write_text(key("one"))
    settings = Settings.load(file)
    app = OpenAIAdapter(LlamaServer("http://127.0.0.1:9"), keys=settings.keys)
    door: Any = Doorway()
    following = asyncio.create_task(follow(settings, None, app, door))
    for name in ("two", "three"):
        await asyncio.sleep(0.2)
        file.unlink()
        await asyncio.sleep(0.3)
        (line,) = map(orjson.loads, capsys.readouterr().err.splitlines())
        assert (line["level"], line["event"]) == ("error", "reload")
        assert line["reason"] == f"{file} does not exist any more."
        before = door.reloaded
        (tmp_path / "new").write_text(key(name))
        (tmp_path / "new").rename(file)
        async with asyncio.timeout(10):
            while door.reloaded == before:
                await asyncio.sleep(0.02)
        assert f"key {name} added" in capsys.readouterr().err
    following.cancel()
    await app.aclose()


@pytest.fixture
def orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Run an engine whose Latimer was killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    environment = {**os.environ, groups.MARK: "left"}
    with subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True) as process:
        # Linux shows it a moment after `exec`, at which `Popen` returns.
        while not Path(f"/proc/{process.pid}/environ").read_bytes():
            time.sleep(0.001)
        groups.Group.started(process.pid, "left", "old", groups.state_folder())
        [record] = tmp_path.rglob("*.json")
        facts = {**orjson.loads(record.read_bytes()), "parent": 2**22 + 1}
        record.write_bytes(orjson.dumps(facts))
        yield process
        process.kill()


def served(file: Path) -> tuple[Settings, Fleet, OpenAIAdapter]:
    """Write a file with the engine `a`; return its settings, and what serves it."""
    file.write_text('[engines.a]\nurl = "http://127.0.0.1:1"\n')
    settings = Settings.load(file)
    fleet = Fleet(settings)
    app = OpenAIAdapter(fleet.entries)
    app.service.release = fleet.aclose
    return settings, fleet, app


async def test_the_log_names_settings_that_are_followed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A setting outside of the tables that engines and models get again is a change."""
    file = tmp_path / "fleet.toml"
    settings, fleet, app = served(file)
    file.write_text('queue = 2\n[engines.a]\nurl = "http://127.0.0.1:1"\n')
    settings = await reload(settings, fleet, app, settings)
    assert "setting queue changed" in capfd.readouterr().err
    await reload(settings, fleet, app, settings)
    assert "changed" not in capfd.readouterr().err
    await app.aclose()


async def test_a_setting_that_needs_a_restart_is_compared_with_the_one_in_use(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each reload says which settings need a restart, until the file has those in use again."""
    file = tmp_path / "fleet.toml"
    started, fleet, app = served(file)
    before, settings = file.read_text(), started
    other = f'{before}[admission]\nunavailable = "refuse"\n'
    for text, asks in ((other, True), (f"{other}# more\n", True), (before, False)):
        file.write_text(text)
        settings = await reload(settings, fleet, app, started)
        said = capfd.readouterr().err
        assert ("Start the server again to change: admission." in said) == asks
    await app.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_the_first_engine_that_latimer_starts_looks_for_orphans(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    """A file that gets its first engine with a command ends what a killed Latimer has left."""
    file = tmp_path / "fleet.toml"
    settings, fleet, app = served(file)
    settings = await reload(settings, fleet, app, settings)
    assert orphan.poll() is None
    with file.open("a") as opened:
        opened.write('[engines.b]\ncommand = ["llama-server", "--port", "{port}"]\n')
    settings = await reload(settings, fleet, app, settings)
    assert [*fleet.replicas] == ["a", "b"]
    assert orphan.wait(5) == -signal.SIGKILL
    await app.aclose()
