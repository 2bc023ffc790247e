"""Trial compilations of grammars in another process, with limits on time and memory (`trial`)."""

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
# The number of trials that run in parallel: a slow one must not block the others.
AT_ONCE = 4
# The real time that a trial may take as a multiple of its CPU time, because other processes use the
# CPU as well; and the seconds between two polls.
PATIENCE, LOOK = 4, 0.005
_KEPT = 1 << 20


class Trials:
    """A cache of trials, by the grammar's text in llguidance's own format.

    Args:
        limits: the arguments of `llguidance.LLParserLimits`.
        seconds: the CPU time that a trial may take.
    """

    def __init__(self, limits: Mapping[str, int], seconds: int = TRIAL.most) -> None:
        self._arguments = [str(seconds), str(TRIAL_MEMORY.most), json.dumps(limits)]
        self._seconds = seconds
        # These threads only wait for processes.
        self._threads = ThreadPoolExecutor(AT_ONCE, "latimer-trials")
        self._tried: Memo[str, bool] = Memo(_KEPT, _size, self._threads)

    async def check(self, text: str) -> None:
        """Check that a grammar compiles within the limits.

        Raises:
            WrongGrammar: the grammar takes too much time or memory.
        """
        if not await self._tried.get(text, lambda: self._can_compile(text)):
            raise gbnf.WrongGrammar(
                f"it takes more than {self._seconds} s or {TRIAL_MEMORY.most} MiB to compile; use "
                "fewer or smaller intersections, repetitions and multiples"
            )

    def close(self) -> None:
        """Cancel trials that have not started, and forget all results."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._tried.clear()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603
            # -P keeps the script's folder out of `sys.path`.
            [sys.executable, "-P", str(_PROGRAM), *self._arguments],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def _can_compile(self, text: str) -> bool:
        if not sys.executable:
            # Python is embedded in another program, so there is no interpreter to start.
            return True
        try:
            process = self._started()
        except OSError:
            # No process can be started, so the grammar is accepted without a trial.
            return True
        try:
            assert process.stdin is not None
            try:
                process.stdin.write(text.encode())
                process.stdin.close()
            except OSError:
                # The process has ended already.
                return False
            end = time.monotonic() + PATIENCE * self._seconds
            while process.poll() is None and time.monotonic() < end:
                # If nobody waits for the result any more, `offload.Abandoned` is raised here.
                time.sleep(LOOK)
            return process.poll() == 0
        finally:
            process.kill()
            process.wait()


def _size(text: str, _can: bool) -> int:
    return 64 + len(text)
