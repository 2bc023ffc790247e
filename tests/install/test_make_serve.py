"""Tests of `make serve` on a new machine, with the README's client on another one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.documents import blocks
from support.environments import Environment, program, variables
from support.servers import free_port

# llama.cpp is compiled if pip's cache has no wheel of it.
pytestmark = pytest.mark.timeout(1800)
README = Path(__file__).parent.parent.parent / "README.md"
HERE = "http://127.0.0.1:8000"
STREAM = f"""
from openai import OpenAI

client = OpenAI(base_url="{HERE}/v1", api_key="unused")
question = {{"role": "user", "content": "What is the capital of France?"}}
stream = client.chat.completions.create(model="demo", messages=[question], stream=True)
print([chunk.choices[0].delta.content or "" for chunk in stream])
"""


def descendant(process: int) -> int:
    """Return the last process of a chain in which each one has started the next."""
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,pid="], capture_output=True, check=True)
    parents = [line.split() for line in listed.stdout.decode().splitlines()]
    children = {int(parent): int(child) for parent, child in parents}
    while process in children:
        process = children[process]
    return process


def test_make_serve(
    checkout: Callable[[], Path],
    client: Environment,
    noted: Callable[[str, float], None],
    tmp_path: Path,
) -> None:
    """`make serve` installs and serves, answers the README's client, and exits on SIGTERM."""
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    new = {**variables(), "HOME": str(tmp_path), "LATIMER_PORT": port}
    snippet = next(one.text for one in blocks(README) if one.language == "python")
    start = time.monotonic()
    with program(
        ("make", "serve"), f"{address}/health", new, checkout(), seconds=1500, stop=descendant
    ):
        noted("make serve", start)
        answer = client.run("python", "-c", snippet.replace(HERE, address)).stdout
        assert answer == "The capital of France is Paris.\n"
        pieces = client.run("python", "-c", STREAM.replace(HERE, address)).stdout
        assert "Paris" in pieces
        assert pieces.count(",") > 3
