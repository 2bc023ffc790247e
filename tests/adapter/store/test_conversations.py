"""Tests of conversations and their items, on each kind of database."""

from __future__ import annotations

import asyncio
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from adapter.store.conftest import Opened, miscounted
from latimer.adapter.store import conversations, retention
from latimer.adapter.store.blobs import Files
from latimer.adapter.store.errors import ConversationTooLarge, Deadlock, DuplicateItem, Withdrawn
from latimer.adapter.store.records import CONVERSATION, Key
from latimer.adapter.store.store import Store
from sqlalchemy import Connection
from support.stored import PIXEL, item, record, response

TESTS = Path(__file__).parents[2]
NONE = "conv_0660e9ffc1636faff6bf09c7"


async def made(store: Store, *items: Mapping[str, Any], owner: str = "", **metadata: str) -> str:
    """Create a conversation and return its id."""
    return (await store.create_conversation(owner, "req_0", metadata, items)).id


async def ids(store: Store, name: str, owner: str = "") -> list[str] | None:
    """Return the ids of all items of a conversation, or None."""
    found = await store.all_items(owner, name)
    return None if found is None else [one["id"] for one in found]


async def rows(store: Store, statement: str) -> list[tuple[Any, ...]]:
    """Return the result of a statement."""
    database = await store.open()
    found = await database.read(lambda connection: connection.exec_driver_sql(statement).all())
    return [tuple(row) for row in found]


async def test_a_conversation_is_returned_as_it_was_made(store: Store) -> None:
    """It has its metadata, and its items in their order, with null characters and images."""
    given = [item("msg_1", "Héllo \0"), item("msg_2", image=PIXEL), {"id": "x", "type": "other"}]
    name = await made(store, *given, a="b")
    found = await store.get("", CONVERSATION, name)
    assert found is not None
    assert found.reply == {
        "id": name,
        "object": CONVERSATION,
        "created_at": found.created_at // 1_000_000,
        "metadata": {"a": "b"},
    }
    assert len(name) == len("conv_") + 48
    assert await store.all_items("", name) == given
    for one in given:
        assert await store.item("", name, one["id"]) == one
    changed = await store.update("", CONVERSATION, name, {"c": "d"})
    assert changed is not None
    assert changed.reply["metadata"] == {"c": "d"}
    assert await store.all_items("", name) == given


async def test_pages_of_items_are_in_the_order_in_which_they_were_appended(store: Store) -> None:
    """Pages in both directions have every item once, also if what they continue after is gone."""
    name = await made(store)
    expected = [f"msg_{9 - i}" for i in range(7)]
    for start in range(0, 7, 3):
        assert await store.append("", name, [item(one) for one in expected[start : start + 3]])
    for descending in (False, True):
        found: list[str] = []
        more = True
        while more:
            page = await store.items("", name, found[-1] if found else None, 2, descending)
            assert page is not None
            found += [one["id"] for one in page.data]
            more = page.has_more
        assert found == (expected[::-1] if descending else expected)
    assert await store.remove_item("", name, expected[2]) is not None
    page = await store.items("", name, expected[2], 2, False)
    assert page is not None
    assert [one["id"] for one in page.data] == expected[3:5]
    page = await store.items("", name, "msg_none")
    assert page is not None
    assert not page.is_known


async def test_what_does_not_exist_is_not_found(store: Store) -> None:
    """A conversation that nobody made, or that was deleted, has no items and takes none."""
    name = await made(store, item("msg_1"))
    assert await store.item("", name, "msg_2") is None
    assert await store.remove_item("", name, "msg_2") is None
    assert await store.delete("", CONVERSATION, name)
    for one in (name, NONE):
        assert await store.get("", CONVERSATION, one) is None
        assert await store.items("", one) is None
        assert await store.all_items("", one) is None
        assert not await store.append("", one, [item("msg_1")])
        assert await store.item("", one, "msg_1") is None
        assert await store.remove_item("", one, "msg_1") is None
    assert await rows(store, "SELECT * FROM latimer_items") == []


async def test_a_conversation_belongs_to_its_owner(store: Store) -> None:
    """Another owner can neither read nor change it."""
    name = await made(store, item("msg_1"), owner="a")
    assert await store.items("b", name) is None
    assert await store.all_items("b", name) is None
    assert not await store.append("b", name, [item("msg_2")])
    assert await store.item("b", name, "msg_1") is None
    assert await store.remove_item("b", name, "msg_1") is None
    assert store.keep(response(name, [item("msg_3")], owner="b"))
    assert not await store.delete("b", CONVERSATION, name)
    assert await ids(store, name, "a") == ["msg_1"]


@pytest.mark.parametrize("given", [["msg_1", "msg_1"], ["msg_2", "msg_0"]])
async def test_an_id_is_that_of_one_item(store: Store, given: list[str]) -> None:
    """Items with an id that is taken are not appended, nor those sent with them."""
    name = await made(store, item("msg_0"))
    with pytest.raises(DuplicateItem) as error:
        await store.append("", name, [item(one) for one in given])
    assert error.value.id == given[1]
    assert await ids(store, name) == ["msg_0"]


async def test_the_id_of_a_deleted_item_is_free(store: Store) -> None:
    """A deleted item can be appended again, at the end, and found by its id."""
    name = await made(store, item("msg_1", "old"), item("msg_2"))
    assert await store.remove_item("", name, "msg_1") is not None
    assert await store.append("", name, [item("msg_1", "new")])
    assert await ids(store, name) == ["msg_2", "msg_1"]
    assert await store.item("", name, "msg_1") == item("msg_1", "new")


async def test_items_of_a_response_are_appended_with_it(store: Store) -> None:
    """A response and its items are stored together, in the order of the queue."""
    name, other = await made(store, item("msg_0")), await made(store)
    for number in range(1, 6):
        turn = [item(f"msg_{number}"), item(f"rs_{number}")]
        assert store.keep(response(name if number % 2 else other, turn))
    assert await ids(store, name) == ["msg_0", "msg_1", "rs_1", "msg_3", "rs_3", "msg_5", "rs_5"]
    assert await ids(store, other) == ["msg_2", "rs_2", "msg_4", "rs_4"]


async def test_a_response_repeats_no_item(store: Store) -> None:
    """An item that the conversation has already is not appended again."""
    name = await made(store, item("msg_0", "first"))
    one = response(name, [item("msg_0", "second"), item("msg_1"), item("msg_1")])
    assert store.keep(one)
    assert await ids(store, name) == ["msg_0", "msg_1"]
    assert await store.item("", name, "msg_0") == item("msg_0", "first")
    assert await store.get("", "response", one.id) is not None


async def test_a_response_outlives_its_conversation(store: Store) -> None:
    """A response is stored although its conversation was deleted before it ended."""
    name = await made(store)
    assert await store.delete("", CONVERSATION, name)
    one = response(name, [item("msg_1")])
    assert store.keep(one)
    assert await store.get("", "response", one.id) is not None
    assert await ids(store, name) is None


async def test_a_packed_response_keeps_its_items(store: Store) -> None:
    """Items that wait as JSON are appended as those that do not wait."""
    from latimer.adapter.store.records import pack

    name = await made(store)
    one = response(name, [item("msg_1", image=PIXEL)])
    pack([one])
    assert one.items == ()
    assert store.keep(one)
    assert await store.all_items("", name) == [item("msg_1", image=PIXEL)]


async def test_a_withdrawn_response_leaves_no_items(store: Store) -> None:
    """A response that was not stored in time takes its items back, and no others."""
    name = await made(store, item("msg_0"))
    one = response(name, [item("msg_0"), item("msg_1")])
    assert await store.write([one]) == []
    assert await ids(store, name) == ["msg_0", "msg_1"]
    one.is_withdrawn = one.is_tried = True
    await store.write([one])
    assert await ids(store, name) == ["msg_0"]
    assert await store.get("", "response", one.id) is None


async def test_a_rejected_response_appends_nothing(store: Store) -> None:
    """Items are not appended without their response, and those of others are."""
    name = await made(store)
    wrong, right = response(name, [item("msg_1")]), response(name, [item("msg_2")])
    wrong.request_id = None  # type: ignore[assignment]
    assert all(map(store.keep, (wrong, right)))
    assert await ids(store, name) == ["msg_2"]
    assert store.status().lost == 1


async def test_concurrent_transactions_append_in_one_order(store: Store) -> None:
    """Each of many transactions appends its items together, and none is lost."""
    from latimer.adapter.store import conversations

    database = await store.open()
    name = await made(store)
    key = Key("", CONVERSATION, name)

    async def append(index: int) -> None:
        some = [item(f"msg_{index}_{place}") for place in range(3)]
        if index % 2:

            def work(connection: Any) -> None:
                conversations.append_new(connection, database.files, key, some, None)
        else:

            def work(connection: Any) -> None:
                conversations.write(connection, database.files, [response(name, some)], None)

        # The store itself writes in one thread; here many threads write at once.
        await asyncio.to_thread(database._run, work, True)

    await asyncio.gather(*map(append, range(40)))
    found = await ids(store, name)
    assert found is not None
    starts = [one.rpartition("_")[0] for one in found[::3]]
    assert sorted(starts) == sorted(f"msg_{index}" for index in range(40))
    assert found == [f"{start}_{place}" for start in starts for place in range(3)]
    assert await miscounted(database) == (0, 0)


# Appends to a conversation as clients and as responses do: each turn has three items.
APPENDS = """
import asyncio, sys
from support.stored import item, response, store_at

async def main(target, name, prefix, count):
    store = store_at(target)
    for number in range(count):
        turn = [item(f"msg_{prefix}{number}_{place}") for place in range(3)]
        if number % 3 == 0:
            assert await store.append("", name, turn)
            continue
        one = response(name, turn)
        one.is_kept = number % 3 == 1
        await store.begin()
        assert await store.commit(one), number
    await store.aclose()

asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))
"""


@pytest.mark.slow
async def test_processes_append_in_one_order(store: Store, target: str) -> None:
    """Nothing of what several processes append at the same time is lost, or mixed."""
    if target == "memory":
        pytest.skip("other processes do not have this store")
    name, count = await made(store), 12
    begin = sys.executable, "-c", APPENDS, target, name
    running = [await asyncio.create_subprocess_exec(*begin, prefix, str(count), cwd=TESTS)
               for prefix in "abc"]  # fmt: skip
    assert [await one.wait() for one in running] == [0, 0, 0]
    found = await ids(store, name)
    assert found is not None
    starts = [one.rpartition("_")[0] for one in found[::3]]
    assert sorted(starts) == sorted(f"msg_{a}{b}" for a in "abc" for b in range(count))
    assert found == [f"{start}_{place}" for start in starts for place in range(3)]
    (stored,) = await rows(store, "SELECT count(*) FROM latimer_objects WHERE kind = 'response'")
    assert stored == (3 * count // 3,)
    assert await miscounted(await store.open()) == (0, 0)


async def test_items_of_a_response_that_is_not_stored(store: Store) -> None:
    """A record that is not kept leaves its items only, and takes them back if it is withdrawn."""
    name = await made(store, item("msg_0"))
    one = response(name, [item("msg_1", image=PIXEL)])
    one.is_kept = False
    assert await store.write([one]) == []
    assert await store.all_items("", name) == [item("msg_0"), item("msg_1", image=PIXEL)]
    assert await store.get("", "response", one.id) is None
    assert await miscounted(await store.open()) == (0, 0)
    one.is_withdrawn = one.is_tried = True
    await store.write([one])
    assert await ids(store, name) == ["msg_0"]
    assert await miscounted(await store.open()) == (0, 0)


async def test_totals_count_items(store: Store) -> None:
    """The totals are those of the rows and media at any time, and zero in the end."""
    from latimer.adapter.store.objects import total

    database = await store.open()

    async def check() -> int:
        assert await miscounted(database) == (0, 0)
        return await database.read(total, "bytes")

    name = await made(store, item("msg_0"), a="b")
    sizes = [await check()]
    await store.append("", name, [item("msg_1", "x" * 5_000, PIXEL), item("msg_2", image=PIXEL)])
    sizes.append(await check())
    assert store.keep(response(name, [item("msg_3", image=PIXEL)], image=PIXEL))
    await store.update("", CONVERSATION, name, {"longer": "y" * 100})
    sizes.append(await check())
    assert sizes == sorted(sizes)
    await store.remove_item("", name, "msg_1")
    assert sizes[-1] - await check() > 5_000
    await store.delete("", CONVERSATION, name)
    await check()
    for row in await rows(store, "SELECT kind, id FROM latimer_objects"):
        await store.delete("", *row)
    assert await check() == 0


async def test_a_medium_stays_while_an_item_has_it(store: Store) -> None:
    """An image of two items is stored once, and deleted with the last of them."""
    name = await made(store, item("msg_1", image=PIXEL), item("msg_2", image=PIXEL))
    counts = []
    for one in ("msg_1", "msg_2"):
        counts.append(len(await rows(store, "SELECT hash FROM latimer_media")))
        assert await store.item("", name, one) == item(one, image=PIXEL)
        await store.remove_item("", name, one)
    assert counts == [1, 1]
    assert await rows(store, "SELECT hash FROM latimer_media") == []
    assert await rows(store, "SELECT hash FROM latimer_object_media") == []


async def test_an_old_conversation_stays_while_it_is_used(
    opened: Opened, later: Callable[[float], None]
) -> None:
    """Appending to a conversation keeps it, and reading all of it does, too."""
    async with opened(age=80.0) as store:
        one, two, alone = [await made(store, item("msg_0")) for _ in range(3)]
        later(50.0)
        assert await store.append("", one, [item("msg_1")])
        assert await ids(store, two) == ["msg_0"]
        later(50.0)
        assert await ids(store, one) == ["msg_0", "msg_1"]
        assert await ids(store, two) == ["msg_0"]
        assert await ids(store, alone) is None
        await store._expire()
        assert len(await rows(store, "SELECT * FROM latimer_items")) == 3


async def test_a_conversation_is_evicted_whole(opened: Opened) -> None:
    """The conversation that was not used for the longest time makes room, with all its items."""
    async with opened(size=1) as store:
        old, used = await made(store), await made(store)
        for number in range(2):
            for name in (old, used):
                assert await store.append("", name, [item(f"msg_{number}", "x" * 200_000)])
        assert await store.append("", used, [item("msg_2", "x" * 300_000)])
        assert await ids(store, old) is None
        assert await ids(store, used) == ["msg_0", "msg_1", "msg_2"]
        assert len(await rows(store, "SELECT id FROM latimer_items")) == 3


async def test_a_conversation_that_is_larger_than_the_store_is_refused(opened: Opened) -> None:
    """Nothing makes room for items that never fit, whether they are text or an image."""
    async with opened(size=1) as store:
        kept = await made(store, item("msg_0", "x" * 100_000))
        large = item("msg_1", "x" * 1_100_000)
        with pytest.raises(ConversationTooLarge):
            await made(store, large)
        with pytest.raises(ConversationTooLarge):
            await store.append("", kept, [large])
        image = "data:image/png;base64," + b64encode(bytes(1_100_000)).decode()
        with pytest.raises(ConversationTooLarge):
            await store.append("", kept, [item("msg_1", image=image)])
        assert await ids(store, kept) == ["msg_0"]
        assert await rows(store, "SELECT id FROM latimer_objects") == [(kept,)]


async def test_a_conversation_makes_no_room_in_the_share_of_others(opened: Opened) -> None:
    """A conversation that fits into the store is refused if owners with less have the room."""
    async with opened(size=1) as store:
        kept = await made(store, item("msg_0", "x" * 300_000))
        large = [item("msg_0", "x" * 900_000)]
        with pytest.raises(ConversationTooLarge):
            await store.create_conversation("bob", "req_1", {}, large)
        assert await store.create_conversation("bob", "req_1", {}, [item("msg_0", "x" * 600_000)])
        assert await ids(store, kept) == ["msg_0"]


async def test_a_refused_conversation_is_still_in_the_share_of_its_owner(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that do not fit delete nothing, and the owner with the most makes room afterwards."""
    # The shares are added up once.
    monkeypatch.setattr(retention, "_SELDOM", 1e9)
    async with opened(size=1) as store:
        # Until then, a store in memory only queues objects.
        await store.open()
        few, many = record("x" * 150_000, "alice"), [record("x" * 40_000, "bob") for _ in range(30)]
        for one in (few, *many):
            assert await store.commit(one)
        name = await made(store, owner="bob")
        names = "SELECT id FROM latimer_objects ORDER BY id"
        before = await rows(store, names)
        with pytest.raises(ConversationTooLarge):
            await store.append("bob", name, [item("msg_0", "x" * 900_000)])
        assert await rows(store, names) == before
        for _ in range(5):
            assert await store.commit(record("x" * 40_000, "carol"))
        counts = "SELECT owner, count(*) FROM latimer_objects GROUP BY owner ORDER BY owner"
        alice, (_, its), carol = await rows(store, counts)
        assert (alice, carol) == (("alice", 1), ("carol", 5))
        assert its < len(before)


async def test_a_transaction_that_is_rolled_back_changes_no_share(store: Store) -> None:
    """Objects count once, in the attempt of their transaction that the database commits."""
    database = await store.open()
    one, attempts = record("x" * 1_000, "alice"), list[int]()

    def write(connection: Connection, files: Files, error: Exception, times: int) -> None:
        conversations.write(connection, files, [one], 1 << 20)
        attempts.append(files.changes["alice"])
        if len(attempts) <= times:
            raise error

    with pytest.raises(Withdrawn):
        await database.write(write, database.files, Withdrawn(), 1)
    assert not database.files.shares
    await database.write(write, database.files, Deadlock(), 2)
    assert database.files.shares == {"alice": attempts[0]}
    assert attempts == [attempts[0]] * 3


async def test_items_outlive_the_process(opened: Opened, target: str) -> None:
    """A store that is opened again has the items, and appends after them."""
    if target == "memory":
        pytest.skip("ends with its process")
    async with opened() as store:
        name = await made(store, item("msg_1"))
        assert store.keep(response(name, [item("msg_2")]))
    async with opened() as store:
        assert await store.append("", name, [item("msg_3")])
        assert await ids(store, name) == ["msg_1", "msg_2", "msg_3"]
