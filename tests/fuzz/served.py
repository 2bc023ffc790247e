"""The process under test: the adapter over one engine, with measurements from inside.

    python tests/fuzz/served.py ENGINE [ADDRESS]

Each line on standard input is a command, and its result is one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import logging
import os
import resource
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvicorn
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from latimer.backends.http import ConnectionPool
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.backends.offload import Abandoned
from support.servers import free_port

# Seconds of CPU time that one turn of the event loop can take.
LONGEST_TURN = 0.050
# Time limits in seconds for pauses in a response and before it, much shorter than for users:
# for a valid engine, and for one whose responses are edited.
SILENCE, PATIENCE = 10.0, 15.0
EDITED_SILENCE, EDITED_PATIENCE = 2.5, 5.0


class Loop(asyncio.SelectorEventLoop):
    """An event loop that measures the CPU time of its turns, and records the long ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Counter[int] = Counter()
        self.longest = 0.0
        self.held: list[dict[str, Any]] = []
        self.began: float | None = None
        self.seen: list[str] = []
        self.collecting = 0.0
        self.collects = False

    def collect(self) -> None:
        """Run the garbage collector, in a turn that does not count."""
        self.collects = True
        gc.collect()

    def _run_once(self) -> None:
        self.collecting = 0.0
        if self.seen:
            self.seen = []
        start = time.thread_time()
        self.began = time.monotonic()
        super()._run_once()  # type: ignore[misc]
        spent = time.thread_time() - start
        self.began = None
        if self.collects:
            # This turn ran `collect`.
            self.collects = False
            return
        # In steps of 0.05 ms.
        self.turns[int(spent * 20_000)] += 1
        self.longest = max(self.longest, spent)
        if spent > LONGEST_TURN:
            note = {
                "ms": spent * 1000,
                "collecting_ms": self.collecting * 1000,
                "stacks": self.seen,
            }
            self.held.append(note)


def backend_of(engine: str, address: str) -> Backend:
    """Return a backend of minimal size."""
    if engine == "llama_cpp":
        return LlamaCpp(context=512, parallel=8, threads=1, cache_memory=16 << 20, embeddings=True)
    if engine == "llama_server":
        pool = ConnectionPool(address, SILENCE, PATIENCE, "/health")
        return LlamaServer(address, client=pool)
    times = EDITED_SILENCE, EDITED_PATIENCE
    if engine == "llama_server_edited":
        return LlamaServer(address, client=ConnectionPool(address, *times, "/health"))
    return KoboldCpp(address, silence=0.5, client=ConnectionPool(address, *times))


class Served:
    """The app in its server, with records of the problems of both."""

    def __init__(self, engine: str, address: str) -> None:
        self._engine = (engine, address)
        self._app = self._made()
        self.port = free_port()
        self.problems: list[str] = []
        self.loop = Loop()
        self.thread = 0
        config = uvicorn.Config(
            self._call, host="127.0.0.1", port=self.port, log_config=None, log_level="warning",
            access_log=False, lifespan="off", interface="asgi3", ws="none", proxy_headers=False,
            server_header=False, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self.server = uvicorn.Server(config)

    def _made(self) -> OpenAIAdapter:
        return OpenAIAdapter(backend_of(*self._engine), any_model=True)

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    async def _renew(self) -> None:
        before, self._app = self._app, self._made()
        await before.aclose()

    def run(self) -> None:
        """Serve until the server is stopped."""
        self.thread = threading.get_ident()
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.server.serve())

    def watch(self) -> None:
        """Record the stacks of the loop's thread during long turns."""
        while not self.server.should_exit:
            time.sleep(0.02)
            began = self.loop.began
            if began is not None and time.monotonic() - began > 0.04 and len(self.loop.seen) < 20:
                stack = traceback.extract_stack(sys._current_frames().get(self.thread))
                if stack and stack[-1].name != "select":
                    ours = [frame for frame in stack if "/latimer/" in frame.filename][-4:]
                    self.loop.seen.append(
                        "".join(traceback.StackSummary([*stack[-3:], *ours]).format())
                    )

    def answer(self, command: str) -> dict[str, Any]:
        """Run a command and return its result."""
        if command == "renew":
            asyncio.run_coroutine_threadsafe(self._renew(), self.loop).result(30)
        elif command == "settle":
            # A coroutine or task that was never awaited or retrieved is logged when it is
            # collected.
            self.loop.call_soon_threadsafe(self.loop.collect)
            gc.collect()
        elif command == "stacks":
            return {"stacks": self._stacks()}
        return self._state()

    def _state(self) -> dict[str, Any]:
        problems, self.problems = self.problems, []
        held, self.loop.held = self.loop.held, []
        with contextlib.suppress(RuntimeError):
            tasks = len(asyncio.all_tasks(self.loop))
        return {
            "problems": problems,
            "held": held,
            "longest_ms": self.loop.longest * 1000,
            "turns": dict(self.loop.turns.copy()),
            "tasks": tasks,
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
            "memory_kib": memory_kib(),
        }

    def _stacks(self) -> list[str]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found: list[str] = [
            f"thread {names.get(ident)}\n" + "".join(traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
        ]
        with contextlib.suppress(RuntimeError):
            found += [
                f"task {task.get_name()}: {' > '.join(waiting(task.get_coro()))}"
                for task in asyncio.all_tasks(self.loop)
            ]
        return found


def waiting(coroutine: Any) -> list[str]:
    """Return the frames in which a coroutine waits, outermost first."""
    found: list[str] = []
    while coroutine is not None and len(found) < 40:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            found.append(repr(coroutine)[:200])
            break
        found.append(
            f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        )
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return found


def memory_kib() -> int:
    """Return the memory of this process, or its peak if the current value is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * (resource.getpagesize() // 1024)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Notes(logging.Handler):
    """A log handler that keeps errors and warnings, except for those that clients cause."""

    EXPECTED = ("Invalid HTTP request received", "Unsupported upgrade request", "No supported Web")

    def __init__(self, served: Served) -> None:
        super().__init__(logging.WARNING)
        self._served = served

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        text = self.format(record)
        if not text.startswith(self.EXPECTED) and len(self._served.problems) < 50:
            self._served.problems.append(f"{record.name}: {text}"[:8_000])


def note_everything(served: Served) -> None:
    """Record every warning and every unhandled exception of this process."""
    logging.getLogger().addHandler(Notes(served))
    logging.captureWarnings(True)
    warnings.simplefilter("default")

    def unraisable(error: Any) -> None:
        # Work that is ended during a deallocation is ended once more; `serve` hides this too.
        if issubclass(error.exc_type, Abandoned):
            return
        served.problems.append(f"unraisable in {error.object!r}: {error.exc_value!r}"[:8_000])

    def in_thread(error: Any) -> None:
        lines = traceback.format_exception(error.exc_type, error.exc_value, error.exc_traceback)
        served.problems.append("thread: " + "".join(lines)[-8_000:])

    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    started = [0.0]

    def collected(phase: str, _info: object) -> None:
        if threading.get_ident() == served.thread:
            if phase == "start":
                started[0] = time.thread_time()
            else:
                served.loop.collecting += time.thread_time() - started[0]

    gc.callbacks.append(collected)


def main(engine: str, address: str = "") -> None:
    """Serve, and run commands until the input ends."""
    faulthandler.enable()
    served = Served(engine, address)
    note_everything(served)
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    while not served.server.started:
        assert thread.is_alive(), "uvicorn did not start"
        time.sleep(0.01)
    threading.Thread(target=served.watch, daemon=True).start()
    # As in `latimer serve`.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 4, 1_000)
    print(json.dumps({"port": served.port}), flush=True)
    for line in sys.stdin:
        try:
            found = served.answer(line.strip())
        except Exception as error:
            found = {**served._state(), "failed": repr(error)}
        print(json.dumps(found), flush=True)
    served.server.should_exit = True
    thread.join(10)


if __name__ == "__main__":
    main(*sys.argv[1:])
