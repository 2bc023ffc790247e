"""The register of responses in the background of all replicas of a deployment: rows of their store.

The id of a response has the mark of the replica that runs it, so a router can send requests for the
response there. A row has what another replica needs to say that it failed with its replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from ..errors import StoreUnavailable
from ..store.records import Record, Stored, time_of
from ..store.store import Store
from .background import Job
from .items import mark_of
from .register import failed_with_process, running_elsewhere, store_failed

# The kind of the rows, and the prefix of their ids.
_KIND, _PREFIX = "response.running", "run_"


class Replicas:
    """The register, as one replica sees it; see `background.Elsewhere`.

    Args:
        mark: the digits of this replica in the ids of responses (`items.MARK`).
        store: the store that all replicas share; None if there is none.
        running: returns the marks of the replicas whose processes run.
    """

    def __init__(
        self, mark: str, store: Store | None, running: Callable[[], Awaitable[Collection[str]]]
    ) -> None:
        self._mark = mark
        self._store = store
        self._running = running
        self._ending: set[asyncio.Task[None]] = set()
        self.loss = ""
        if store is None:
            self.loss = (
                " A response is lost with the replica that has it, because the replicas share no "
                "store."
            )

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
        await self._store.commit(record)

    def end(self, job: Job) -> None:
        """See `Elsewhere`."""
        if self._store is not None:
            task = asyncio.get_running_loop().create_task(self._end(self._store, job))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def remove(self, name: str) -> None:
        """See `Elsewhere`."""

    async def find(self, owner: str, name: str) -> Stored | None:
        """See `Elsewhere`. The response of a replica that has ended is stored as failed."""
        mark = mark_of(name)
        if self._store is None or mark in ("", self._mark):
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
            if mark in await self._running():
                return running_elsewhere(facts) if is_kept else None
            if is_kept:
                await store_failed(self._store, facts, failed_with_process(facts))
            await self._store.delete(owner, _KIND, row.id)
        # It may have ended since the caller has looked.
        return await self._store.get(owner, "response", name, whole=True)

    async def may_have(self, owner: str, name: str) -> bool:
        """See `Elsewhere`. Without a shared store, every response may be in its replica."""
        mark = mark_of(name)
        if mark in ("", self._mark) or mark not in await self._running():
            return False
        return self._store is None or await self._store.get(owner, _KIND, _row(name)) is not None

    async def aclose(self) -> None:
        """See `Elsewhere`."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def _end(self, store: Store, job: Job) -> None:
        # Another replica looks for the response before it looks for the row.
        with suppress(StoreUnavailable):
            await store.delete(job.owner, _KIND, _row(job.id))


def _row(response: str) -> str:
    """Return the id of the row of a response."""
    return _PREFIX + response.removeprefix("resp_")
