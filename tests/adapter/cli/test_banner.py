"""Tests of what `latimer serve` shows on a terminal, on every engine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter.cli.banner import Server, command_of, lines_of, rows_of
from latimer.adapter.settings import Settings
from latimer.backends.base import EmbeddingModel, Model
from latimer.backends.llama_cpp import DEMO_MODEL
from support.servers import QUIET

URL = "http://127.0.0.1:8000/v1"
MODEL = Model("m.Q4_K_M.gguf", 4096, None, "", "", False, "fp", 0, sizes={"size": 10**9}, places=4)
ENVIRONMENT = {"LATIMER_REASONING_KEY": "", "NO_COLOR": "1", "TERM": "xterm"}


def server(*, is_local: bool = True, **settings: Any) -> Server:
    """Return a server over an engine at a URL."""
    own = Settings.load(None, **{"model": "http://127.0.0.1:1", **settings})
    return Server(own, URL, is_local)


def test_an_engine_at_a_url_has_the_facts_that_it_reports() -> None:
    """The rows have the quantization, the size, the context and the places of an engine."""
    rows = dict(rows_of(server(), MODEL, "llama-server"))
    assert rows == {
        "model": "m.Q4_K_M.gguf, Q4_K_M, 1.0 GB",
        "engine": "llama-server",
        "context": "4,096 tokens; requests: 4 at a time",
        "API": URL,
        "playground": "http://127.0.0.1:8000/",
        "key": "none; only this machine can connect",
        "stop": "Ctrl-C",
    }


def test_the_memory_of_a_llama_server_is_that_of_its_own_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV cache has the context of the command, and its type."""
    settings: dict[str, Any] = {
        "model": str(DEMO_MODEL),
        "backend": "llama-server",
        "cache_type": "q8_0",
    }
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    model = replace(MODEL, context=2048)
    asked = dict(rows_of(server(**settings, context=4096), model, "llama-server"))
    assert "KV cache 6.7 MB for 4,096 tokens" in asked["memory"]
    default = dict(rows_of(server(**settings), model, "llama-server"))
    assert "KV cache 13.4 MB for 8,192 tokens" in default["memory"]
    # No slot uses more than the 2,048 tokens that the model was trained for.
    two = dict(rows_of(server(**settings, parallel=2), model, "llama-server"))
    assert "KV cache 6.7 MB for 4,096 tokens" in two["memory"]


def test_the_state_of_keys() -> None:
    """The row of keys warns of an open server, and no key is shown."""
    rows = dict(rows_of(server(is_local=False), MODEL, "x"))
    assert rows["key"] == "none, and other machines can connect; --api-key closes the server"
    closed = server(api_key=("secret-one", "secret-two"), playground=False)
    rows = dict(rows_of(closed, MODEL, "x"))
    assert rows["key"].startswith("required, one of 2; this call reads it from the variable")
    assert "playground" not in rows
    command = " ".join(command_of(closed, None, None))
    assert '"Authorization: Bearer $LATIMER_API_KEY"' in command
    assert "secret" not in str(rows) + command


def test_a_call_that_the_model_can_answer() -> None:
    """A model that embeds, and one that ranks, get a call of their own paths."""
    for pooling, path in (("mean", "/v1/embeddings"), ("rank", "/v1/rerank")):
        task = EmbeddingModel(64, pooling, 512, generates=False)  # type: ignore[arg-type]
        assert command_of(server(), None, task)[0].startswith(f"curl http://127.0.0.1:8000{path}")
    quoted = command_of(server(), "it's", None)[-1]
    assert json.loads(subprocess.check_output(["bash", "-c", f"printf %s {quoted[5:]}"])) == {
        "model": "it's",
        "messages": [{"role": "user", "content": "Hello"}],
    }


def test_lines_fit_a_narrow_terminal() -> None:
    """Values are wrapped, addresses stay whole, and names of models cannot draw."""
    address = "http://example.test:8000/a/long/path/v1"
    rows = [("model", "a b " * 20), ("API", address), ("x", "\x1b[2J")]
    lines = [*lines_of(rows, 40, is_plain=True)]
    assert all(len(line) <= 40 for line in lines if address not in line)
    assert f"  API    {address}" in lines
    assert lines[-1] == "  x      \\x1b[2J"
    assert "\x1b[2m" in next(iter(lines_of(rows, 80, is_plain=False)))


@contextlib.contextmanager
def on_terminal(*arguments: str, columns: int = 80, **environment: str) -> Iterator[str]:
    """Run `latimer serve` on a terminal; yield what it has printed with its command."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    own = {**os.environ, **QUIET, "LATIMER_PORT": "0", "NO_COLOR": "1", "TERM": "xterm"}
    # These would count before the size of the terminal.
    own.pop("COLUMNS", None)
    own.pop("LINES", None)
    process = subprocess.Popen(
        ["latimer", "serve", *arguments],
        stdin=its, stdout=its, stderr=its, start_new_session=True, env={**own, **environment},
    )  # fmt: skip
    os.close(its)
    text, end = "", time.monotonic() + 60
    try:
        while not re.search(r"-d '.*'\r\n", text):
            assert time.monotonic() < end, text
            if select.select([ours], [], [], 1.0)[0]:
                text += os.read(ours, 65536).decode(errors="replace")
        yield text.replace("\r\n", "\n")
    finally:
        process.send_signal(signal.SIGTERM)
        os.close(ours)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def answer_of(text: str, **environment: str) -> Any:
    """Run the command in a text, as it would be pasted; return the JSON of the response."""
    command = text[text.index("curl ") :].strip()
    done = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl -sS --retry 20 --retry-connrefused ")],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_the_demo_model_in_process(tmp_path: Path) -> None:
    """The first line stays, the rows fit 60 columns, and the pasted command is answered."""
    keys = tmp_path / "my keys"
    keys.write_text("\nsecret\n")
    # The terminal has the lines of the start at every level.
    options = ("--api-key-file", str(keys), "--context", "4096", "--log-level", "error")
    with on_terminal(*options, columns=60) as text:
        first, *rows = text[text.index("Latimer serves") :].split("\n")
        assert first.startswith("Latimer serves demo (llama.cpp in process, 4096 tokens) at http:")
        assert "trained for 2,048 tokens, not 4,096, so its text gets worse" in rows[0]
        assert "  model       demo, Q8_0, 2.1 MB" in rows
        assert any(row.startswith("  memory      about ") for row in rows)
        shown = [row for row in rows[1:] if row.startswith("  ") and not row.startswith("  -")]
        assert not [row for row in shown if len(row) > 60], text
        assert "random" not in text
        assert "secret" not in text
        assert "\x1b" not in text
        reply = answer_of(text)
    assert reply["choices"][0]["message"]["content"] == "Hello! How can I help you today?"


@pytest.mark.slow
def test_a_llama_server_that_latimer_starts() -> None:
    """A child llama-server has its build and its memory; the context that it uses is named."""
    options = ("--backend", "llama-server", "--context", "4096")
    with on_terminal(str(DEMO_MODEL), *options, LATIMER_API_KEY="one,two") as text:
        assert "so the context is 2,048 tokens" in text
        assert re.search(r"  engine      llama-server \(b", text)
        # Of which one request can use the 2,048 tokens that the model was trained for.
        assert "KV cache 12.6 MB for 4,096 tokens" in text
        assert "choices" in answer_of(text, LATIMER_API_KEY="one,two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), ("--workers", "2"), ("--limits", "openai"), ("--strict", "--model-name", "it's")],
    ids=["one", "workers", "limits", "strict"],
)
def test_an_engine_at_a_url(llama_server_url: str, options: tuple[str, ...]) -> None:
    """A llama-server at a URL shows its facts, the banner is printed once with workers, and the
    command has a model where a request must name one."""
    with on_terminal(llama_server_url, *options) as text:
        assert "  model       demo.gguf" in text
        assert ("  workers     2 processes" in text) == ("--workers" in options)
        assert ('"model": ' in text) == (options[:1] in (("--limits",), ("--strict",)))
        assert "choices" in answer_of(text)
        assert text.count("curl ") == 1


@pytest.mark.slow
def test_a_koboldcpp(koboldcpp_replay: tuple[str, Any]) -> None:
    """A koboldcpp runs one request at a time, and has its version."""
    with on_terminal(koboldcpp_replay[0]) as text:
        assert "requests: one at a time" in text
        assert re.search(r"  engine      koboldcpp \(1\.", text)


@pytest.mark.slow
def test_a_fleet(tmp_path: Path, llama_server_url: str) -> None:
    """A fleet lists models with their engines, and its command names a model."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'admin_key = "operator"\n[engines.one]\nurl = "{llama_server_url}"\n'
        '[models.a]\nengines = ["one"]\n'
    )
    with on_terminal("--config", str(file)) as text:
        assert "  models      a (one)\n" in text
        assert "  operator    latimer ps http://127.0.0.1:" in text
        assert answer_of(text)["model"] == "a"
