"""Tests that each example runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import httpx2
import pytest
from latimer.backends.llama_cpp import DEMO_MODEL
from support import gguf_files
from support.servers import free_port, llama_server, wait_for

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@contextmanager
def running(name: str, *arguments: str, path: str = "/") -> Iterator[str]:
    """Run an example server and yield its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / name, *arguments, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address + path, process)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def ask(base_url: str, api_key: str = "x") -> str:
    """Return the output of the client's example."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "openai_client.py", base_url, api_key],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_in_front_of_llama_server(llama_server_url: str) -> None:
    """The proxy example answers the client under the model name that it sets."""
    with running("in_front_of_llama_server.py", llama_server_url, path="/health") as address:
        assert ask(f"{address}/v1") == "The capital of France is Paris.\n"
        listed = httpx2.get(f"{address}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["gpt-4o-mini"]


@pytest.mark.parametrize(
    ("name", "prefix", "home"),
    [
        ("mounted_in_starlette.py", "/ai/v1", "Home"),
        ("mounted_in_fastapi.py", "/ai/v1", '{"page":"home"}'),
        ("as_middleware.py", "/v1", "Home"),
    ],
)
def test_inside_another_app(name: str, prefix: str, home: str) -> None:
    """An app with Latimer inside serves its own page and OpenAI's paths."""
    with running(name) as address:
        assert httpx2.get(address).text == home
        assert ask(address + prefix, "secret") == "The capital of France is Paris.\n"


def test_tools(llama_server_url: str) -> None:
    """In the tools example the model calls the function and answers with its result."""
    with running("in_front_of_llama_server.py", llama_server_url, path="/health") as address:
        done = subprocess.run(
            [sys.executable, EXAMPLES / "tools.py", f"{address}/v1"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    assert done.stdout == 'get_weather({"city": "Paris"})\nIt is 21 degrees in Paris.\n'


def test_every_example_is_tested() -> None:
    """Every example has a test."""
    tested = Path(__file__).read_text()
    assert all(path.name in tested for path in EXAMPLES.glob("*.py"))


def test_compare_quantizations(tmp_path: Path) -> None:
    """The example compares two quantizations, each scored by its own llama-server."""
    coarse = gguf_files.copy(
        DEMO_MODEL, tmp_path / "demo-q4.gguf", kind=gguf.GGMLQuantizationType.Q4_0
    )
    with llama_server(DEMO_MODEL) as one, llama_server(coarse) as other:
        done = subprocess.run(
            [sys.executable, EXAMPLES / "compare_quantizations.py", one, other],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line[1:])
    fine, rough = map(float, rows["perplexity"].split())
    assert 1 < min(fine, rough) < max(fine, rough) < 2
    assert float(rows["mean size of a change"]) > 0.01
    assert 90 < float(rows["same most likely token"].strip().rstrip("%")) <= 100
    assert int(rows["tokens"]) > 100
    assert "most was lost at" in done.stdout
