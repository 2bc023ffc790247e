"""Tests of `make serve` on a new machine, with the README's client on another one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
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


def latimer_of(process: int) -> int:
    """Return the process of `latimer serve` that a process has started, through others or not."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "ppid=,pid=,args="], capture_output=True, check=True
    )
    children: dict[int, list[tuple[int, str]]] = {}
    for line in listed.stdout.decode().splitlines():
        parent, number, arguments = line.split(maxsplit=2)
        children.setdefault(int(parent), []).append((int(number), arguments))
    waiting = children.get(process, [])
    while waiting:
        child, arguments = waiting.pop()
        if "latimer serve" in arguments:
            return child
        waiting += children.get(child, [])
    raise AssertionError("latimer does not run")


@pytest.mark.parametrize(
    ("words", "seconds"),
    [((), 120), (("ENGINE=in-process",), 1500)],
    ids=["prebuilt", "in-process"],
)
def test_make_serve(
    words: Sequence[str],
    seconds: float,
    checkout: Callable[[], Path],
    client: Environment,
    noted: Callable[[str, float], None],
    tmp_path: Path,
) -> None:
    """`make serve` serves with either engine, answers the README's client, and ends on SIGTERM."""
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    new = {**variables(), "HOME": str(tmp_path), "LATIMER_PORT": port}
    snippet = next(one.text for one in blocks(README) if one.language == "python")
    start = time.monotonic()
    with program(
        ("make", "serve", *words),
        f"{address}/health",
        new,
        checkout(),
        seconds=seconds,
        stop=latimer_of,
    ):
        noted(" ".join(("make serve", *words)), start)
        answer = client.run("python", "-c", snippet.replace(HERE, address)).stdout
        assert answer == "The capital of France is Paris.\n"
        pieces = client.run("python", "-c", STREAM.replace(HERE, address)).stdout
        assert "Paris" in pieces
        assert pieces.count(",") > 3
