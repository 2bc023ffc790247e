"""The register of responses in the background of all workers of a server: a folder of files.

Each worker has the responses that it runs or has just ended (`background.py`). A file names the
worker of each, and has what its successor needs to say that it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ..store.records import Record, Stored, time_of
from ..store.store import Store
from .background import Background, Elsewhere, Job

# The last part of the name of a file that is not complete.
_DRAFT = ".draft"
_FAILURE = {
    "code": "server_error",
    "message": "The process that generated the response was killed. Send the request again.",
}
_ID = re.compile(r"resp_[0-9a-f]{1,96}")


class Register:
    """The register, as one worker sees it; see `background.Elsewhere`.

    Args:
        folder: the folder that the workers share.
        number: the number of this worker.

    Attributes:
        others: what all servers with the same store have; None if nothing is shared.
    """

    loss = ""
    others: Elsewhere | None = None

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._number = number

    @property
    def mark(self) -> str:
        """See `Elsewhere`."""
        return "" if self.others is None else self.others.mark

    async def add(self, job: Job) -> None:
        """See `Elsewhere`."""
        if self.others is not None:
            await self.others.add(job)
        facts = {
            "worker": self._number,
            "owner": job.owner,
            "request_id": job.request_id,
            "begun": job.begun,
            "body": job.body,
        }
        await asyncio.to_thread(self._write, job.id, facts)

    def end(self, job: Job) -> None:
        """See `Elsewhere`."""
        self._write(job.id, {"worker": self._number})
        if self.others is not None:
            self.others.end(job)

    def remove(self, name: str) -> None:
        """See `Elsewhere`."""
        self._path(name).unlink(missing_ok=True)

    async def find(self, owner: str, name: str) -> Stored | None:
        """See `Elsewhere`."""
        facts = self._read(name)
        if facts is None:
            return None if self.others is None else await self.others.find(owner, name)
        if facts["worker"] == self._number or facts.get("owner") != owner:
            return None
        return running_elsewhere(facts)

    async def may_have(self, owner: str, name: str) -> bool:
        """See `Elsewhere`. The relay asks the worker that has a response."""
        return self.others is not None and await self.others.may_have(owner, name)

    async def stop(self, owner: str, name: str, delete: bool) -> bool:
        """See `Elsewhere`."""
        return self.others is None or await self.others.stop(owner, name, delete)

    async def aclose(self) -> None:
        """See `Elsewhere`."""
        if self.others is not None:
            await self.others.aclose()

    def worker_of(self, name: str) -> int | None:
        """Return the number of the worker that has a response, or None."""
        found = self._read(name)
        return None if found is None else int(found["worker"])

    async def inherit(self, background: Background, store: Store | None) -> None:
        """End what the worker before this one was running when it was killed, as failed.

        A stored response is written to the store, unless it is there. Others are kept in memory.
        """
        for name, facts in await asyncio.to_thread(lambda: [*self._left()]):
            if "begun" not in facts:
                self.remove(name)
                continue
            if self.others is not None:
                # It stores the failure itself if its process is known to have ended.
                await self.others.find(facts["owner"], name)
            failed = failed_with_process(facts)
            if store is not None and failed["store"]:
                await store_failed(store, facts, failed)
                self.remove(name)
            else:
                background.keep(_failed(facts, failed))

    def _left(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in self._folder.iterdir():
            if path.suffix != _DRAFT:
                facts = self._read(path.name)
                if facts is not None and facts["worker"] == self._number:
                    yield path.name, facts

    def _read(self, name: str) -> dict[str, Any] | None:
        if _ID.fullmatch(name) is None:
            return None
        try:
            found: dict[str, Any] = orjson.loads(self._path(name).read_bytes())
        except OSError:
            return None
        return found

    def _write(self, name: str, facts: Mapping[str, Any]) -> None:
        # A full disk must not end the response.
        with contextlib.suppress(OSError):
            draft = self._folder / f"{name}.{self._number}{_DRAFT}"
            draft.write_bytes(orjson.dumps(facts))
            draft.replace(self._path(name))

    def _path(self, name: str) -> Path:
        return self._folder / name


def failed_with_process(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response object of a response whose process has ended."""
    return {**facts["begun"], "status": "failed", "error": _FAILURE}


def running_elsewhere(facts: Mapping[str, Any]) -> Stored:
    """Return a response that another process runs."""
    job = _job(facts)
    job.end({**job.begun, "status": "in_progress"})
    return job.stored()


def _job(facts: Mapping[str, Any]) -> Job:
    return Job(facts["owner"], facts["request_id"], facts["begun"], facts["body"], 0, 0)


def _failed(facts: Mapping[str, Any], failed: Mapping[str, Any]) -> Job:
    """Return a response that is not stored, with its last event only."""
    job = _job(facts)
    event = {"type": "response.failed", "sequence_number": 0, "response": failed}
    job.end(failed)
    job.log.add(b"event: response.failed\ndata: %b\n\n" % orjson.dumps(event))
    return job


async def store_failed(store: Store, facts: Mapping[str, Any], failed: Mapping[str, Any]) -> None:
    """Store a failed response, unless the store has it as it ended."""
    name, kind, owner = failed["id"], failed["object"], facts["owner"]
    if await store.get(owner, kind, name) is not None:
        return
    record = Record(
        name,
        kind,
        owner,
        time_of(name) or 0,
        failed["model"],
        facts["request_id"],
        facts["body"],
        failed,
        failed["metadata"],
        len(orjson.dumps(facts)),
        parent=failed["previous_response_id"],
        chain=name,
    )
    await store.commit(record)
