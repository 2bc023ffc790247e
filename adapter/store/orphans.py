"""Delete media that no object has: what a process left behind that was killed."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice
from typing import NamedTuple

from sqlalchemy import Connection

from .blob import Blob
from .files import MANY, Files
from .objects import count
from .open_store import OpenStore

# Seconds after which bytes without a row are not those of a request that is being stored.
AGE = 3600.0


class Orphans(NamedTuple):
    """Media that no object has, and their bytes."""

    number: int
    bytes: int


async def remove_orphans(store: OpenStore, delete: bool = True) -> Orphans:
    """Delete the media that no object has; return their number and bytes.

    Args:
        delete: False to count them only.

    Raises:
        StoreUnavailable: the database or the storage of media cannot answer.
    """
    number = size = 0
    if delete:
        async for unused in store.steps(partial(_remove_some, files=store.files)):
            number, size = number + len(unused), size + sum(unused)
    else:
        sizes = await store.read(store.files.orphans)
        number, size = len(sizes), sum(sizes)
    if store.blobs is None:
        return Orphans(number, size)
    listed = store.blobs.hashes()
    while some := await asyncio.to_thread(list, islice(listed, MANY)):
        found = await _unknown(store, some)
        if found and delete:
            store.files.unused.update(blob.hash for blob in found)
            gone = await store.database.write(store.files.clean)
            found = [blob for blob in found if blob.hash in gone]
        number, size = number + len(found), size + sum(blob.size for blob in found)
    return Orphans(number, size)


def _remove_some(connection: Connection, files: Files) -> list[int]:
    sizes = files.remove_orphans(connection)
    count(connection, 0, -sum(sizes))
    return sizes


async def _unknown(store: OpenStore, blobs: list[Blob]) -> list[Blob]:
    """Return the blobs that have no row and are old enough to be deleted."""
    old = [blob for blob in blobs if blob.age > AGE]
    if not old:
        return []
    names = [blob.hash for blob in old]
    known = await store.read(partial(store.files.known, hashes=names))
    return [blob for blob in old if blob.hash not in known]
