"""The metrics of all workers of a server: a scrape reaches one of them, and shows the sums.

A worker that gets a scrape asks the others through their Unix sockets. Each worker also writes its
counters and histograms into a file of the folder that the workers share: before it shows them, each
second, and at its end. The file stands in for a worker that does not answer. The next worker of the
same number begins with it, so no sum becomes less. `kill -9` loses at most what a worker has
counted since its last file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from pathlib import Path

import orjson

from ..metric_rows import Values
from ..metrics import Metrics, counted, merged
from ..readiness import SCRAPE, States, pools_of, states_of
from ..service import Service

# Seconds between two files, and for the answer of another worker.
_EACH, _PATIENCE = 1.0, 1.0


class Tally:
    """The metrics, as one worker sees them; see `metrics.Elsewhere`.

    Args:
        folder: the folder that the workers share.
        number: the number of this worker.
        metrics: those of this worker.
        service: what they measure.
    """

    def __init__(self, folder: Path, number: int, metrics: Metrics, service: Service) -> None:
        self._folder = folder
        self._number = number
        self._metrics = metrics
        self._service = service
        # What the workers before this one have counted.
        self._before = _read(_file_of(folder, number))
        # Scrapes take values in turns, and write them in threads.
        self._lock = threading.Lock()
        self._turn = self._written = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answer the other workers, and write a file each second."""
        await self._own(pools_of(self._service))
        path = _socket_of(self._folder, self._number)
        self._server = await asyncio.start_unix_server(self._answer, path)
        self._tasks.append(asyncio.create_task(self._write()))
        self._metrics.elsewhere = self

    async def aclose(self) -> None:
        """Write the last file."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await self._own(pools_of(self._service))

    def leave(self) -> None:
        """Write no file from now on, from another thread; the folder is deleted."""
        with self._lock:
            self._written = sys.maxsize

    async def total(self, states: States) -> Values:
        """See `Elsewhere`."""
        numbers = sorted(int(path.stem) for path in self._folder.glob("*.metrics"))
        found = await asyncio.gather(
            *(self._own(states) if one == self._number else self._ask(one) for one in numbers)
        )
        total: Values = {}
        # In the same order in all workers, so that rounding does not make a sum less.
        for values in found:
            total = merged(total, values)
        return total

    async def _own(self, states: States) -> Values:
        """Return the values of this worker and those before it, which are in its file then."""
        snapshot = await self._metrics.snapshot(self._service, states)
        self._turn += 1
        turn = self._turn

        def keep() -> Values:
            with self._lock:
                values = merged(self._before, snapshot.values())
                if turn > self._written:
                    self._written = turn
                    path = _file_of(self._folder, self._number)
                    draft = path.with_suffix(".draft")
                    # A full disk must not end the scrape.
                    with contextlib.suppress(OSError):
                        draft.write_bytes(_dumped(counted(values)))
                        draft.replace(path)
            return values

        return await asyncio.to_thread(keep)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(_EACH)
            await self._own(pools_of(self._service))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the values of this worker to another one, which may not wait for them."""
        values = await self._own(await states_of(self._service, SCRAPE))
        with contextlib.suppress(OSError):
            writer.write(_dumped(values))
            await writer.drain()
        writer.close()

    async def _ask(self, number: int) -> Values:
        """Return the values of another worker, or those of its file."""
        with contextlib.suppress(OSError, TimeoutError, orjson.JSONDecodeError):
            async with asyncio.timeout(_PATIENCE):
                path = _socket_of(self._folder, number)
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    return _loaded(await reader.read())
                finally:
                    writer.close()
        return await asyncio.to_thread(_read, _file_of(self._folder, number))


def _file_of(folder: Path, number: int) -> Path:
    return folder / f"{number}.metrics"


def _socket_of(folder: Path, number: int) -> Path:
    return folder / f"{number}.tally"


def _read(path: Path) -> Values:
    try:
        return _loaded(path.read_bytes())
    except OSError:
        # The first worker of its number has no file yet.
        return {}


def _dumped(values: Values) -> bytes:
    return orjson.dumps({name: [*found.items()] for name, found in values.items()})


def _loaded(data: bytes) -> Values:
    return {
        name: {tuple(labels): numbers for labels, numbers in found}
        for name, found in orjson.loads(data).items()
    }
