"""Tests of `latimer ps` and the other commands of the operator where they cannot work."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.admin import admin_routes
from latimer.adapter.cli.admin import _row
from latimer.adapter.cli.admin_socket import with_key
from latimer.adapter.engines import unused
from latimer.adapter.settings import Settings
from latimer.backends.fleet.replica import Replica
from support.clients import client_of
from support.copies import run
from support.engines.echo import Echo
from support.servers import command, free_port


def latimer(*arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and standard error."""
    done = run(*arguments)
    return done.returncode, done.stderr


def test_a_server_without_paths_for_operators() -> None:
    """A server of one engine has no such paths, and the message says how to get them."""
    with command("--admin-key", "operator") as (_, address):
        for arguments in (("ps", address), ("load", "x", "--url", f"{address}/v1")):
            code, said = latimer(*arguments, "--admin-key", "operator")
            assert (code, said.count("\n")) == (1, 1)
            assert "has no paths for operators. Start it with tables of engines" in said


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_a_key_beyond_ascii(encoding: str) -> None:
    """The operator's key may have any letters, in UTF-8 or Latin-1, as keys of clients may."""
    nothing: Any = SimpleNamespace(replicas={}, pools={})
    app = OpenAIAdapter(Echo(), routes=admin_routes(nothing, "schlüssel"))
    async with client_of(app) as client:
        for key, status in (("schlüssel", 200), ("schlussel", 401)):
            headers = [(b"authorization", f"Bearer {key}".encode(encoding))]
            reply = await client.get("/admin/engines", headers=headers)
            assert reply.status_code == status


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "a/load", "50% of it", "größe"])
async def test_names_with_slashes(name: str) -> None:
    """An engine is reached by any name, and the path in metrics has none."""
    replica = Replica(name, Echo())
    fleet: Any = SimpleNamespace(replicas={name: replica}, pools={})
    app = OpenAIAdapter(Echo(), routes=admin_routes(fleet, "operator"))
    headers = {"authorization": "Bearer operator"}
    async with client_of(app) as client:
        path = f"/admin/engines/{quote(name, safe='')}"
        reply = await client.post(f"{path}/drain", headers=headers)
        assert (reply.status_code, reply.json()["id"]) == (200, name)
        assert replica.state == "draining"
        assert (await client.post(f"{path}x/drain", headers=headers)).status_code == 404
        found = (await client.get("/metrics")).text
        assert 'endpoint="/admin/engines/{name}/drain",model_name="other",status="404"' in found
    await app.aclose()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ps"], 2, "--admin-key or --socket is missing: give those of the server, or set"),
        (["ps"], 2, "For a server of one engine, such as that of make serve, use latimer top."),
        (["ps", "--socket", "/no/socket"], 1, "latimer serve --admin-socket PATH, or correct"),
        (["ps", "localhost:8000", "--admin-key", "x"], 2, "is not an address such as http://"),
        (["drain", "a", f"http://127.0.0.1:{free_port()}", "--admin-key", "x"], 1, "reached: Conn"),
    ],
)
def test_a_command_says_the_next_step(arguments: list[str], code: int, words: str) -> None:
    """A missing key and a wrong address are wrong usage, and a server that is away is a failure."""
    found, said = latimer(*arguments)
    assert (found, words in said) == (code, True), said


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets")
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--workers", "2"), marks=pytest.mark.slow)],
    ids=["one", "workers"],
)
def test_the_socket_of_the_operator(
    options: tuple[str, ...], llama_server_url: str, tmp_path: Path
) -> None:
    """Over the socket no key is needed, only its owner can connect, and no other key is replaced.

    It is deleted at the end.
    """
    file, path = tmp_path / "fleet.toml", tmp_path / "admin.sock"
    file.write_text(f'api_key = "secret"\n[engines.one]\nurl = "{llama_server_url}"\n')
    words = ("--config", str(file), "--admin-socket", str(path), *options)
    with command(*words) as (_, address):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        code, said = latimer("drain", "one", "--socket", str(path))
        assert (code, "one runs no requests" in said) == (0, True), said
        asked = {"model": "one", "prompt": "Hello"}
        keyed = {"authorization": "Bearer secret"}
        reply = httpx2.post(f"{address}/v1/completions", json=asked, headers=keyed, timeout=30)
        assert reply.status_code == 503
        assert latimer("load", "one", "--socket", str(path)) == (0, "one is ready.\n")
        # The API needs its key there, and the paths of the operator need one elsewhere.
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/admin/engines", headers=keyed).status_code == 200
        for headers in ({}, keyed):
            reply = httpx2.get(f"{address}/admin/engines", headers=headers)
            assert reply.status_code == 401
            assert "--admin-socket" in reply.json()["error"]["message"]
        code, said = latimer("serve", *words, "--port", str(free_port()))
        assert (code, "Address already in use. Choose another path with --adm" in said) == (3, True)
    assert not path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets")
def test_a_socket_that_a_killed_server_has_left(llama_server_url: str, tmp_path: Path) -> None:
    """Such a socket is replaced; another file is not."""
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    file = tmp_path / "fleet.toml"
    file.write_text(f'[engines.one]\nurl = "{llama_server_url}"\n')
    words = ("--config", str(file), "--admin-socket")
    with command(*words, str(path)):
        assert latimer("ps", "--socket", str(path))[0] == 0
    code, said = latimer("serve", *words, str(file))
    assert (code, "it is a file or a directory, and not a socket" in said) == (3, True)
    assert file.read_text()
    # A path may be as long as the system allows.
    code, said = latimer("serve", *words, str(tmp_path / ("a" * 200)))
    assert (code, "Choose another path with --admin-socket" in said) == (3, True)
    assert not os.path.lexists(path)


def test_memory_and_the_place_of_one_model_are_shown() -> None:
    """`latimer ps` shows sizes of memory, and the server that has one model at a time."""
    engine = {"id": "a", "state": "ready", "models": ["m"], "running": 0, "places": 1,
              "waiting": 0, "reason": ""}  # fmt: skip
    facts: list[dict[str, Any]] = [
        {"memory": {"gpu": 2**31}, "place": ""}, {"memory": {}, "place": "http://a"},
        {"memory": {"gpu": 2**31}, "place": "http://a", "state": "unloaded"}, {},
    ]  # fmt: skip
    assert [_row({**engine, **one})[-2] for one in facts] == [
        "gpu 2.00 GiB", "one model of http://a", "gpu 2.00 GiB, one model of http://a (not used)",
        "-",
    ]  # fmt: skip


def test_a_socket_without_engines_is_the_only_thing_ignored(tmp_path: Path) -> None:
    """Without tables of engines, the line about the socket does not name a key of Latimer's own."""
    settings = Settings.load(None, model="http://127.0.0.1:1", admin_socket=tmp_path / "socket")
    (line,) = unused(with_key(settings))
    assert line == "Ignored: --admin-socket (only with tables of engines)."
