"""`latimer` as users run it, with measurements from inside.

    python tests/chaos/inside.py counted|timed|edited serve …

Each line on standard input is a command, and its result is one line of JSON on standard output.
`timed` measures each turn of the event loop, for which it uses asyncio's own. `edited` also gives
up an engine sooner than users would, and the command `renew` makes a new backend for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
from latimer.adapter import OpenAIAdapter
from latimer.adapter.cli import main
from latimer.backends.base import Backend
from latimer.backends.http import ConnectionPool
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_server import LlamaServer

# Seconds of CPU time that one turn of the event loop can take.
LONGEST_TURN = 0.050
# Time limits in seconds for pauses in a response and before it, of an engine with edited responses.
SILENCE, PATIENCE = 2.5, 5.0


class Turns:
    """The CPU time of the event loop's turns, with the stacks of the long ones."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.longest = 0.0
        self.held: list[dict[str, Any]] = []
        self._thread = 0
        self._began: float | None = None
        self._stacks: list[str] = []
        self._collecting = 0.0
        self._collects = False

    def measure(self) -> None:
        """Measure every turn from now on."""
        loop: Any = asyncio.SelectorEventLoop
        run_once = loop._run_once

        def measured(this: Any) -> None:
            self._collecting = 0.0
            if self._stacks:
                self._stacks = []
            self._thread = threading.get_ident()
            start, self._began = time.thread_time(), time.monotonic()
            run_once(this)
            spent, self._began = time.thread_time() - start, None
            if self._collects:
                # This turn ran `collect`.
                self._collects = False
                return
            # In steps of 0.05 ms.
            self.counts[int(spent * 20_000)] += 1
            self.longest = max(self.longest, spent)
            if spent > LONGEST_TURN:
                milliseconds = {"ms": spent * 1000, "collecting_ms": self._collecting * 1000}
                self.held.append({**milliseconds, "stacks": self._stacks})

        loop._run_once = measured
        gc.callbacks.append(self._note_collection)
        threading.Thread(target=self._watch, daemon=True).start()

    def collect(self) -> None:
        """Run the garbage collector, in a turn that does not count."""
        self._collects = True
        gc.collect()

    def _note_collection(self, phase: str, _info: object) -> None:
        if threading.get_ident() == self._thread:
            self._collecting += time.thread_time() * (1 if phase == "stop" else -1)

    def _watch(self) -> None:
        """Record the stacks of the loop's thread during long turns."""
        while True:
            time.sleep(0.02)
            began = self._began
            if began is not None and time.monotonic() - began > 0.04 and len(self._stacks) < 20:
                stack = traceback.extract_stack(sys._current_frames().get(self._thread))
                if stack and stack[-1].name != "select":
                    ours = [frame for frame in stack if "/latimer/" in frame.filename][-4:]
                    lines = traceback.StackSummary([*stack[-3:], *ours]).format()
                    self._stacks.append("".join(lines))


class Renewed:
    """A backend for an engine, which can be replaced by a new one."""

    def __init__(self, kind: str, address: str) -> None:
        self._kind, self._address = kind, address
        self._backend = self._made()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _made(self) -> Backend:
        if self._kind == "koboldcpp":
            pool = ConnectionPool(self._address, SILENCE, PATIENCE)
            return KoboldCpp(self._address, silence=0.5, client=pool)
        pool = ConnectionPool(self._address, SILENCE, PATIENCE, "/health")
        return LlamaServer(self._address, client=pool)

    async def renew(self) -> None:
        """Make a new backend, and close the one before."""
        before, self._backend = self._backend, self._made()
        await before.aclose()


class Inside:
    """The running server, and the commands about it."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.renewed: Renewed | None = None

    def note_loop(self) -> None:
        """Note the event loop of the server when it starts."""
        serve = uvicorn.Server.serve

        async def noting(server: uvicorn.Server, sockets: Any = None) -> None:
            self.loop = asyncio.get_running_loop()
            await serve(server, sockets)

        uvicorn.Server.serve = noting  # type: ignore[assignment,method-assign]

    def renew_backend(self, words: list[str]) -> None:
        """Let the app have a backend that can be renewed, for the engine in the arguments."""
        self.renewed = renewed = Renewed(words[words.index("--backend") + 1], words[1])
        usual = OpenAIAdapter.__init__

        def init(app: OpenAIAdapter, _backend: Backend, *args: Any, **options: Any) -> None:
            usual(app, renewed, *args, **options)

        OpenAIAdapter.__init__ = init  # type: ignore[assignment,method-assign]

    def answer(self) -> None:
        """Run the commands until the input ends."""
        for line in sys.stdin:
            try:
                found = self._run(line.strip())
            except Exception as error:
                found = {**self._state(), "failed": repr(error)}
            print(json.dumps(found), flush=True)

    def _run(self, command: str) -> dict[str, Any]:
        assert self.loop is not None
        if command == "renew" and self.renewed is not None:
            asyncio.run_coroutine_threadsafe(self.renewed.renew(), self.loop).result(30)
        elif command == "begin":
            self.turns.counts.clear()
            self.turns.longest = 0.0
        elif command == "settle":
            # A coroutine or task that was never awaited or retrieved is logged when it is
            # collected.
            self.loop.call_soon_threadsafe(self.turns.collect)
            gc.collect()
        elif command == "tasks":
            return {"tasks": self._count()}
        elif command == "stacks":
            return {"stacks": [*_threads(), *_tasks(self.loop)]}
        return self._state()

    def _state(self) -> dict[str, Any]:
        held, self.turns.held = self.turns.held, []
        turns = dict(self.turns.counts.copy())
        return {"held": held, "longest_ms": self.turns.longest * 1000, "turns": turns}

    def _count(self) -> int:
        with contextlib.suppress(RuntimeError):
            return len(asyncio.all_tasks(self.loop))
        return 0


def _threads() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"thread {names.get(ident)}\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    ]


def _tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    with contextlib.suppress(RuntimeError):
        return [
            f"task {task.get_name()}: {' > '.join(_waiting(task.get_coro()))}"
            for task in asyncio.all_tasks(loop)
        ]
    return []


def _waiting(coroutine: Any) -> list[str]:
    """Return the frames in which a coroutine waits, outermost first."""
    found: list[str] = []
    while coroutine is not None and len(found) < 40:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is None:
            found.append(repr(coroutine)[:200])
            break
        code = frame.f_code
        found.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return found


if __name__ == "__main__":
    way, *words = sys.argv[1:]
    inside = Inside()
    inside.note_loop()
    if way != "counted":
        # A turn of uvloop cannot be measured.
        sys.modules["uvloop"] = None  # type: ignore[assignment]
        inside.turns.measure()
    if way == "edited":
        inside.renew_backend(words)
    threading.Thread(target=inside.answer, daemon=True).start()
    main(words)
