"""Run a script in a process of its own, with limits on CPU time and memory.

Some libraries cannot be interrupted, and some short inputs take them minutes and gigabytes. This
file is also the script of that process: it sets the limits, and runs the script that it is given.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, NamedTuple

# Seconds between two looks at whether the caller still waits. `communicate` ignores what is ready
# if its time is over then, so this is longer than a wait for the interpreter lock.
LOOK = 0.05


class Ended(NamedTuple):
    """The end of a script.

    Args:
        status: the exit status; negative if a signal ended the process, None if time ran out.
        output: the bytes that the script wrote to standard output.
    """

    status: int | None
    output: bytes = b""


def run(
    script: str | os.PathLike[str],
    data: bytes | IO[bytes],
    *arguments: str,
    cpu: int,
    memory: int,
    wait: float,
    output: IO[bytes] | None = None,
) -> Ended:
    """Run a script with some bytes as its standard input, and return its end.

    Call it in a thread. The process is killed if the caller's work is abandoned (`offload`).

    Args:
        script: a file that imports nothing from Latimer, so that the process starts fast.
        data: the bytes; or a file that has them, of which the script must seek the beginning.
        output: a file for the standard output of the script, which is then not returned.
        cpu: the seconds of CPU time that the process may take.
        memory: the bytes of address space that it may take.
        wait: the seconds after which it is killed, because other processes use the CPU as well.

    Raises:
        OSError: no process can be started.
    """
    # The script of the process has no package.
    from . import offload

    source = subprocess.PIPE if isinstance(data, bytes) else data
    target = subprocess.PIPE if output is None else output
    with offload.shielded() as check:
        process = _start(source, target, str(script), str(cpu), str(memory), *arguments)
        return _ended(process, data, wait, check)


def _ended(
    process: subprocess.Popen[bytes],
    data: bytes | IO[bytes],
    wait: float,
    check: Callable[[], None],
) -> Ended:
    """Wait for a process, and kill it if that takes too long or `check` raises an exception."""
    end, writing = time.monotonic() + wait, None
    try:
        if isinstance(data, bytes):
            # A second `communicate` would not write what the first one has left.
            pipe, process.stdin = process.stdin, None
            assert pipe is not None
            writing = threading.Thread(target=_write, args=(pipe, data), daemon=True)
            writing.start()
        while time.monotonic() < end:
            check()
            with suppress(subprocess.TimeoutExpired):
                written, _ = process.communicate(timeout=LOOK)
                return Ended(process.returncode, written or b"")
        return Ended(None)
    finally:
        process.kill()
        process.wait()
        if writing is not None and writing.ident is not None:
            writing.join()
        if process.stdout is not None:
            process.stdout.close()


def _write(pipe: IO[bytes], data: bytes) -> None:
    # A process that has ended does not read all of it.
    with suppress(OSError), pipe:
        pipe.write(data)


def _start(
    source: int | IO[bytes], target: int | IO[bytes], *arguments: str
) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise OSError("Python is embedded in another program, so there is no interpreter to start")
    return subprocess.Popen(  # noqa: S603
        # -P keeps the script's folder out of `sys.path`.
        [sys.executable, "-P", __file__, *arguments],
        stdin=source, stdout=target, stderr=subprocess.DEVNULL,
        # Ctrl-C in a terminal is for the server, which then drains its requests.
        start_new_session=True,
    )  # fmt: skip


def _limit(cpu: int, memory: int) -> None:
    try:
        import resource
    except ImportError:
        # Windows has no such limits; the parent process kills this one after its timeout.
        return
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: cpu, resource.RLIMIT_AS: memory}
    for name, maximum in limits.items():
        # macOS rejects some limits of memory.
        with suppress(ValueError, OSError):
            resource.setrlimit(name, (maximum, maximum))


if __name__ == "__main__":
    _, program, seconds, size, *rest = sys.argv
    _limit(int(seconds), int(size))
    sys.argv = [program, *rest]
    runpy.run_path(program, run_name="__main__")
