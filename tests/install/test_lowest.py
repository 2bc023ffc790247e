"""Tests of Latimer with the lowest versions that `pyproject.toml` declares.

The tests of `test_extras.py` run with them, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from install.commands import imported, serving
from support.environments import QUESTION, Environment, ask, post
from support.pdf_files import pdf, pdf_url
from websockets.sync.client import connect

pytestmark = pytest.mark.timeout(1800)
ANSWER = "The capital of France is Paris."
SCHEMA = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
KEY = f"""
[keys.one]
digest = "sha256:{hashlib.sha256(b"one").hexdigest()}"
requests_per_minute = 2
"""


@pytest.fixture(scope="module")
def address(lowest: Environment, llama_server_url: str) -> Iterator[str]:
    """Return the address of `latimer serve` in front of llama-server, with a store in a file."""
    words = ("--store", "kept.db")
    with serving(lowest, llama_server_url, "--any-model", *words) as address:
        yield address


def test_every_module_imports(lowest: Environment) -> None:
    """All modules import, except that of Ray."""
    packages = ("latimer.adapter", "latimer.backends", "latimer.schemas", "latimer.conformance")
    assert imported(lowest, *packages, without="latimer.adapter.ray_serve") > 300


def test_it_checks_an_engine(lowest: Environment, llama_server_url: str) -> None:
    """`latimer check URL` names the engine, and `--help` describes the command."""
    assert "llama-server" in lowest.run("latimer", "check", llama_server_url).stdout
    assert "Usage: latimer serve" in lowest.run("latimer", "serve", "--help").stdout


def test_it_answers(address: str) -> None:
    """A chat has the engine's answer, and JSON that follows a schema."""
    assert ask(address) == ANSWER
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}
    assert json.loads(ask(address, {"response_format": form, "max_tokens": 40})) == {"n": 7}


def test_it_streams(address: str) -> None:
    """A stream has the words of the answer, and an end."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "stream": True}
    url = f"{address}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER


def test_it_stores(address: str) -> None:
    """A response is stored, retrieved and deleted."""
    made = post(address, "responses", {"input": QUESTION, "temperature": 0})
    url = f"{address}/v1/responses/{made['id']}"
    assert httpx2.get(url).json()["output"][0]["content"][0]["text"] == ANSWER
    assert httpx2.delete(url).json()["deleted"]
    assert httpx2.get(url).status_code == 404


def test_it_reads_a_pdf_file(address: str) -> None:
    """The text of a PDF file is part of the prompt."""
    file = {"type": "input_file", "filename": "a.pdf", "file_data": pdf_url(pdf("One " * 20))}
    content = [file, {"type": "input_text", "text": QUESTION}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 16}
    assert post(address, "responses", body)["usage"]["input_tokens"] > 40


def test_it_answers_over_a_websocket(address: str) -> None:
    """A WebSocket has the events of a response."""
    with connect(f"{address.replace('http', 'ws')}/v1/responses") as socket:
        body = {"model": "demo", "input": QUESTION, "temperature": 0, "store": False}
        socket.send(json.dumps({"type": "response.create", **body}))
        event = {"type": ""}
        while event["type"] != "response.completed":
            event = json.loads(socket.recv(60))
            assert event["type"] != "error", event
    assert event["response"]["output"][0]["content"][0]["text"] == ANSWER  # type: ignore[index]


def test_it_measures(address: str) -> None:
    """Requests are counted, in the form of Prometheus."""
    ask(address)
    lines = httpx2.get(f"{address}/metrics").text.splitlines()
    assert any(line.startswith("latimer_requests_total{") for line in lines)


@pytest.mark.parametrize("store", ["redis_url", "postgresql_url"])
def test_it_limits_a_key(
    lowest: Environment,
    llama_server_url: str,
    tmp_path: Path,
    store: str,
    request: pytest.FixtureRequest,
) -> None:
    """A key has as many requests as its limit in Redis, or in PostgreSQL, allows."""
    config = tmp_path / "latimer.toml"
    url = request.getfixturevalue(store)
    engine = f'[engines.a]\nurl = "{llama_server_url}"\n[models.demo]\nengines = ["a"]\n'
    config.write_text(f'{engine}[admission]\nstore = "{url}"\n{KEY}')
    with serving(lowest, "--config", str(config)) as address:
        body = {"model": "demo", "prompt": "One", "max_tokens": 1}
        headers = {"authorization": "Bearer one"}
        urls = [f"{address}/v1/completions"] * 3
        replies = [httpx2.post(one, json=body, headers=headers, timeout=60) for one in urls]
    assert [one.status_code for one in replies] == [200, 200, 429]


def test_it_stores_in_postgresql(
    lowest: Environment, llama_server_url: str, postgresql_url: str
) -> None:
    """A response is stored in PostgreSQL, and retrieved after a restart."""
    words = (llama_server_url, "--any-model", "--store", postgresql_url)
    with serving(lowest, *words) as address:
        made = post(address, "responses", {"input": QUESTION, "temperature": 0})
    with serving(lowest, *words) as address:
        assert httpx2.get(f"{address}/v1/responses/{made['id']}").json()["id"] == made["id"]
