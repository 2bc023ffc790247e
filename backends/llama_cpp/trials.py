"""Finds out in another process whether a grammar can be compiled in a moment (`trial`)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...schemas.limits import TRIAL, TRIAL_MEMORY
from ..grammar import gbnf
from ..offload import Memo

_PROGRAM = Path(__file__).with_name("trial.py")
# Trials at a time: a hard one must not keep others waiting.
AT_ONCE = 4
# How many times longer one may take where others use the processor, and seconds between two looks.
PATIENCE, LOOK = 4, 0.005
_KEPT = 1 << 20


class Trials:
    """Grammars that were tried, by their text in llguidance's own format.

    Args:
        limits: of llguidance's parser, as `llguidance.LLParserLimits` takes them.
        seconds: of CPU time that one may take.
    """

    def __init__(self, limits: Mapping[str, int], seconds: int = TRIAL.most) -> None:
        self._arguments = [str(seconds), str(TRIAL_MEMORY.most), json.dumps(limits)]
        self._seconds = seconds
        # They wait and compute nothing.
        self._threads = ThreadPoolExecutor(AT_ONCE, "latimer-trials")
        self._tried: Memo[str, bool] = Memo(_KEPT, _size, self._threads)

    async def check(self, text: str) -> None:
        """Return when a grammar was compiled in time.

        Raises:
            WrongGrammar: it was not.
        """
        if not await self._tried.get(text, lambda: self._can_compile(text)):
            raise gbnf.WrongGrammar(
                f"it takes more than {self._seconds} s or {TRIAL_MEMORY.most} MiB to prepare; use "
                "fewer or smaller intersections, repetitions and multiples"
            )

    def close(self) -> None:
        """End what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._tried.clear()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603
            # Its folder is no place to import from.
            [sys.executable, "-P", str(_PROGRAM), *self._arguments],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _can_compile(self, text: str) -> bool:
        if not sys.executable:
            # Python is part of another program, which is no Python to start.
            return True
        try:
            process = self._started()
        except OSError:
            # Where no process can be started, nothing can be tried.
            return True
        try:
            assert process.stdin is not None
            try:
                process.stdin.write(text.encode())
                process.stdin.close()
            except OSError:
                # It has ended already.
                return False
            end = time.monotonic() + PATIENCE * self._seconds
            while process.poll() is None and time.monotonic() < end:
                # Here the work ends when nobody waits for it any more.
                time.sleep(LOOK)
            return process.poll() == 0
        finally:
            process.kill()
            process.wait()


def _size(text: str, _can: bool) -> int:
    return 64 + len(text)
