"""Tests of the engines that are compared for a call in a large fleet."""

from __future__ import annotations

from collections.abc import Collection

from latimer.backends.fleet.holders import MOST_COMPARED, Holders
from latimer.backends.fleet.place import Place
from latimer.backends.fleet.replica import Replica
from support.engines.fleet import Engine, job, pool_of
from support.jobs import run


def ready(count: int) -> list[Replica]:
    """Return engines with two free places."""
    found = []
    for index in range(count):
        replica = Replica(f"e{index}", Engine(f"e{index}"), 2)
        replica.set("ready")
        found.append(replica)
    return found


def blocks(*parts: tuple[str, int]) -> list[int]:
    """Return hashes of blocks: for each part, its name and its number of blocks."""
    return [hash((name, number)) for name, count in parts for number in range(count)]


def compared(holders: Holders, prompt: list[int]) -> Collection[Replica]:
    """Return the engines that are compared for a prompt."""
    place = Place(job(), "demo", "none")
    place.blocks = prompt
    return holders.compared(place, None)


def test_the_engines_that_have_a_beginning_are_compared() -> None:
    """An engine is found by a prompt that continues another, or has half of it in common."""
    replicas = ready(200)
    holders = Holders(replicas)
    common = ("system", 30)
    for replica in replicas:
        holders.add(blocks(common, (replica.name, 70)), replica)
    for index in (0, 99, 199):
        name = replicas[index].name
        for prompt in (
            blocks(common, (name, 70), ("more", 50)),
            blocks(common, (name, 40), ("other", 100)),
        ):
            assert replicas[index] in compared(holders, prompt)
    short = blocks(("short", 3))
    holders.add(short, replicas[7])
    for _ in range(9):
        assert replicas[7] in compared(holders, [*short, 1, 2])


def test_few_engines_are_compared_and_a_free_one_is_always_found() -> None:
    """Few engines are compared, even if all have the prompt; one of them is free if any is."""
    replicas = ready(500)
    holders = Holders(replicas)
    prompt = blocks(("system", 100))
    for replica in replicas:
        holders.add(prompt, replica)
    seen: set[Replica] = set()
    for _ in range(500):
        found = compared(holders, prompt)
        assert len(found) <= 2 * MOST_COMPARED
        seen.update(found)
    assert seen == {*replicas}
    for replica in replicas:
        replica.running = 2
    assert not compared(holders, prompt)
    replicas[321].running = 1
    assert {*compared(holders, prompt)} == {replicas[321]}


def test_the_index_is_bounded() -> None:
    """The least recently used beginnings are forgotten, and so are removed engines."""
    replicas = ready(100)
    holders = Holders(replicas, most=50)
    prompts = [blocks((str(index), 40)) for index in range(40)]
    for prompt, replica in zip(prompts, replicas, strict=False):
        holders.add(prompt, replica)
    assert len(holders.engines) == 50
    for replica in replicas:
        replica.running = 2
    assert [*compared(holders, prompts[-1])] == [replicas[39]]
    assert not compared(holders, prompts[0])
    holders.use(replicas[:39])
    assert not compared(holders, prompts[-1])


async def test_a_large_pool_keeps_conversations_where_they_are() -> None:
    """In a pool that does not compare all engines, turns stay, and idle engines get new prompts."""
    engines = [Engine(f"e{index}") for index in range(3 * MOST_COMPARED)]
    pool = await pool_of(*engines)
    texts = [f"{index:03} " * 100 for index in range(2 * MOST_COMPARED)]
    first = [(await run(pool, job(text)))[0][0] for text in texts]
    assert len({*first}) == len(texts)
    for turn in range(3):
        texts = [f"{text}{turn} and so on " for text in texts]
        assert [(await run(pool, job(text)))[0][0] for text in texts] == first
