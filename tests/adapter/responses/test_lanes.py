"""Tests of the lanes of a WebSocket, and of the responses that its connection keeps."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.responses.lanes import (
    DEFAULT,
    MOST_LANES,
    MOST_RUNNING,
    MOST_WAITING,
    Create,
    Kept,
    KeptTurns,
    Lanes,
    create_of,
    lane_of,
)

TURNS = KeptTurns().of_connection()


def frame(lane: str = DEFAULT, size: int = 1, **body: Any) -> Create:
    """Return a frame of a lane."""
    return Create(body, size, lane, True, TURNS)


def kept(name: str, size: int = 10) -> Kept:
    """Return a response whose items take some bytes."""
    return Kept(name, name, (b"x" * size,), False, size)


def test_a_lane_runs_one_frame_at_a_time() -> None:
    """The next frame of a lane runs when the one before it has ended; others do not wait."""
    lanes = Lanes(100)
    first, second, other = frame("a"), frame("a"), frame("b")
    for one in (first, second, other):
        lanes.add(one)
    assert lanes.start() == [first, other]
    assert lanes.start() == []
    lanes.end(first)
    assert lanes.start() == [second]
    lanes.end(second)
    lanes.end(other)
    assert lanes.is_idle


def test_a_connection_has_limits() -> None:
    """Lanes with a name, frames that run and wait, and their bytes have limits."""
    lanes = Lanes(1000)
    for number in range(MOST_LANES):
        lanes.add(frame(str(number)))
    with pytest.raises(InvalidRequest) as refused:
        lanes.add(frame("more"))
    assert refused.value.code == "websocket_stream_limit_reached"
    lanes.add(frame("0"))
    assert len(lanes.start()) == MOST_RUNNING
    for _ in range(MOST_WAITING - (MOST_LANES + 1 - MOST_RUNNING)):
        lanes.add(frame())
    with pytest.raises(InvalidRequest) as refused:
        lanes.add(frame())
    assert refused.value.status == 429
    assert len(lanes.clear()) == MOST_WAITING


def test_a_large_frame_waits_alone() -> None:
    """A frame of any size is taken if no other one runs or waits, and not besides others."""
    lanes = Lanes(10)
    large = frame("a", 20)
    lanes.add(large)
    with pytest.raises(InvalidRequest):
        lanes.add(frame("b", 1))
    assert lanes.start() == [large]
    lanes.end(large)
    lanes.add(frame("b", 1))


@pytest.mark.parametrize(
    ("sent", "stream"), [({}, True), ({"stream": False}, True), ({"stream": 3}, 3)]
)
def test_a_frame_becomes_a_body(sent: Any, stream: Any) -> None:
    """The body has none of the frame's own fields, and streams unless `stream` is invalid."""
    given = {"type": "response.create", "stream_id": "a", "generate": False, "model": "m", **sent}
    made = create_of(given, 5, lane_of(given), TURNS)
    assert made is not None
    assert made.body == {"model": "m", "stream": stream}
    assert (made.lane, made.generates, made.size) == ("a", False, 5)


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({}, "type"),
        ({"type": "response.append"}, "type"),
        ({"type": ["x" * 1000]}, "type"),
        ({"type": "response.create", "generate": 1}, "generate"),
        ({"type": "response.create", "stream_id": "a/b"}, "stream_id"),
        ({"type": "response.create", "stream_id": 1}, "stream_id"),
        ({"type": "response.create", "background": True}, "background"),
    ],
)
def test_a_wrong_frame_names_the_field(sent: Any, param: str) -> None:
    """A frame that asks for what a WebSocket does not serve is refused by the field's name."""
    with pytest.raises(InvalidRequest) as refused:
        create_of(sent, 1, lane_of(sent), TURNS)
    assert refused.value.param == param
    assert len(refused.value.message) < 300


def test_only_the_latest_response_of_a_lane_is_kept() -> None:
    """A lane forgets its response for the next one, and a failed continuation forgets it, too."""
    memory = KeptTurns()
    turns, others = memory.of_connection(), memory.of_connection()
    turns.keep("a", kept("r1"))
    turns.keep("a", kept("r2"))
    turns.keep("b", kept("r3"))
    assert [turns.find(name) is not None for name in ("r1", "r2", "r3")] == [False, True, True]
    assert others.find("r2") is None
    turns.fail(frame("b", previous_response_id="r2"))
    assert turns.find("r2") is not None
    turns.fail(frame("a", previous_response_id="r2"))
    assert turns.find("r2") is None
    turns.clear()
    assert memory.size == 0


def test_all_connections_share_a_number_of_bytes() -> None:
    """The response that was unused for longest is forgotten first, and a huge one is not kept."""
    memory = KeptTurns(25)
    first, second = memory.of_connection(), memory.of_connection()
    first.keep(DEFAULT, kept("r1"))
    second.keep(DEFAULT, kept("r2"))
    assert first.find("r1") is not None
    second.keep("b", kept("r3"))
    assert second.find("r2") is None
    assert first.find("r1") is not None
    second.keep("c", kept("r4", 26))
    assert second.find("r4") is None
    assert memory.size == 20
    first.clear()
    second.clear()
    assert memory.size == 0
