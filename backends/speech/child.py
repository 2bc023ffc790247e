"""The process of a library that speaks or transcribes, which runs `worker`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any

from ..errors import MOST_SHOWN, EngineError, EngineUnavailable, shortened

_WORKER = f"{__package__}.worker"
# The bytes of a message at most.
_LINE = 1 << 24


async def started(
    library: str, model: str, *, offline: bool = False
) -> tuple[Process, dict[str, Any]]:
    """Return a new process that has loaded a model, and its first message, which has its facts.

    Args:
        library: its name in `worker.CLASSES`.
        model: the model, as the library names it.
        offline: True if the library may not use the network to find it.

    Raises:
        EngineUnavailable: the library or its model cannot be loaded.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", _WORKER, library, model,
        stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=_LINE,
        # Ctrl-C in a terminal is for the server.
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"} if offline else None,
    )  # fmt: skip
    try:
        loaded = await message_of(process, library)
        if "error" in loaded:
            raise EngineUnavailable(
                f"{library} cannot load '{shortened(model)}': {reason_of(loaded)}"
            )
    except BaseException:
        await ended(process)
        raise
    return process, loaded


async def message_of(process: Process, library: str) -> dict[str, Any]:
    """Return the next message of a process.

    Raises:
        EngineError: it has ended.
    """
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        status = await process.wait()
        raise EngineError(f"{library} has ended with status {status}.")
    found: dict[str, Any] = json.loads(line)
    return found


def reason_of(message: dict[str, Any]) -> str:
    """Return the reason in a message of an error."""
    return shortened(str(message["error"]), 2 * MOST_SHOWN)


async def ended(process: Process) -> None:
    """Kill a process, and wait for its end."""
    if process.returncode is None:
        process.kill()
    # Its pipes are closed by the same transport.
    await asyncio.shield(process.wait())
