"""The operations on conversations of a store; see `store.Store`.

A conversation is an object of its own kind with items. It is retrieved, updated and deleted like
other objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConversationTooLarge
from .ids import new_id
from .record import CONVERSATION, ItemPage, Record, Stored

if TYPE_CHECKING:
    from .open_store import OpenStore

T = TypeVar("T")

# Random digits of an id, which has 48 digits with its time.
_RANDOM = 34


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
