"""Tests of the store of the limits at the start of `latimer serve`, and in `latimer check`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from latimer.adapter.cli import check, serve, terminal
from latimer.adapter.engines import backend_of
from latimer.adapter.settings import Settings
from support.clients import client_of
from support.postgresql import STRANGER, PostgreSQL
from support.prometheus import scrape
from support.redis_server import RedisServer
from support.servers import free_port

# Nothing listens there, so no test waits for a model.
ENGINE = "http://127.0.0.1:1"
SECRET = "pa55word"


def settings_with(folder: Path, store: str) -> Settings:
    """Return settings with a key that has limits, which are counted in a store."""
    digest = hashlib.sha256(b"key").hexdigest()
    file = folder / "latimer.toml"
    file.write_text(
        f'[admission]\nstore = "{store}"\n'
        f'[keys.a]\ndigest = "sha256:{digest}"\nrequests_per_minute = 5\n'
    )
    return Settings.load(file, model=ENGINE)


async def started(settings: Settings) -> float:
    """Open the store of the limits as `latimer serve` does, and return its metric."""
    app = serve.adapter_of(settings, backend_of(settings))
    try:
        await serve._open_limits(app, settings)
        async with client_of(app) as client:
            client.headers["authorization"] = "Bearer key"
            return (await scrape(client)).sum("latimer_limits_up")
    finally:
        await app.aclose()


@pytest.fixture
def _json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the lines of the start be JSON, as in a log."""
    monkeypatch.setattr(terminal, "_is_json", True)


@pytest.fixture(params=["wrong password", "no such database", "redis password", "redis database"])
def refused(
    request: pytest.FixtureRequest, postgresql_server: PostgreSQL, redis_process: RedisServer
) -> tuple[str, str]:
    """Return the URL of a store that refuses, and the reason."""
    sql, other = f"127.0.0.1:{postgresql_server.port}", f"127.0.0.1:{redis_process.port}"
    return {
        "wrong password": (f"postgresql://{STRANGER}:{SECRET}@{sql}/postgres", "refused the user"),
        "no such database": (f"postgresql://postgres@{sql}/none", "does not exist"),
        "redis password": (f"redis://nobody:{SECRET}@{other}/0", "refused the user"),
        "redis database": (f"redis://{other}/9999", "does not exist"),
    }[request.param]


@pytest.mark.usefixtures("_json")
async def test_a_store_of_limits_that_refuses_is_no_start(
    refused: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong credentials and names of databases are exit code 3, and a failed row of a check."""
    url, words = refused
    settings = settings_with(tmp_path, url)
    with pytest.raises(SystemExit) as caught:
        await started(settings)
    assert caught.value.code == 3
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["level"] == "error"
    assert line["message"].startswith("Latimer cannot start: admission.store: ")
    (row,) = await check._limits(settings)
    assert (row.name, row.status) == ("limits", "failed")
    for text in (line["message"], row.value):
        assert words in text
        assert SECRET not in text
    assert "admission.store" in row.advice


@pytest.mark.usefixtures("_json")
@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
async def test_a_store_of_limits_that_is_down_is_a_warning(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server without its store of limits starts with a warning; the metric and a check say so."""
    settings = settings_with(tmp_path, f"{scheme}://me:{SECRET}@127.0.0.1:{free_port()}/0")
    assert await started(settings) == 0
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["level"] == "warning"
    assert "so this process counts alone" in line["message"]
    (row,) = await check._limits(settings)
    assert row.status == "failed"
    assert SECRET not in line["message"] + row.value


async def test_a_store_of_limits_that_works_has_a_row(postgresql_url: str, tmp_path: Path) -> None:
    """A check names the store of limits and makes no table; the metric is 1 after the start."""
    import psycopg

    settings = settings_with(tmp_path, postgresql_url)
    (row,) = await check._limits(settings)
    assert (row.status, row.value.partition(":")[0]) == ("ok", "PostgreSQL at 127.0.0.1")
    with psycopg.connect(postgresql_url) as connection:
        assert connection.execute("SELECT to_regclass('latimer_limits')").fetchone() == (None,)
    assert await started(settings) == 1
    assert [*await check._limits(Settings.load(None, model=ENGINE))] == []
