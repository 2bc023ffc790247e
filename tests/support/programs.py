"""Servers started from their command line, asked a question, and ended by SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from support.servers import wait_for

QUESTION = "What is the capital of France?"


@contextlib.contextmanager
def program(
    words: Sequence[str],
    url: str,
    variables: Mapping[str, str],
    folder: Path,
    *,
    seconds: float = 60.0,
    stop: Callable[[int], int] = int,
    code: int = 0,
) -> Iterator[None]:
    """Run a server until the block ends, then end it and check its exit code.

    Args:
        url: the URL that answers 200 when the server is ready.
        seconds: the maximum time until the server is ready.
        stop: returns the process that gets SIGTERM; by default the one that was started.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            list(words), cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(url, process, seconds)
            yield
            os.kill(stop(process.pid), signal.SIGTERM)
            ended = process.wait(60)
            assert ended == code, f"{words[0]} ended with {ended}"
        except BaseException:
            output.seek(0)
            print(output.read().decode(errors="replace")[-5000:])
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def post(address: str, path: str, body: Mapping[str, Any], key: str | None = None) -> Any:
    """Return the JSON of a successful reply of a server's first model.

    Args:
        key: the API key.
    """
    with _client(address, key) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        reply = client.post(f"/v1/{path}", json={"model": model, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def capabilities(address: str, key: str | None = None) -> set[str]:
    """Return what a server's first model is made for."""
    with _client(address, key) as client:
        return set(client.get("/v1/models").json()["data"][0]["capabilities"])


def ask(address: str, fields: Mapping[str, Any] | None = None, key: str | None = None) -> str:
    """Return the answer of a server's first model to one question.

    Args:
        fields: more fields of the request.
        key: the API key.
    """
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "temperature": 0, **(fields or {})}
    return str(post(address, "chat/completions", body, key)["choices"][0]["message"]["content"])


def _client(address: str, key: str | None) -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=address, timeout=60, headers=headers)
