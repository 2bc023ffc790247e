"""Tests of objects that continue one another, on each kind of database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from adapter.store.conftest import Opened
from latimer.adapter.store.records import Query, Record
from latimer.adapter.store.store import Store
from support.stored import record, same

KIND = "response"


def child(parent: Record | None = None, text: str = "Hello", **more: Any) -> Record:
    """Return a record that continues another one, or begins a chain."""
    made = record(text, kind=KIND, **more)
    made.chain = made.id if parent is None else parent.chain
    made.parent = None if parent is None else parent.id
    return made


async def chain_of(store: Store, one: Record, owner: str = "") -> list[str]:
    """Return the ids of the chain that ends with an object."""
    return [found.id for found in await store.chain(owner, KIND, one.id)]


async def test_a_chain_is_returned_from_its_beginning(store: Store) -> None:
    """A branch of a tree has its own ancestors only, with their whole requests."""
    root = child()
    one = child(root)
    two, other = child(one), child(one)
    assert all(store.keep(each) for each in (root, one, two, other))
    assert await chain_of(store, two) == [root.id, one.id, two.id]
    assert await chain_of(store, other) == [root.id, one.id, other.id]
    assert await chain_of(store, root) == [root.id]
    found = await store.chain("", KIND, two.id)
    assert [each.request for each in found] == [root.request, one.request, two.request]


async def test_a_broken_chain_is_empty(store: Store) -> None:
    """Without one of its ancestors, an object is not continued from half a context."""
    root = child()
    one = child(root)
    two = child(one)
    assert all(store.keep(each) for each in (root, one, two))
    assert await store.delete("", KIND, one.id)
    assert await chain_of(store, two) == []
    assert await chain_of(store, root) == [root.id]


async def test_a_chain_belongs_to_its_owner(store: Store) -> None:
    """Another owner can neither read nor continue a chain."""
    root = child(owner="a")
    assert store.keep(root)
    assert await chain_of(store, root, "b") == []
    assert await chain_of(store, root, "a") == [root.id]


async def test_an_old_chain_stays_while_it_is_used(
    opened: Opened, later: Callable[[float], None]
) -> None:
    """Continuing a chain keeps its ancestors, and reading it does, too."""
    async with opened(age=80.0) as store:
        root, alone = child(), child()
        assert store.keep(root)
        assert store.keep(alone)
        await chain_of(store, root)
        later(50.0)
        one = child(root)
        assert store.keep(one)
        assert await chain_of(store, one) == [root.id, one.id]
        later(50.0)
        assert await chain_of(store, one) == [root.id, one.id]
        assert await chain_of(store, alone) == []


@pytest.mark.parametrize("metadata", [{}, {"a": "b"}])
async def test_an_old_chain_is_listed_while_it_is_used(
    opened: Opened, later: Callable[[float], None], metadata: Mapping[str, str]
) -> None:
    """A list has what can be retrieved: a used object, also if it is old, and no other one."""
    async with opened(age=80.0) as store:
        root, alone = child(metadata=metadata), child(metadata=metadata)
        one = child(root, metadata=metadata)
        assert all(store.keep(each) for each in (root, alone, one))
        later(50.0)
        assert await chain_of(store, one) == [root.id, one.id]
        later(50.0)
        assert await store.get("", KIND, alone.id) is None
        page = await store.page("", KIND, Query(metadata=metadata), same)
        assert [each.id for each in page.data] == [root.id, one.id]


async def test_a_chain_is_evicted_whole(opened: Opened) -> None:
    """The chain that was not used for the longest time makes room, with all its objects."""
    async with opened(size=1) as store:
        old, used = child(), child()
        old_child, used_child = child(old, "x" * 150_000), child(used, "x" * 150_000)
        assert all(store.keep(one) for one in (old, used, old_child, used_child))
        assert await chain_of(store, used_child) == [used.id, used_child.id]
        assert await chain_of(store, old_child) == [old.id, old_child.id]
        assert await chain_of(store, used_child) == [used.id, used_child.id]
        assert store.keep(record("x" * 230_000))
        assert await chain_of(store, used_child) == [used.id, used_child.id]
        assert await store.get("", KIND, old.id) is None
        assert await store.get("", KIND, old_child.id) is None
