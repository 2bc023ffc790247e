"""The register of responses in the background of all processes that share a durable store.

The id of a response has the mark of the process that runs it, so a router can send requests for the
response there. A row has what another process needs to say that it failed with its process. Another
process can ask for its end by a row, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from ..errors import StoreUnavailable
from ..store.errors import LATE
from ..store.records import Record, Stored, time_of
from ..store.store import Store
from .background import RUNNING, Job
from .items import mark_of
from .register import failed_with_process, running_elsewhere, store_failed

# The kinds of the rows, and the prefixes of their ids: of responses that run, and of those that
# another process wants to end, with or without being stored.
_KIND, _PREFIX = "response.running", "run_"
_STOPS = {False: ("response.cancelling", "stop_"), True: ("response.deleting", "drop_")}
# Seconds between two looks of a process for rows that ask for an end, and the ids of one look.
LOOK, SOME = 0.5, 500
# Seconds that a client waits for a row to be written, and for the end of a response in another
# process.
WRITE = 2.0
PATIENCE = 10.0
_PAUSE = 0.1


class Members(Protocol):
    """The processes that share responses in the background."""

    @property
    def mark(self) -> str:
        """The digits of this process in the ids of responses."""
        ...

    async def join(self) -> None:
        """Let the others know that this process runs."""
        ...

    async def running(self) -> Collection[str]:
        """Return the marks of the processes that run."""
        ...

    async def leave(self) -> None:
        """Let the others know that this process ends."""
        ...


class Replicas:
    """The register, as one process sees it; see `background.Elsewhere`.

    Args:
        members: the processes that share the store.
        store: the store that all share; None if there is none.
    """

    def __init__(self, members: Members, store: Store | None) -> None:
        self._members = members
        self._store = store
        self._jobs: dict[str, Job] = {}
        self._looking: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.loss = ""
        if store is None:
            self.loss = (
                " A response is lost with the replica that has it, because the replicas share no "
                "store."
            )

    @property
    def mark(self) -> str:
        """See `Elsewhere`."""
        return self._members.mark

    async def add(self, job: Job) -> None:
        """See `Elsewhere`. Nothing is written of a response that is not to be stored but its id."""
        if self._store is None:
            return
        is_kept = job.begun["store"]
        record = Record(
            _row(job.id),
            _KIND,
            job.owner,
            time_of(job.id) or 0,
            job.begun["model"],
            job.request_id,
            job.body if is_kept else {},
            job.begun if is_kept else {"store": False},
            {},
            job.size,
        )
        is_written = False
        with suppress(StoreUnavailable):
            # Without the lock of this process, the row would be that of a process that has ended.
            await self._members.join()
            is_written = await self._store.commit(record, WRITE)
        if is_kept and not is_written and self._store.place.required:
            raise StoreUnavailable(LATE)
        self._jobs[job.id] = job
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(self._store))

    def end(self, job: Job) -> None:
        """See `Elsewhere`."""
        self._jobs.pop(job.id, None)
        if self._store is not None:
            self._spawn(self._end(self._store, job))

    def remove(self, name: str) -> None:
        """See `Elsewhere`."""

    async def find(self, owner: str, name: str) -> Stored | None:
        """See `Elsewhere`. The response of a process that has ended is stored as failed."""
        mark = mark_of(name)
        if self._store is None or mark in ("", self.mark):
            return None
        row = await self._store.get(owner, _KIND, _row(name), whole=True)
        if row is not None:
            facts = {
                "owner": owner,
                "request_id": row.request_id,
                "begun": row.reply,
                "body": row.request,
            }
            is_kept = row.reply["store"]
            if mark in await self._members.running():
                return running_elsewhere(facts) if is_kept else None
            if is_kept:
                await store_failed(self._store, facts, failed_with_process(facts))
            await self._store.delete(owner, _KIND, row.id)
        # It may have ended since the caller has looked.
        return await self._store.get(owner, "response", name, whole=True)

    async def may_have(self, owner: str, name: str) -> bool:
        """See `Elsewhere`. Without a shared store, every response may be in its replica."""
        mark = mark_of(name)
        if mark in ("", self.mark) or mark not in await self._members.running():
            return False
        return self._store is None or await self._store.get(owner, _KIND, _row(name)) is not None

    async def stop(self, owner: str, name: str, delete: bool) -> bool:
        """See `Elsewhere`."""
        store = self._store
        found = await self.find(owner, name)
        if store is None or found is None or found.reply["status"] not in RUNNING:
            return True
        kind, prefix = _STOPS[delete]
        row = _row(name, prefix)
        record = Record(row, kind, owner, time_of(name) or 0, "", "", {}, {"id": row}, {})
        await store.commit(record, WRITE)
        try:
            async with asyncio.timeout(PATIENCE):
                while found is not None and found.reply["status"] in RUNNING:
                    await asyncio.sleep(_PAUSE)
                    found = await self.find(owner, name)
        except TimeoutError:
            return False
        finally:
            await store.delete(owner, kind, row)
        return True

    async def aclose(self) -> None:
        """See `Elsewhere`."""
        if self._looking is not None:
            self._looking.cancel()
        if self._ending:
            await asyncio.wait(self._ending)
        await self._members.leave()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, store: Store, job: Job) -> None:
        # Another process looks for the response before it looks for the row.
        with suppress(StoreUnavailable):
            await store.delete(job.owner, _KIND, _row(job.id))

    async def _look(self, store: Store) -> None:
        """End what other processes ask for, as long as responses run here."""
        while self._jobs:
            await asyncio.sleep(LOOK)
            with suppress(StoreUnavailable):
                # A lost connection has lost its lock.
                await self._members.join()
                for delete, (kind, prefix) in _STOPS.items():
                    jobs = {_row(name, prefix): job for name, job in self._jobs.items()}
                    for row in await store.known(kind, [*jobs][:SOME]):
                        self._spawn(jobs[row].cancel(delete))


def _row(response: str, prefix: str = _PREFIX) -> str:
    """Return the id of a row of a response."""
    return prefix + response.removeprefix("resp_")
