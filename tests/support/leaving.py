"""A caller that leaves its work at a chosen moment."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any

import pytest


async def leave_at(
    patch: pytest.MonkeyPatch, owner: Any, name: str, work: Coroutine[Any, Any, object]
) -> Any:
    """Cancel a call while its work in a thread is about to return from a function.

    Args:
        owner, name: the function, as an attribute.
        work: the call.

    Returns:
        what the function has returned the first time.
    """
    real, made, main = getattr(owner, name), list[Any](), threading.get_ident()
    begun, left = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        if threading.get_ident() != main and not made:
            made.append(found)
            begun.set()
            left.wait(5)
        return found

    with patch.context() as inside:
        inside.setattr(owner, name, slow)
        task = asyncio.ensure_future(work)
        assert await asyncio.to_thread(begun.wait, 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left.set()
    return made[0]


async def closes(descriptor: int) -> None:
    """Wait until a file is closed."""
    async with asyncio.timeout(5):
        while True:
            try:
                os.fstat(descriptor)
            except OSError:
                return
            await asyncio.sleep(0.01)
