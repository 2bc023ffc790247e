"""A trace of the engine's steps, in the JSON format that Perfetto and Chrome open.

Each span has the CPU time of its thread; the rest of its duration is waiting: for a core, for the
GIL, or for llama.cpp's other threads. It also has the CPU time of the event loop's thread and of
the whole process meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("latimer")

_CLOCKS = ("cpu_us", "event_loop_cpu_us", "process_cpu_us")
_WAIT, _DELIVER = "wait for the event loop", "deliver"


class Trace:
    """A file of spans. Only the engine's thread may call `mark`, and only the event loop `deliver`.

    Args:
        path: the file, which is overwritten.
        loop: the identifier of the event loop's thread.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, loop: int) -> None:
        # The format permits a list without an end, which a killed process leaves.
        self._file = path.open("w", buffering=1 << 16)
        self._file.write("[\n")
        self._events: deque[tuple[str, int, int, int, dict[str, int]]] = deque()
        self._clock, self._of_loop = time.pthread_getcpuclockid(loop), 0
        self._waits = 0
        # The names of the threads, by their identifiers.
        self._threads: dict[int, str] = {}
        self._last = self._now()

    def mark(self, name: str, **counts: int) -> None:
        """End a span, which began at the mark before it, and note some numbers with it."""
        last, self._last = self._last, self._now()
        used = [(end - begin) // 1000 for begin, end in zip(last[1:], self._last[1:], strict=True)]
        found = {**dict(zip(_CLOCKS, used, strict=True)), **counts}
        self._add(name, last[0], self._last[0], found)

    def deliver(self, posted: int, begun: int) -> None:
        """Note that the event loop has received what a step posted at some nanosecond."""
        self._add(_WAIT, posted, begun, {})
        self._add(_DELIVER, begun, time.perf_counter_ns(), {})

    def write(self) -> None:
        """Write the spans that ended; after an error, none are written any more."""
        try:
            self._write()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        log.warning("The trace has ended, because its file cannot be written: %s.", error.strerror)
        with suppress(OSError):
            self._file.close()
        self._file = Path(os.devnull).open("w")  # noqa: SIM115

    def _write(self) -> None:
        for _ in range(len(self._events)):
            name, begun, ended, thread, found = self._events.popleft()
            event: dict[str, object] = {"name": name, "pid": os.getpid(), "tid": thread}
            if name == _WAIT:
                # Waits overlap, which the spans of a thread must not.
                self._waits += 1
                event |= {"cat": "hand over", "id": self._waits}
                self._put(event | {"ph": "b", "ts": begun / 1000})
                self._put(event | {"ph": "e", "ts": ended / 1000})
                continue
            self._threads[thread] = "event loop" if name == _DELIVER else "engine"
            span = {"ph": "X", "ts": begun / 1000, "dur": (ended - begun) / 1000, "args": found}
            self._put(event | span)

    def _put(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        """Write the rest and the names of the threads, and close the file."""
        self.write()
        own = {"ph": "M", "pid": os.getpid()}
        last = {**own, "name": "process_name", "args": {"name": "latimer"}}
        try:
            for thread, name in self._threads.items():
                self._put({**own, "name": "thread_name", "tid": thread, "args": {"name": name}})
            self._file.write(f"{json.dumps(last)}]\n")
            self._file.flush()
        except OSError as error:
            self._end(error)
        self._file.close()

    def _add(self, name: str, begun: int, ended: int, found: dict[str, int]) -> None:
        self._events.append((name, begun, ended, threading.get_native_id(), found))

    def _now(self) -> tuple[int, int, int, int]:
        """Return the time, and the CPU times of this thread, the event loop and the process."""
        # The event loop's thread may have ended.
        with suppress(OSError):
            self._of_loop = time.clock_gettime_ns(self._clock)
        return time.perf_counter_ns(), time.thread_time_ns(), self._of_loop, time.process_time_ns()
