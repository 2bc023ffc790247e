"""A store whose database is open: every operation, each in a transaction.

This module imports SQLAlchemy, so `store.py` imports it in a thread and only when it is needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from . import conversations, objects, retention
from .blobs import Files, of
from .config import Place
from .conversations import Ask
from .database import Checkpoints, Database
from .errors import WRONG, ConversationTooLarge, Rejected, StoreUnavailable, damage
from .objects import Key
from .records import (
    CONVERSATION,
    ItemPage,
    Page,
    Query,
    Record,
    Stored,
    bytes_of,
    item_rows,
    rows_of,
)

log = logging.getLogger("latimer")

T = TypeVar("T")


class _Withdrawn(Exception):
    """A record of a batch was withdrawn before the batch was committed."""


class OpenStore:
    """The operations of a store; see `store.Store`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.database = Database(place)
        self.checkpoints = Checkpoints(self.database.checkpoint)
        self.blobs = None if place.media is None else of(place.media)
        self.files = Files(self.blobs)
        # True after objects were deleted to make room, until a checkpoint is planned.
        self._has_evicted = False

    def key(self, owner: str, kind: str, id: str) -> Key:  # noqa: A002
        """Return the key of an object that is not too old."""
        return Key(owner, kind, id, self.since or 0)

    @property
    def since(self) -> int | None:
        """The time from which objects are kept, in microseconds since 1970; None for all."""
        age = self.place.age
        return None if age is None else int((time.time() - age) * 1_000_000)

    async def write(self, records: Sequence[Record]) -> list[Record]:
        """Write records; return those that can never be written.

        A record that is withdrawn meanwhile is not written.
        """
        try:
            large = await self.database.write(partial(self._insert, records))
        except _Withdrawn:
            return await self.write([one for one in records if not one.is_withdrawn])
        except StoreUnavailable:
            raise
        except Exception as error:
            # A message can have text of users.
            log.debug("a batch of %d was rejected: %s", len(records), type(error).__name__)
            if len(records) > 1:
                # One of them is wrong. The others must not be lost with it.
                return [lost for one in records for lost in await self.write([one])]
            return [one for one in records if not await self._has(one)]
        await self._clean()
        return large

    def _insert(self, records: Sequence[Record], connection: Connection) -> list[Record]:
        """Insert records; return those that are larger than the whole store may be."""
        records, large = self._fitting(records)
        # Every process locks objects first, then media, and the totals last.
        locked = conversations.lock_all(connection, records)
        objects.touch_chains(connection, records)
        size = objects.insert(connection, self.files, records)
        size += conversations.append_all(connection, self.files, records, locked)
        objects.count(connection, len(records), size)
        self._evict(connection)
        if any(one.is_withdrawn for one in records):
            raise _Withdrawn
        return large

    def _fitting(self, records: Sequence[Record]) -> tuple[Sequence[Record], list[Record]]:
        most = self.place.size
        if most is None:
            return records, []
        for one in records:
            one.rows = rows_of(one)
        large = [one for one in records if bytes_of(one) > most]
        return [one for one in records if one not in large], large

    def _evict(self, connection: Connection) -> None:
        if self.place.size is not None:
            while retention.evict(connection, self.files, self.place.size):
                self._has_evicted = True

    async def create(self, record: Record, given: Sequence[Mapping[str, Any]]) -> Stored | None:
        """Write a conversation with items, and return it; see `append`."""

        def work(connection: Connection) -> Stored | None:
            self._insert([record], connection)
            return self._append(given, self.key(record.owner, record.kind, record.id), connection)

        return await self._appended(work)

    async def append(self, key: Key, given: Sequence[Mapping[str, Any]]) -> Stored | None:
        """Append items to a conversation; return the conversation, or None.

        Raises:
            DuplicateItem: see `conversations.append_new`.
            ConversationTooLarge: there is no room for the items.
        """
        return await self._appended(partial(self._append, given, key))

    async def _appended(self, work: Callable[[Connection], Stored | None]) -> Stored | None:
        stored = _checked(await self._change(work))
        await self._clean()
        return stored

    def _append(
        self, given: Sequence[Mapping[str, Any]], key: Key, connection: Connection
    ) -> Stored | None:
        row = objects.lock(connection, key)
        if row is None:
            return None
        now = time.time_ns() // 1_000
        size = conversations.append_new(connection, self.files, row, item_rows(given), now)
        objects.count(connection, 0, size)
        self._evict(connection)
        if self.place.size is not None and objects.find(connection, key) is None:
            # It was used last, so it is deleted last. The transaction now deletes nothing.
            raise ConversationTooLarge
        return objects.stored_of(row, {})

    async def items(
        self, key: Key, after: str | None, limit: int, descending: bool
    ) -> ItemPage | None:
        """Return a page of the items of a conversation, or None; see `conversations.page`."""
        ask = Ask(after, limit, descending)
        return await self.read(partial(conversations.page, files=self.files, key=key, ask=ask))

    async def all_items(self, key: Key) -> list[dict[str, Any]] | None:
        """Return all items of a conversation, or None; this uses the conversation."""
        found = await self.read(partial(conversations.everything, files=self.files, key=key))
        if found is not None:
            now = time.time_ns() // 1_000
            await self._change(partial(conversations.use, key=key, now=now))
        return found

    async def item(self, key: Key, name: str) -> dict[str, Any] | None:
        """Return an item of a conversation, or None."""
        return await self.read(partial(conversations.one, files=self.files, key=key, name=name))

    async def remove_items(self, key: Key, names: Sequence[str]) -> Stored | None:
        """Delete items of a conversation; return the conversation, or None if it has none."""
        work = partial(conversations.remove, files=self.files, key=key, names=names)
        stored = _checked(await self._change(work))
        if stored is not None:
            await self._forget()
        return stored

    async def withdraw(self, record: Record) -> None:
        """Delete an object whose response has said that it is not stored, and its items."""
        await self.remove(self.key(record.owner, record.kind, record.id))
        if record.conversation is not None and record.appended:
            key = self.key(record.owner, CONVERSATION, record.conversation)
            await self.remove_items(key, record.appended)

    async def _has(self, record: Record) -> bool:
        """Return True if an earlier attempt wrote a record, but its answer was lost."""
        return await self.find(self.key(record.owner, record.kind, record.id), False) is not None

    async def find(self, key: Key, whole: bool) -> Stored | None:
        """Return an object, or None."""
        if whole:
            work = partial(objects.find_whole, files=self.files, key=key)
        else:
            work = partial(objects.find, key=key)
        return _checked(await self.read(work))

    async def chain(self, key: Key) -> list[Stored]:
        """Return an object and those that it continues, the oldest first."""
        found = await self.read(partial(objects.read_chain, files=self.files, key=key))
        for one in found:
            _checked(one)
        if found and found[-1].chain is not None:
            now = time.time_ns() // 1_000
            await self._change(partial(objects.use_chain, chain=found[-1].chain, now=now))
        return found

    async def page(
        self, owner: str, kind: str, query: Query, show: Callable[[Stored], T]
    ) -> Page[T]:
        """Return a page of a list; see `objects.page`."""

        def work(connection: Connection) -> Page[T]:
            return objects.page(
                connection, owner, kind, query, self.since, lambda one: show(_sound(one))
            )

        return await self.read(work)

    async def change(self, key: Key, metadata: Mapping[str, str]) -> Stored | None:
        """Replace the metadata of an object; return the object, or None."""
        return _checked(await self._change(partial(objects.change, key=key, metadata=metadata)))

    async def remove(self, key: Key) -> bool:
        """Delete an object; return False if there is none."""
        found = await self._change(partial(objects.remove, files=self.files, key=key))
        if found:
            await self._forget()
        return found

    async def expire(self) -> int:
        """Delete the objects that are too old; return their number."""
        if self.since is None:
            return 0
        work = partial(retention.expire, files=self.files, before=self.since)
        number = sum([freed.objects async for freed in self.steps(work)])
        if number:
            await self._forget()
        return number

    async def steps(self, work: Callable[[Connection], T | None]) -> AsyncIterator[T]:
        """Yield the results of a function that deletes, in one transaction for each.

        After each there is a pause as long as it took, for the other processes that write.

        Args:
            work: returns a result that is not empty, or something empty at the end.

        Raises:
            StoreUnavailable: the database cannot answer.
        """
        began = time.monotonic()
        while result := await self._change(work):
            await self._clean()
            yield result
            await asyncio.sleep(time.monotonic() - began)
            began = time.monotonic()

    async def aclose(self) -> None:
        """Close the database; see `Database.aclose`."""
        self.checkpoints.cancel()
        await self.database.aclose()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of a function that reads; see `Database.read`.

        Raises:
            StoreUnavailable: the database cannot answer, or what it has is damaged.
        """
        with damage():
            return await self.database.read(work)

    async def _forget(self) -> None:
        """Delete what a deletion left: media, and text in the log of changes."""
        await self._clean()
        await self.checkpoints.now()

    async def _clean(self) -> None:
        """Delete the bytes of the media that no object has any more, and soon evicted text."""
        if self._has_evicted:
            self._has_evicted = False
            self.checkpoints.soon()
        if self.files.unused:
            with logged("unused media were not deleted"):
                await self.database.write(self.files.clean)

    async def _change(self, work: Callable[[Connection], T]) -> T:
        try:
            with damage():
                return await self.database.write(work)
        except Rejected as error:
            raise StoreUnavailable("the database does not take the change", str(error)) from None


def _checked(stored: Stored | None) -> Stored | None:
    return None if stored is None else _sound(stored)


def _sound(stored: Stored) -> Stored:
    """Return an object whose parts are JSON objects."""
    for part in (stored.metadata, stored.request, stored.reply):
        if type(part) is not dict:
            raise StoreUnavailable(WRONG, f"a JSON {type(part).__name__}")
    return stored


@contextmanager
def logged(what: str) -> Iterator[None]:
    """Log that something fails, which is tried again later."""
    try:
        yield
    except StoreUnavailable as error:
        log.warning("%s: %s", what, error.detail)
