"""The servers that `proxy.py` compares, each in front of the same fake llama-server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import load
from benchmarks.fake_engine import LAST, TOKENS, free_port, wait_for

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# Makes a request: its prompt, whether it is streamed, and its number of tokens.
Request = Callable[[str, bool, int], bytes]

NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/1; uwsgi_temp_path {folder}/2; scgi_temp_path {folder}/3;
  keepalive_requests 1000000000;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine; proxy_buffering off; proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"""
LITELLM = """
model_list:
  - model_name: fake
    litellm_params: {{model: openai/fake, api_base: "http://127.0.0.1:{engine}/v1", api_key: x}}
litellm_settings: {{telemetry: false}}
"""


class Peer(NamedTuple):
    """A server.

    Args:
        does: what it does with a request, in a few words.
        command: its command, for its port, the engine's, and a folder for its files.
        requests: its requests, by kind; those that pass bytes serve the engine's own.
        whole: the end of an answer that is not streamed.
        slowness: how many times slower than others it is, so that it gets less to do.
        modules: the packages that it imports, whose memory is measured too.
    """

    does: str
    command: Callable[[int, int, Path], Sequence[str]]
    requests: Mapping[str, Request]
    whole: bytes = b"}"
    slowness: int = 1


def _script(name: str) -> Callable[[int, int, Path], Sequence[str]]:
    return lambda port, engine, _folder: [sys.executable, str(HERE / name), str(port), str(engine)]


def _nginx(port: int, engine: int, folder: Path) -> Sequence[str]:
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(port=port, engine=engine, folder=folder))
    return [shutil.which("nginx") or "/usr/sbin/nginx", "-p", str(folder), "-c", str(config)]


# The options of a server that neither counts requests nor logs them.
UNSEEN = ("--no-metrics", "--no-log-requests")


def _latimer(options: Sequence[str]) -> Callable[[int, int, Path], Sequence[str]]:
    def command(port: int, engine: int, _folder: Path) -> Sequence[str]:
        serve = "import sys; from latimer.adapter.cli import main; main(sys.argv[1:])"
        address = f"http://127.0.0.1:{engine}"
        return [sys.executable, "-c", serve, "serve", address, "--port", str(port), *options]

    return command


def _litellm(python: Path) -> Callable[[int, int, Path], Sequence[str]]:
    def command(port: int, engine: int, folder: Path) -> Sequence[str]:
        config = folder / "litellm.yaml"
        config.write_text(LITELLM.format(engine=engine))
        program = str(python.parent / "litellm")
        return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]

    return command


# LiteLLM does not start without a key, and asks the network for prices.
LITELLM_ENVIRONMENT = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
}

NATIVE = {"chat": load.native, "completion": load.native}
OPENAI = {"chat": load.chat, "completion": load.completion}


def peers(litellm: Path | None, options: Sequence[str] = ()) -> dict[str, Peer]:
    """Return the servers that this machine has.

    Args:
        litellm: the Python of an environment with `litellm[proxy]`, or None.
        options: those of `latimer serve`.
    """
    found = {"direct": Peer("no proxy", _script("fake_engine.py"), NATIVE, LAST)}
    if shutil.which("nginx") or Path("/usr/sbin/nginx").exists():
        found["nginx"] = Peer("passes bytes", _nginx, NATIVE, LAST)
    found["aiohttp"] = Peer("passes bytes", _script("passing.py"), NATIVE, LAST)
    found["py-translate"] = Peer("translates", _script("translate.py"), OPENAI)
    found["Latimer"] = Peer("translates, checks", _latimer(options), OPENAI)
    if litellm is not None:
        requests = {"chat": load.chat}
        found["LiteLLM"] = Peer("parses, passes", _litellm(litellm), requests, slowness=20)
    return found


class Server:
    """A running server.

    Attributes:
        port: its port.
        pid: the id of its process.
        start_seconds: the time from its start to its first answer.
    """

    def __init__(self, peer: Peer, process: subprocess.Popen[bytes], port: int) -> None:
        self.peer = peer
        self.port = port
        self.pid = process.pid
        self.start_seconds = 0.0

    def cpu(self) -> float:
        """Return the microseconds that its threads, and those of its children, ran on a core."""
        return sum(map(_on_core, _processes(self.pid)))

    def memory(self) -> float:
        """Return the MB of its memory that are in RAM."""
        pages = [
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _processes(self.pid)
        ]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _on_core(pid: int) -> float:
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e3


def _processes(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(inner for child in children for inner in _processes(int(child)))]


@contextlib.contextmanager
def running(peer: Peer, engine: int | None, core: int) -> Iterator[Server]:
    """Run a server on a core.

    Args:
        engine: the port of the engine; None if the server is the engine.
    """
    port = free_port()
    environment = {
        **os.environ,
        **LITELLM_ENVIRONMENT,
        "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    # An installed package is compiled; a start must not compile it each time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            peer.command(port, engine or 0, Path(folder)),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        try:
            server = Server(peer, process, port)
            wait_for(port)
            first = peer.requests["chat"]("hello", False, TOKENS)
            asyncio.run(load.load(port, first, peer.whole, 1, 0.0))
            server.start_seconds = time.perf_counter() - start
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
