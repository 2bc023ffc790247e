"""The store of an adapter: objects and conversations, behind a queue.

It opens its database when it is first needed. A conversation is an object of its own kind with
items. It is retrieved, updated and deleted like other objects.
"""

# An object is named by its id throughout.
# ruff: noqa: A002

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from ...backends.single_flight import OnceCell
from ..postgresql_errors import SILENT
from ..probe import Probe
from .config import StoreConfig
from .errors import BUSY, LATE, ConversationTooLarge, StoreError, StoreUnavailable, Withdrawn
from .queue import DELAY, MEMORY_DELAY, QUIET, Writer
from .records import CONVERSATION, Key, Page, Query, Record, Status, Stored, new_id, time_of

if TYPE_CHECKING:
    from . import conversations, objects, retention
    from .database import Database

log = logging.getLogger("latimer")

T = TypeVar("T")

# Random digits of the id of a conversation, which has 48 digits with its time.
_RANDOM = 34

# Seconds that a response waits for its object to be written, if it has to.
COMMIT_SECONDS = 0.25
# Seconds that a client waits for an answer, and a writer until the database is opened.
ANSWER_SECONDS, OPEN_SECONDS = 5.0, 8.0
# Seconds that `/health` shows that a client got no answer, unless an answer or a write succeeds.
FAILING_SECONDS = 10.0
# Seconds between two searches for objects that are too old; a younger limit is searched more often.
TIDY_SECONDS = 60.0


class Store:
    """A store of objects, such as chat completions, and of conversations.

    Nothing is opened, and no database library is imported, before `open` or the first object.

    Args:
        place: the database and its limits.

    Attributes:
        is_shared: True if clients can ask another process for what this one has stored.
    """

    is_shared = False

    def __init__(self, place: StoreConfig) -> None:
        self.place = place
        self._late = LATE if place.durable else BUSY
        delay = DELAY if place.durable else MEMORY_DELAY
        self._writer = Writer(self.write, delay, self._late)
        self._database: OnceCell[Database] = OnceCell()
        # False after the last attempt to open it failed.
        self._can_open = True
        # The time until which an answer that failed counts, and that of the next line about one.
        self._fails_until = self._silent_until = 0.0
        # A database on a server can be lost while nobody uses it.
        is_remote = place.kind == "postgresql"
        self._probe = Probe(self._ask_nothing, self._note_probe) if is_remote else None
        self._tidying: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> Database:
        """Open the database and run the missing migrations, once; return the database.

        Raises:
            StoreError: the schema is newer than this program, or the place cannot be used.
            StoreUnavailable: the database does not answer now.
        """
        return await self._database.get(self._open)

    async def _open(self) -> Database:
        database = await asyncio.to_thread(_database, self.place)
        try:
            await database.check()
            await database.open()
        except (StoreError, StoreUnavailable) as error:
            self._can_open = False
            if self._probe is not None and isinstance(error, StoreUnavailable):
                self._probe.start()
            raise
        self._can_open = True
        if self._probe is not None:
            self._probe.start()
        if self.place.age is not None:
            self._tidy()
        return database

    async def look(self) -> bool:
        """Check that the store can be opened; return False if `open` would make its tables.

        Nothing is changed.

        Raises:
            StoreError, StoreUnavailable: see `open`.
        """
        database = await asyncio.to_thread(_database, self.place)
        await database.check()
        return await database.look() > 0

    def keep(self, record: Record) -> bool:
        """Queue an object without waiting for the database; return False if the queue is full."""
        return self._writer.add(record)

    async def settle(self) -> None:
        """Wait until what is queued is written, but no longer than a response may wait."""
        with suppress(TimeoutError, StoreUnavailable):
            async with asyncio.timeout(COMMIT_SECONDS):
                await self._writer.flush()

    async def commit(self, record: Record, seconds: float | None = None) -> bool:
        """Write an object before its response ends; return False if it is not stored in time.

        An object that is not stored in time is never stored. A store in memory that is not open yet
        only queues it: it ends with this process anyway, and a request that reads waits for the
        queue.

        Args:
            seconds: the time that it has, longer while the database writes others or the event loop
                is busy; by default little, but items of a conversation have as long as those that a
                client appends itself.
        """
        if self._database.value is None and self._opens_later:
            return self.keep(record)
        if not self._writer.add(record):
            return False
        try:
            if seconds is None:
                seconds = COMMIT_SECONDS if record.conversation is None else ANSWER_SECONDS
            await self._writer.flush(seconds)
        except (TimeoutError, StoreUnavailable):
            record.is_withdrawn = True
            return False
        except asyncio.CancelledError:
            record.is_withdrawn = True
            raise
        return not record.is_rejected

    async def begin(self) -> None:
        """Open the store once, before a response that is written at its end.

        The end of a response cannot wait for the first import of the database's libraries. A store
        in memory is opened after the response, by its queue.
        """
        if self._database.value is None and self._can_open and not self._opens_later:
            with suppress(StoreUnavailable):
                await self._open_to_answer()

    @property
    def _opens_later(self) -> bool:
        """True if responses do not wait until the store is open for the first time."""
        return self._can_open and not self.place.durable and not self.place.required

    async def check(self) -> None:
        """Open the store, and raise `StoreUnavailable` if it is known not to take objects."""
        await self._open_to_answer()
        if self._writer.state != "ok":
            try:
                async with asyncio.timeout(COMMIT_SECONDS):
                    await self._writer.flush()
                    if self._probe is not None and self._writer.state != "ok":
                        # Nothing waits: a probe has found it lost, and it may be back.
                        self._note_probe(await self._probe.now())
            except TimeoutError:
                raise StoreUnavailable(self._late) from None
            if self._writer.state != "ok":
                raise StoreUnavailable(SILENT)

    async def get(self, owner: str, kind: str, id: str, whole: bool = False) -> Stored | None:
        """Return an object of an owner, or None.

        Args:
            whole: return the request with its messages, and their images, audio and files; without,
                only with its parameters.

        Raises:
            StoreUnavailable: the database cannot answer.
        """
        key = self._key(owner, kind, id)
        return await self._ask(
            lambda database: database.read(objects.find, key, database.files if whole else None),
            None,
            id,
        )

    async def known(self, kind: str, ids: Sequence[str]) -> list[str]:
        """Return the ids, of at most some hundred, that objects of a kind have; see `get`."""
        return await self._ask(lambda database: database.read(objects.known, kind, ids), [])

    async def page(
        self, owner: str, kind: str, query: Query, show: Callable[[Stored], T]
    ) -> Page[T]:
        """Return a page of the objects of an owner; see `get`. Their requests have no messages.

        Args:
            show: returns what the page has of each object; it runs in a thread.
        """
        return await self._ask(
            lambda database: database.read(objects.page, owner, kind, query, self._since, show),
            Page[T]([], False),
        )

    async def chain(self, owner: str, kind: str, id: str) -> list[Stored]:
        """Return an object of an owner and those that it continues, the oldest first; see `get`.

        Their requests are whole. The list is empty if one of them does not exist. All of them are
        kept longer, because they are used, unless the database takes no changes now.
        """
        key = self._key(owner, kind, id)

        async def read(database: Database) -> list[Stored]:
            chain = await database.read(objects.read_chain, database.files, key)
            if chain and chain[-1].chain is not None:
                with suppress(StoreUnavailable):
                    await database.change(objects.use, _now(), chain=chain[-1].chain)
            return chain

        return await self._ask(read, [], id)

    async def update(
        self, owner: str, kind: str, id: str, metadata: Mapping[str, str]
    ) -> Stored | None:
        """Replace the metadata of an object of an owner; return the object, or None; see `get`."""
        key = self._key(owner, kind, id)
        return await self._ask(
            lambda database: database.change(objects.change, key, metadata), None, id
        )

    async def delete(self, owner: str, kind: str, id: str) -> bool:
        """Delete an object of an owner; return False if there is none; see `get`."""
        key = self._key(owner, kind, id)
        return await self._ask(lambda database: database.delete(objects.remove, key), False, id)

    async def create_conversation(
        self,
        owner: str,
        request_id: str,
        metadata: Mapping[str, str],
        items: Sequence[Mapping[str, Any]] = (),
    ) -> Stored:
        """Create a conversation with items, and return it; see `append`."""
        name, created_at = new_id("conv_", _RANDOM)
        reply = {
            "id": name,
            "object": CONVERSATION,
            "created_at": created_at // 1_000_000,
            "metadata": dict(metadata),
        }
        record = Record(name, CONVERSATION, owner, created_at, "", request_id, {}, reply, metadata)
        made = await self._append(self._key(owner, CONVERSATION, name), items, record)
        if made is None:
            raise ConversationTooLarge
        return made

    async def append(self, owner: str, id: str, items: Sequence[Mapping[str, Any]]) -> bool:
        """Append items to a conversation of an owner; return False if there is none.

        They are appended together or not at all. The conversation is kept longer, because it is
        used.

        Args:
            items: items with ids.

        Raises:
            DuplicateItem: the conversation has an item with the same id, or two items have it.
            ConversationTooLarge: it would be larger than the whole store may be.
        """
        return await self._append(self._key(owner, CONVERSATION, id), items) is not None

    async def items(
        self,
        owner: str,
        id: str,
        after: str | None = None,
        limit: int = 20,
        descending: bool = True,
    ) -> Page[dict[str, Any]] | None:
        """Return a page of the items of a conversation; None if there is no conversation.

        Args:
            after: the id of the item before the page, also of a deleted one; None for the first
                page.
        """
        key = self._key(owner, CONVERSATION, id)
        query = Query(after, limit, descending)
        return await self._ask(
            lambda database: database.read(conversations.page, database.files, key, query),
            None,
            id,
        )

    async def all_items(self, owner: str, id: str) -> list[dict[str, Any]] | None:
        """Return all items of a conversation, the oldest first; None if there is no conversation.

        The conversation is kept longer, because it is used.
        """
        key = self._key(owner, CONVERSATION, id)

        async def read(database: Database) -> list[dict[str, Any]] | None:
            every = await database.read(conversations.everything, database.files, key)
            if every is not None:
                await database.change(objects.use, _now(), id=id)
            return every

        return await self._ask(read, None, id)

    async def item(self, owner: str, id: str, item: str) -> dict[str, Any] | None:
        """Return an item of a conversation; None if one of them does not exist."""
        key = self._key(owner, CONVERSATION, id)
        found = await self._ask(
            lambda database: database.read(conversations.everything, database.files, key, item),
            None,
            id,
        )
        return found[0] if found else None

    async def remove_item(self, owner: str, id: str, item: str) -> Stored | None:
        """Delete an item; return its conversation, or None if one of them does not exist."""
        key = self._key(owner, CONVERSATION, id)
        return await self._ask(
            lambda database: database.delete(conversations.remove, key, [item]), None, id
        )

    def status(self) -> Status:
        """Return the state of the store, for `/health`."""
        state = self._writer.state
        if state == "ok" and (not self._can_open or time.monotonic() < self._fails_until):
            state = "unavailable"
        return Status(state, self._writer.waiting, self._writer.lost)

    async def aclose(self) -> None:
        """Write what waits, and close the database; this takes a few seconds at most."""
        if self._probe is not None:
            self._probe.cancel()
        await self._writer.aclose()
        if self._timer is not None:
            self._timer.cancel()
        tidying, self._tidying = self._tidying, None
        if tidying is not None and not tidying.done():
            # A task of another event loop ended with it.
            with suppress(RuntimeError, ValueError):
                tidying.cancel()
                await asyncio.wait([tidying])
        # A cell belongs to the event loop whose callers waited for it.
        database, self._database = self._database.value, OnceCell()
        if database is not None:
            await database.aclose()

    async def write(self, records: Sequence[Record]) -> Sequence[Record]:
        """Write records in one transaction; return those that the database can never take.

        A record that is withdrawn meanwhile is not written.

        Raises:
            StoreUnavailable: the database cannot answer.
        """
        database = await self._open_to_answer()
        for record in records:
            if record.is_withdrawn and record.is_tried:
                # Another object of the batch can have its id: the failure of the same response.
                await self._withdraw(database, record)
        wanted = [record for record in records if not record.is_withdrawn]
        for record in wanted:
            record.is_tried = True
        rejected = await _insert(database, wanted) if wanted else []
        for record in wanted:
            if record.is_withdrawn:
                # Its response has said meanwhile that it is not stored.
                await self._withdraw(database, record)
        self._fails_until = 0.0
        self._note_use()
        return rejected

    async def _withdraw(self, database: Database, record: Record) -> None:
        """Delete an object, and the items that it has appended to its conversation."""
        await database.delete(objects.remove, self._key(record.owner, record.kind, record.id))
        if record.conversation is not None and record.appended:
            key = self._key(record.owner, CONVERSATION, record.conversation)
            await database.delete(conversations.remove, key, record.appended)

    async def _append(
        self, key: Key, items: Sequence[Mapping[str, Any]], record: Record | None = None
    ) -> Stored | None:
        """Append items to a conversation, and return it; None if there is none.

        Args:
            record: the conversation, if it is to be made.
        """

        async def append(database: Database) -> Stored | None:
            made = await database.change(
                conversations.append_new, database.files, key, items, self.place.size, record
            )
            await database.clean()
            return made

        return await self._ask(append, None, key.id, makes=record is not None)

    @property
    def _since(self) -> int | None:
        """The time from which objects are kept, in microseconds since 1970; None for all."""
        age = self.place.age
        return None if age is None else int((time.time() - age) * 1_000_000)

    def _key(self, owner: str, kind: str, id: str) -> Key:
        """Return the key of an object that is not too old."""
        return Key(owner, kind, id, self._since or 0)

    async def _for_reading(self, id: str | None = None) -> Database | None:
        """Write what waits, and return the open database; None if nothing was ever stored.

        Args:
            id: the object to find; others may wait if the database takes nothing now.
        """
        try:
            await self._writer.flush()
        except StoreUnavailable:
            if id is None or self._writer.has(id):
                raise
        if self._database.value is None and not self.place.durable:
            return None
        return await self._open_to_answer()

    async def _open_to_answer(self) -> Database:
        if self._database.value is not None:
            return self._database.value
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self.open()
        except TimeoutError:
            raise StoreUnavailable(self._late) from None
        except StoreError as error:
            raise StoreUnavailable("it cannot be opened", str(error)) from None

    async def _ask(
        self,
        work: Callable[[Database], Awaitable[T]],
        nothing: T,
        id: str | None = None,
        makes: bool = False,
    ) -> T:
        """Return the answer of the open database in time; `nothing` if nothing was ever stored.

        Args:
            id: the id of an object, which is in the store only if it has the form of one.
            makes: True for work that needs nothing of what is stored.
        """
        if id is not None and time_of(id) is None:
            return nothing
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                database = await (self._open_to_answer() if makes else self._for_reading(id))
                found = nothing if database is None else await work(database)
        except TimeoutError:
            error = StoreUnavailable(self._late)
        except StoreUnavailable as known:
            error = known
        else:
            self._fails_until = 0.0
            self._note_use()
            self._writer.hurry()
            return found
        now = time.monotonic()
        # The queue logs its own errors.
        if now >= self._silent_until and self._writer.state == "ok":
            log.error("the store did not answer a request: %s", error.detail)
            self._silent_until = now + QUIET
        self._fails_until = now + FAILING_SECONDS
        raise error

    def _note_use(self) -> None:
        """Let the probe ask later, because the database has answered."""
        if self._probe is not None:
            self._probe.used_at = time.monotonic()

    async def _ask_nothing(self) -> None:
        """Ask the database whether it answers; one that is not open yet is opened."""
        database = await self._open_to_answer()
        await database.read(lambda connection: connection.exec_driver_sql("SELECT 1").one())

    def _note_probe(self, error: Exception | None) -> None:
        """Note what a probe has found."""
        if error is None:
            if self._writer.state != "ok":
                self._fails_until = 0.0
            self._writer.hurry()
        elif self._can_open:
            late = StoreUnavailable(self._late)
            self._writer.fail(error if isinstance(error, StoreUnavailable) else late)

    def _tidy(self) -> None:
        """Delete the objects that are too old, now and from time to time."""
        loop = asyncio.get_running_loop()
        if self._tidying is None or self._tidying.done():
            self._tidying = loop.create_task(self._expire())
        pause = min(TIDY_SECONDS, (self.place.age or TIDY_SECONDS) / 4)
        self._timer = loop.call_later(pause, self._tidy)

    async def _expire(self) -> None:
        try:
            database = self._database.value
            if database is not None and self._since is not None:
                limits = retention.Limits(before=self._since)
                if (await retention.prune(database, limits)).objects:
                    await database.forget()
        except StoreUnavailable as error:
            log.warning("old objects were not deleted: %s", error.detail)


def _database(place: StoreConfig) -> Database:
    """Return a database, and import the modules that need SQLAlchemy.

    That takes 0.3 s and 27 MB, so it runs in a thread, and only when a store is used.
    """
    for name in ("conversations", "objects", "retention"):
        globals()[name] = import_module(f".{name}", __package__)
    module = import_module(".database", __package__)
    made: Database = module.Database(place)
    return made


async def _insert(database: Database, records: Sequence[Record]) -> list[Record]:
    """Write records in one transaction; return those that can never be written."""
    try:
        large = await database.write(
            conversations.write, database.files, records, database.place.size
        )
    except Withdrawn:
        return await _insert(database, [one for one in records if not one.is_withdrawn])
    except StoreUnavailable:
        raise
    except Exception as error:
        # A message can have text of users.
        log.debug("a batch of %d was rejected: %s", len(records), type(error).__name__)
        if len(records) > 1:
            # One of them is wrong. The others must not be lost with it.
            return [lost for one in records for lost in await _insert(database, [one])]
        # An earlier attempt can have written it, and its answer was lost.
        (record,) = records
        key = Key(record.owner, record.kind, record.id)
        return [] if await database.read(objects.find, key) else [record]
    await database.clean()
    return large


def _now() -> int:
    return time.time_ns() // 1_000
