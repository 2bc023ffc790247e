"""`latimer` as users run it, with a count of its event loop's tasks.

    python tests/soak/launched.py serve …

The result of each line on standard input is a line with the number of tasks.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import uvicorn
from latimer.adapter.cli import main

_loops: list[asyncio.AbstractEventLoop] = []
_serve = uvicorn.Server.serve


async def _noting(self: uvicorn.Server, sockets: Any = None) -> None:
    _loops.append(asyncio.get_running_loop())
    await _serve(self, sockets)


async def _count() -> int:
    return len(asyncio.all_tasks()) - 1


def _answer() -> None:
    for _ in sys.stdin:
        print(asyncio.run_coroutine_threadsafe(_count(), _loops[-1]).result(), flush=True)


if __name__ == "__main__":
    uvicorn.Server.serve = _noting  # type: ignore[method-assign]
    threading.Thread(target=_answer, daemon=True).start()
    main(sys.argv[1:])
