"""Work in threads, and results that are kept."""

from __future__ import annotations

import asyncio
import threading

import pytest
from latimer.backends import offload
from latimer.backends.offload import SMALL, Memo


async def test_only_large_work_leaves_the_loop() -> None:
    """Up to a size work is done where it is; beyond it in a thread, with its result or error."""
    here = threading.get_ident()
    assert await offload.run(SMALL, threading.get_ident) == here
    assert await offload.run(SMALL + 1, threading.get_ident) != here
    for size in (0, SMALL + 1):
        assert await offload.run(size, divmod, 7, 4) == (1, 3)
        with pytest.raises(ZeroDivisionError):
            await offload.run(size, divmod, 7, 0)


def memo(most_bytes: int) -> Memo[str, str]:
    """A memo whose results take as many bytes as they have letters."""
    return Memo(most_bytes, lambda _key, value: len(value))


async def test_a_result_is_worked_out_once() -> None:
    """Those who ask at once, and those who ask later, get one result."""
    kept, begun, may_end = memo(100), [], threading.Event()

    def work() -> str:
        begun.append(threading.get_ident())
        may_end.wait(10)
        return "value"

    tasks = [asyncio.create_task(kept.get("key", work)) for _ in range(8)]
    await asyncio.sleep(0.01)
    # Whoever leaves does not end what the others wait for.
    tasks[0].cancel()
    may_end.set()
    assert await asyncio.gather(*tasks[1:]) == ["value"] * 7
    assert await kept.get("key", work) == "value"
    assert len(begun) == 1
    assert begun[0] != threading.get_ident()


async def test_errors_are_raised_and_not_kept() -> None:
    """Everybody who waits gets the error; the next one tries again."""
    kept = memo(100)

    def fail() -> str:
        raise ValueError("no")

    found = await asyncio.gather(*(kept.get("key", fail) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [ValueError] * 3
    assert await kept.get("key", lambda: "now") == "now"


async def test_results_are_kept_within_a_bound() -> None:
    """What was used least recently goes first, and what is larger than the bound is not kept."""
    kept, made = memo(10), []

    async def get(key: str, size: int) -> None:
        def work() -> str:
            made.append(key)
            return "x" * size

        assert await kept.get(key, work) == "x" * size

    for key in ("a", "b", "a", "c", "a", "b"):
        await get(key, 4)
    assert made == ["a", "b", "c", "b"]
    await get("huge", 11)
    await get("huge", 11)
    assert made[4:] == ["huge", "huge"]
