"""The store of an adapter: it opens its database when it is first needed.

A conversation is an object of its own kind with items. It is retrieved, updated and deleted like
other objects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from .config import Place
from .errors import LATE, ConversationTooLarge, StoreError, StoreUnavailable
from .queue import DELAY, MEMORY_DELAY, QUIET, Writer
from .records import CONVERSATION, ItemPage, Page, Query, Record, Status, Stored, new_id

if TYPE_CHECKING:
    from .open_store import OpenStore

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


class Conversations(ABC):
    """The conversations of a store.

    Every operation raises `StoreUnavailable` if the database cannot answer.
    """

    @abstractmethod
    async def _ask(
        self,
        work: Callable[[OpenStore], Awaitable[T]],
        nothing: T,
        id: str | None = None,  # noqa: A002
        makes: bool = False,
    ) -> T:
        """See `Store`."""

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
        nothing: Stored | None = None
        made = await self._ask(lambda opened: opened.create(record, items), nothing, makes=True)
        if made is None:
            raise ConversationTooLarge
        return made

    async def append(
        self,
        owner: str,
        id: str,  # noqa: A002
        items: Sequence[Mapping[str, Any]],
    ) -> bool:
        """Append items to a conversation of an owner; return False if there is none.

        They are appended together or not at all. The conversation is kept longer, because it is
        used.

        Args:
            items: items with ids.

        Raises:
            DuplicateItem: the conversation has an item with the same id, or two items have it.
            ConversationTooLarge: it would be larger than the whole store may be.
        """
        nothing: Stored | None = None
        found = await self._ask(
            lambda opened: opened.append(opened.key(owner, CONVERSATION, id), items), nothing, id
        )
        return found is not None

    async def items(
        self,
        owner: str,
        id: str,  # noqa: A002
        after: str | None = None,
        limit: int = 20,
        descending: bool = True,
    ) -> ItemPage | None:
        """Return a page of the items of a conversation; None if there is no conversation.

        Args:
            after: the id of the item before the page, also of a deleted one; None for the first
                page.
        """
        nothing: ItemPage | None = None
        return await self._ask(
            lambda opened: opened.items(
                opened.key(owner, CONVERSATION, id), after, limit, descending
            ),
            nothing,
            id,
        )

    async def all_items(self, owner: str, id: str) -> list[dict[str, Any]] | None:  # noqa: A002
        """Return all items of a conversation, the oldest first; None if there is no conversation.

        The conversation is kept longer, because it is used.
        """
        nothing: list[dict[str, Any]] | None = None
        return await self._ask(
            lambda opened: opened.all_items(opened.key(owner, CONVERSATION, id)), nothing, id
        )

    async def item(self, owner: str, id: str, item: str) -> dict[str, Any] | None:  # noqa: A002
        """Return an item of a conversation; None if one of them does not exist."""
        nothing: dict[str, Any] | None = None
        return await self._ask(
            lambda opened: opened.item(opened.key(owner, CONVERSATION, id), item), nothing, id
        )

    async def remove_item(self, owner: str, id: str, item: str) -> Stored | None:  # noqa: A002
        """Delete an item; return its conversation, or None if one of them does not exist."""
        nothing: Stored | None = None
        return await self._ask(
            lambda opened: opened.remove_items(opened.key(owner, CONVERSATION, id), [item]),
            nothing,
            id,
        )


class Store(Conversations):
    """A store of objects, such as chat completions, and of conversations.

    Nothing is opened, and no database library is imported, before `open` or the first object.

    Args:
        place: the database and its limits.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._writer = Writer(self._write, DELAY if place.durable else MEMORY_DELAY)
        self._opened: OpenStore | None = None
        self._opening = asyncio.Lock()
        # False after the last attempt to open it failed.
        self._can_open = True
        # The time until which an answer that failed counts, and that of the next line about one.
        self._fails_until = self._silent_until = 0.0
        self._tidying: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> OpenStore:
        """Open the database and run the missing migrations, once.

        Raises:
            StoreError: the schema is newer than this program, or the place cannot be used.
            StoreUnavailable: the database does not answer now.
        """
        if self._opened is not None:
            return self._opened
        async with self._opening:
            if self._opened is None:
                opened = await self._made()
                try:
                    await opened.database.open()
                except (StoreError, StoreUnavailable):
                    self._can_open = False
                    raise
                self._opened, self._can_open = opened, True
                if self.place.age is not None:
                    self._tidy()
        return self._opened

    async def look(self) -> bool:
        """Check that the database can be opened; return False if `open` would make its tables.

        Nothing is changed.

        Raises:
            StoreError, StoreUnavailable: see `open`.
        """
        opened = await self._made()
        return await opened.database.look() > 0

    def keep(self, record: Record) -> bool:
        """Queue an object without waiting for the database; return False if the queue is full."""
        return self._writer.add(record)

    async def commit(self, record: Record) -> bool:
        """Write an object before its response ends; return False if it is not stored in time.

        An object that is not stored in time is never stored.
        """
        if not self._writer.add(record):
            return False
        try:
            async with asyncio.timeout(COMMIT_SECONDS):
                await self._writer.flush()
        except (TimeoutError, StoreUnavailable):
            record.is_withdrawn = True
            return False
        except asyncio.CancelledError:
            record.is_withdrawn = True
            raise
        return not record.is_rejected

    async def begin(self) -> None:
        """Open the store once, before a response that is written at its end.

        The end of a response cannot wait for the first import of the database's libraries.
        """
        if self._opened is None and self._can_open:
            with suppress(StoreUnavailable):
                await self._open_to_answer()

    async def check(self) -> None:
        """Open the store, and raise `StoreUnavailable` if it is known not to take objects."""
        await self._open_to_answer()
        if self._writer.state != "ok":
            try:
                async with asyncio.timeout(COMMIT_SECONDS):
                    await self._writer.flush()
            except TimeoutError:
                raise StoreUnavailable(LATE) from None

    async def get(self, owner: str, kind: str, id: str, whole: bool = False) -> Stored | None:  # noqa: A002
        """Return an object of an owner, or None.

        Args:
            whole: return the request with its messages, and their images, audio and files; without,
                only with its parameters.

        Raises:
            StoreUnavailable: the database cannot answer.
        """
        return await self._ask(
            lambda opened: opened.find(opened.key(owner, kind, id), whole), None, id
        )

    async def page(
        self, owner: str, kind: str, query: Query, show: Callable[[Stored], T]
    ) -> Page[T]:
        """Return a page of the objects of an owner; see `get`. Their requests have no messages.

        Args:
            show: returns what the page has of each object; it runs in a thread.
        """
        nothing: Page[T] = Page([], False)
        return await self._ask(lambda opened: opened.page(owner, kind, query, show), nothing)

    async def chain(self, owner: str, kind: str, id: str) -> list[Stored]:  # noqa: A002
        """Return an object of an owner and those that it continues, the oldest first; see `get`.

        Their requests are whole. The list is empty if one of them does not exist. All of them are
        kept longer, because they are used.
        """
        nothing: list[Stored] = []
        return await self._ask(
            lambda opened: opened.chain(opened.key(owner, kind, id)), nothing, id
        )

    async def update(
        self,
        owner: str,
        kind: str,
        id: str,  # noqa: A002
        metadata: Mapping[str, str],
    ) -> Stored | None:
        """Replace the metadata of an object of an owner; return the object, or None; see `get`."""
        return await self._ask(
            lambda opened: opened.change(opened.key(owner, kind, id), metadata), None, id
        )

    async def delete(self, owner: str, kind: str, id: str) -> bool:  # noqa: A002
        """Delete an object of an owner; return False if there is none; see `get`."""
        return await self._ask(lambda opened: opened.remove(opened.key(owner, kind, id)), False, id)

    def status(self) -> Status:
        """Return the state of the store, for `/health`."""
        state = self._writer.state
        if state == "ok" and (not self._can_open or time.monotonic() < self._fails_until):
            state = "unavailable"
        return Status(state, self._writer.waiting, self._writer.lost)

    async def aclose(self) -> None:
        """Write what waits, and close the database; this takes a few seconds at most."""
        await self._writer.aclose()
        if self._timer is not None:
            self._timer.cancel()
        tidying, self._tidying = self._tidying, None
        if tidying is not None and not tidying.done():
            # A task of another event loop ended with it.
            with suppress(RuntimeError, ValueError):
                tidying.cancel()
                await asyncio.wait([tidying])
        opened, self._opened = self._opened, None
        # A lock belongs to the event loop that waited for it.
        self._opening = asyncio.Lock()
        if opened is not None:
            await opened.aclose()

    async def _made(self) -> OpenStore:
        # SQLAlchemy's import takes 0.3 s and 27 MB.
        module = await asyncio.to_thread(import_module, ".open_store", __package__)
        made: OpenStore = module.OpenStore(self.place)
        return made

    async def _for_reading(self, id: str | None = None) -> OpenStore | None:  # noqa: A002
        """Write what waits, and return the open store; None if nothing was ever stored.

        Args:
            id: the object to find; others may wait if the database takes nothing now.
        """
        try:
            await self._writer.flush()
        except StoreUnavailable:
            if id is None or self._writer.has(id):
                raise
        if self._opened is None and not self.place.durable:
            return None
        return await self._open_to_answer()

    async def _open_to_answer(self) -> OpenStore:
        if self._opened is not None:
            return self._opened
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self.open()
        except TimeoutError:
            raise StoreUnavailable(LATE) from None
        except StoreError as error:
            raise StoreUnavailable("it cannot be opened", str(error)) from None

    async def _ask(
        self,
        work: Callable[[OpenStore], Awaitable[T]],
        nothing: T,
        id: str | None = None,  # noqa: A002
        makes: bool = False,
    ) -> T:
        """Return the answer of the open store in time; `nothing` if nothing was ever stored.

        Args:
            makes: True for work that needs nothing of what is stored.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                opened = await (self._open_to_answer() if makes else self._for_reading(id))
                found = nothing if opened is None else await work(opened)
        except TimeoutError:
            error = StoreUnavailable(LATE)
        except StoreUnavailable as known:
            error = known
        else:
            self._fails_until = 0.0
            self._writer.hurry()
            return found
        self._note(error)
        raise error

    def _note(self, error: StoreUnavailable) -> None:
        """Note for the log and `/health` that a client got no answer."""
        now = time.monotonic()
        # The queue logs its own errors.
        if now >= self._silent_until and self._writer.state == "ok":
            log.error("the store did not answer a request: %s", error.detail)
            self._silent_until = now + QUIET
        self._fails_until = now + FAILING_SECONDS

    async def _write(self, records: Sequence[Record]) -> Sequence[Record]:
        opened = await self._open_to_answer()
        wanted = [record for record in records if not record.is_withdrawn]
        for record in wanted:
            record.is_tried = True
        rejected = await opened.write(wanted) if wanted else []
        for record in records:
            if record.is_withdrawn and record.is_tried:
                # Its response has said that it is not stored.
                await opened.withdraw(record)
        self._fails_until = 0.0
        return rejected

    def _tidy(self) -> None:
        """Delete the objects that are too old, now and from time to time."""
        loop = asyncio.get_running_loop()
        if self._tidying is None or self._tidying.done():
            self._tidying = loop.create_task(self._expire())
        pause = min(TIDY_SECONDS, (self.place.age or TIDY_SECONDS) / 4)
        self._timer = loop.call_later(pause, self._tidy)

    async def _expire(self) -> None:
        try:
            if self._opened is not None:
                await self._opened.expire()
        except StoreUnavailable as error:
            log.warning("old objects were not deleted: %s", error.detail)
