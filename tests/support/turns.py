"""Measurement of an event loop's iterations."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import uvicorn

from support.servers import free_port

# More turns than it takes until all who wait for an event have run. A lock wakes one in a turn.
FEW = 8


async def turns_after_the_first(calls: Iterable[Coroutine[Any, Any, object]]) -> int:
    """Make calls at once; return the turns from the end of the first one to that of the last."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    count = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        count += 1
    await asyncio.gather(*tasks)
    return count


def silence(work: Callable[[], Any]) -> float:
    """Return the longest time in which other threads did not run while one worked, in seconds."""
    worker = threading.Thread(target=work)
    longest, last = 0.0, time.perf_counter()
    worker.start()
    while worker.is_alive():
        time.sleep(0.0002)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop that records its longest iteration, in seconds of its thread's CPU time.

    Waiting, other threads and other programs do not count.
    """

    longest = 0.0

    def _run_once(self) -> None:
        start = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, time.thread_time() - start)


@contextlib.contextmanager
def measured(make_app: Callable[[], Any]) -> Iterator[tuple[str, MeasuredLoop]]:
    """Serve an ASGI app with uvicorn on a measured event loop; yield its address and the loop.

    The garbage collector is configured as in `latimer serve`. Frozen objects stay frozen, since
    the collected tests are among them.
    """
    port = free_port()
    config = uvicorn.Config(make_app(), host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    runner = asyncio.Runner(loop_factory=MeasuredLoop)
    loop = runner.get_loop()
    assert isinstance(loop, MeasuredLoop)

    def run() -> None:
        with runner:
            runner.run(server.serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn did not start"
        time.sleep(0.01)
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 4, 1_000)
    try:
        yield f"http://127.0.0.1:{port}", loop
    finally:
        gc.set_threshold(*usual)
        server.should_exit = True
        thread.join(30)
