"""Tests of the decisions about which engines of a machine are loaded."""

from __future__ import annotations

import random
from typing import Any

import pytest
from latimer.backends.fleet.plan import View, plan

GPU = {"gpu": 24}


def loaded(name: str, size: int | None, **facts: object) -> View:
    """Return a member that is loaded, and was ready and unused for a long time."""
    need = None if size is None else {"gpu": size}
    rest: dict[str, object] = {"unused": 1000.0, "ready_for": 1000.0, **facts}
    return View(name, is_loaded=True, need=need, **rest)  # type: ignore[arg-type]


def wanted(name: str, size: int | None, waited: float = 1.0, **facts: object) -> View:
    """Return a member that is not loaded, and whose requests wait."""
    need = None if size is None else {"gpu": size}
    return View(name, need=need, waited=waited, **facts)  # type: ignore[arg-type]


def test_engines_that_fit_are_loaded_together() -> None:
    """A member is loaded next to another one if both fit, without unloading anything."""
    made = plan([loaded("a", 14), wanted("b", 10)], GPU)
    assert (made.load, made.unload) == (["b"], [])


def test_a_missing_engine_takes_no_place_of_others() -> None:
    """A member that has failed is loaded into free memory only, after those that are wanted."""
    missing = View("m", need={"gpu": 10}, is_missing=True)
    assert plan([loaded("a", 14), missing], GPU).load == ["m"]
    assert plan([missing], None).load == ["m"]
    made = plan([loaded("a", 15), missing], GPU)
    assert (made.load, made.unload, made.closed) == ([], [], set())
    assert plan([loaded("a", 4), wanted("b", 15), missing], GPU).load == ["b"]


def test_without_limits_everything_is_loaded() -> None:
    """A machine whose memory is not limited loads every member that is wanted."""
    made = plan([loaded("a", 14), wanted("b", 1000), wanted("c", None)], None)
    assert (sorted(made.load), made.unload) == (["b", "c"], [])


def test_an_unused_engine_makes_room() -> None:
    """A member that no request uses is unloaded for another one, which is loaded afterwards."""
    made = plan([loaded("a", 14), wanted("b", 20)], GPU)
    assert (made.load, made.unload, made.closed) == ([], ["a"], {"a"})


def test_a_load_replaces_the_model_of_its_place() -> None:
    """A member is loaded in place of another one of its server if that alone is in its way."""
    here: Any = {"need": {"gpu": 14, "here": 1}, "place": "here"}
    one, two = loaded("a", 14)._replace(**here), wanted("b", 14)._replace(**here)
    memory = {**GPU, "here": 1}
    made = plan([one, two], memory)
    assert (made.load, made.unload, made.replaced) == (["b"], [], {"b": "a"})
    assert made.closed == {"a"}
    for views in (
        [one._replace(running=1), two._replace(waited=1e6)],
        [one._replace(place="there"), two],
        [one, loaded("c", 10), two._replace(need={"gpu": 24, "here": 1})],
    ):
        made = plan(views, memory)
        assert not made.load
        assert not made.replaced


def test_a_place_is_for_one_model_whatever_its_memory() -> None:
    """Of two members of a server that has one model at a time, one is loaded, also where memory is
    not limited; one of another server is loaded, too."""
    for memory, need in ((None, None), (GPU, {}), (GPU, {"gpu": 1})):
        here = wanted("b", None)._replace(place="here", need=need)
        for place, load in (("here", ["a"]), ("there", ["a", "b"])):
            first = wanted("a", None)._replace(place=place, need=need)
            assert plan([first, here], memory).load == load
        first = loaded("a", 0)._replace(place="here", need=need, running=1)
        assert not plan([first, here], memory).load


def test_a_busy_engine_is_not_unloaded() -> None:
    """A member that runs requests is never unloaded, no matter how long others wait."""
    for waited in (0.0, 29.0, 31.0, 1e6):
        made = plan([loaded("a", 14, running=1), wanted("b", 20, waited)], GPU)
        assert (made.load, made.unload) == ([], [])


@pytest.mark.parametrize("is_settled", [True, False])
def test_pinned_and_changing_engines_stay(is_settled: bool) -> None:
    """Neither a pinned member nor one that is being loaded is unloaded."""
    facts = {"is_pinned": True} if is_settled else {"is_settled": False}
    made = plan([loaded("a", 14, **facts), wanted("b", 20, 1e6)], GPU)
    assert (made.load, made.unload, made.closed) == ([], [], set())
    assert set(made.never) == ({"b"} if is_settled else set())


def test_a_busy_engine_closes_after_the_longest_wait() -> None:
    """A busy member accepts requests until another one has waited for too long."""
    busy = loaded("a", 14, running=1)
    early = plan([busy, wanted("b", 20, 29.0)], GPU, most_wait=30.0)
    assert not early.closed
    assert early.again == pytest.approx(1.0)
    assert plan([busy, wanted("b", 20, 30.0)], GPU, most_wait=30.0).closed == {"a"}


def test_an_engine_serves_for_as_long_as_its_load_took() -> None:
    """A member that was just loaded is not closed before it has served for a while."""
    busy = loaded("a", 14, running=1, load_seconds=10.0, ready_for=4.0)
    made = plan([busy, wanted("b", 20, 100.0)], GPU, most_wait=30.0)
    assert not made.closed
    assert made.again == pytest.approx(6.0)


def test_an_engine_that_was_used_a_moment_ago_is_kept() -> None:
    """A member is kept for as long as loading the other one takes, since its client may return."""
    used = loaded("a", 14, unused=0.5)
    made = plan([used, wanted("b", 20, 1.0, load_seconds=2.0)], GPU)
    assert made.unload == []
    assert made.again == pytest.approx(1.5)
    assert plan([used, wanted("b", 20, 30.0, load_seconds=2.0)], GPU).unload == ["a"]


def test_the_least_recently_used_engine_goes_first() -> None:
    """Of several unused members the one that was unused for longest is unloaded, and no more."""
    views = [loaded("a", 8, unused=5.0), loaded("b", 8, unused=9.0), loaded("c", 8, running=1)]
    made = plan([*views, wanted("d", 8)], GPU)
    assert made.unload == ["b"]


def test_no_engine_is_unloaded_in_vain() -> None:
    """A small member that was unused for longest is kept if it alone is not enough."""
    views = [loaded("small", 2, unused=900.0), loaded("large", 20, unused=9.0)]
    assert plan([*views, wanted("new", 20)], GPU).unload == ["large"]


def test_the_one_that_waited_longest_is_first() -> None:
    """Of two members that cannot be loaded together, the one that waited longer is loaded."""
    made = plan([wanted("a", 20, 1.0), wanted("b", 20, 2.0)], GPU)
    assert made.load == ["b"]


def test_room_is_kept_for_the_first() -> None:
    """A later member does not take the memory that an earlier one waits for."""
    made = plan([loaded("a", 14, running=1), wanted("b", 20, 5.0), wanted("c", 8, 1.0)], GPU)
    assert made.load == []


def test_an_engine_that_is_too_large_is_refused() -> None:
    """A member that does not fit into an empty machine is refused with both sizes."""
    made = plan([wanted("a", 25 * 2**30)], {"gpu": 24 * 2**30})
    assert "25 GiB" in made.never["a"]
    assert "24 GiB" in made.never["a"]


def test_an_unknown_size_takes_everything() -> None:
    """A member of unknown size is loaded alone, next to pinned ones only."""
    views = [loaded("a", 8), loaded("b", 8, is_pinned=True), wanted("c", None)]
    assert plan(views, GPU).unload == ["a"]
    assert plan([views[1], views[2]], GPU).load == ["c"]


def test_idle_engines_are_unloaded() -> None:
    """An unused member is unloaded after its idle time, counted from its last request."""
    assert plan([loaded("a", 8, unused=59.0, idle=60.0)], GPU).again == pytest.approx(1.0)
    assert plan([loaded("a", 8, unused=60.0, idle=60.0)], GPU).unload == ["a"]
    assert plan([loaded("a", 8, unused=99.0, idle=60.0, is_pinned=True)], GPU).unload == []
    assert plan([loaded("a", 8, unused=99.0, idle=60.0, running=1)], GPU).unload == []


def test_several_memories_are_all_considered() -> None:
    """A member must fit into each memory that it needs."""
    views = [View("a", is_loaded=True, need={"gpu": 20}, unused=1000.0, ready_for=1000.0)]
    memory = {"gpu": 24, "ram": 64}
    fits = View("b", need={"ram": 64}, waited=1.0)
    assert plan([*views, fits], memory).load == ["b"]
    large = View("b", need={"ram": 60, "gpu": 5}, waited=1.0)
    assert plan([*views, large], memory).unload == ["a"]


@pytest.mark.parametrize("seed", range(50))
def test_plans_are_safe(seed: int) -> None:
    """Random plans never unload a busy, pinned or changing member, nor exceed the memory."""
    chance = random.Random(seed)
    for _ in range(200):
        views = [
            View(
                str(number),
                is_loaded=chance.random() < 0.5,
                is_settled=chance.random() < 0.8,
                is_pinned=chance.random() < 0.2,
                running=chance.choice((0, 0, 1, 3)),
                waited=chance.choice((None, chance.uniform(0, 60))),
                unused=chance.uniform(0, 60),
                ready_for=chance.uniform(0, 60),
                idle=chance.choice((None, 30.0)),
                need={"gpu": chance.randrange(30)},
                place=chance.choice(("", "here")),
            )
            for number in range(6)
        ]
        made = plan(views, GPU)
        known = {view.key: view for view in views}
        for name in (*made.unload, *made.replaced.values()):
            view = known[name]
            assert view.is_loaded
            assert view.is_settled
            assert not view.running
            assert not view.is_pinned
        stays = [view for view in views if view.is_loaded]
        if made.load and sum((view.need or {})["gpu"] for view in stays) <= 24:
            stays = [view for view in stays if view.key not in made.replaced.values()]
            total = sum((view.need or {})["gpu"] for view in stays)
            total += sum((known[name].need or {})["gpu"] for name in made.load)
            assert total <= 24
