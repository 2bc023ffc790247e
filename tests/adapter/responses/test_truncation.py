"""Tests of `truncation: "auto"`: which items leave the prompt, and when."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import pytest
from latimer.adapter.endpoints import responses
from latimer.adapter.responses.items import Placed
from latimer.adapter.responses.truncation import droppable, fewest
from support.clients import adapting
from support.engines.echo import Echo
from support.response_events import events_in

from .requests import ITEMS, call, output, said, thought, user

R = "/v1/responses"
CONTEXT = 512
SYSTEM = {"role": "system", "content": "Be short."}


def units(*items: Any) -> list[list[int]]:
    """Return what may be dropped of items."""
    return droppable([Placed(item, "") for item in ITEMS.validate_python([*items])])


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([user()], []),
        ([user(), said("a")], []),
        # Whole turns, without instructions.
        ([user(), said("a"), user(), said("b"), user()], [[0, 1], [2, 3]]),
        ([SYSTEM, user(), SYSTEM, said("a"), user()], [[1, 3]]),
        ([said("a"), user(), said("b"), user()], [[0], [1, 2]]),
        # A call goes with its output, wherever that is.
        ([user(), call("1"), user(), output("1"), user()], [[0, 1, 3], [2]]),
        # After the last message of the user, one step after another, but not the last one.
        ([user(), thought("t"), call("1"), output("1"), call("2"), output("2")], [[1], [2, 3]]),
        ([user(), call("1"), call("2"), output("1"), output("2")], [[1, 3]]),
        ([user(), said("a"), user(), call("1"), output("1"), said("b")], [[0, 1], [3, 4]]),
    ],
)
def test_what_may_be_dropped(items: list[Any], expected: list[list[int]]) -> None:
    """The last message of the user, the last item and instructions stay; pairs stay pairs."""
    assert units(*items) == expected


@pytest.mark.parametrize("most", [0, 1, 2, 7, 100])
async def test_the_smallest_number_is_found(most: int) -> None:
    """The search has the smallest number with a result, in few attempts."""
    for least in range(1, most + 2):
        tried: list[int] = []

        async def attempt(number: int, least: int = least, tried: list[int] = tried) -> int | None:
            tried.append(number)
            return number if number >= least else None

        assert await fewest(most, attempt) == (least if least <= most else None)
        assert len(tried) <= most.bit_length() + 1


@pytest.fixture(scope="module")
async def echo() -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of a small context, whose model repeats the last message."""
    async with adapting(Echo(context=CONTEXT)) as made:
        yield made


def talk(count: int) -> list[Any]:
    """Return turns of about fifty tokens each, and a question."""
    items: list[Any] = []
    for number in range(count):
        items += [user(f"{number:03} " + "x" * 20), said("y" * 10)]
    return [*items, user("Last?")]


async def asked(client: httpx2.AsyncClient, given: Any, **more: Any) -> httpx2.Response:
    """Return the reply to an input."""
    return await client.post(R, json={"model": "m", "input": given, **more})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_conversation_is_cut(echo: httpx2.AsyncClient, stream: bool) -> None:
    """The answer names `auto`, and its prompt has as many tokens as were counted before."""
    body = {"truncation": "auto", "max_output_tokens": 32}
    reply = await asked(echo, talk(40), stream=stream, **body)
    assert reply.status_code == 200, reply.text
    made = events_in(reply.text)[-1]["response"] if stream else reply.json()
    assert (made["status"], made["truncation"]) == ("completed", "auto")
    assert made["output"][0]["content"][0]["text"] == "Last?"
    used = made["usage"]["input_tokens"]
    assert CONTEXT - 32 - 80 < used <= CONTEXT - 32
    count = {"model": "m", "input": talk(40), **body}
    assert (await echo.post(f"{R}/input_tokens", json=count)).json()["input_tokens"] == used


async def test_disabled_is_an_error(echo: httpx2.AsyncClient) -> None:
    """Without it, and with `disabled`, the same conversation is a 400."""
    for more in ({}, {"truncation": "disabled"}, {"truncation": None}):
        reply = await asked(echo, talk(40), **more)
        assert (reply.status_code, reply.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )


async def test_what_fits_is_not_cut(echo: httpx2.AsyncClient) -> None:
    """A conversation that fits has the same prompt with and without it."""
    counts = [
        (await asked(echo, talk(3), **more)).json()["usage"]["input_tokens"]
        for more in ({}, {"truncation": "auto"})
    ]
    assert counts[0] == counts[1]


async def test_room_for_an_answer(echo: httpx2.AsyncClient) -> None:
    """A conversation that is cut leaves an eighth of the context for an answer without a limit."""
    made = (await asked(echo, talk(40), truncation="auto")).json()
    assert made["usage"]["input_tokens"] <= CONTEXT - CONTEXT // 8


async def test_instructions_and_the_question_stay(echo: httpx2.AsyncClient) -> None:
    """If these alone do not fit, the request is the usual 400."""
    for body in (
        {"input": [*talk(3), user("x" * 600)]},
        {"input": talk(3), "instructions": "x" * 600},
        {"input": [{"role": "developer", "content": "x" * 600}, *talk(3)]},
    ):
        reply = await echo.post(R, json={"model": "m", "truncation": "auto", **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "input")
        assert error["code"] == "context_length_exceeded"
    reply = await asked(echo, talk(3), truncation="auto", max_output_tokens=CONTEXT)
    assert reply.json()["error"]["param"] == "max_output_tokens"


async def test_stored_items_are_cut_and_kept(echo: httpx2.AsyncClient) -> None:
    """A conversation and a chain are cut in the prompt, and stay whole where they are stored."""
    name = (await echo.post("/v1/conversations", json={})).json()["id"]
    before = None
    for number in range(12):
        given = [user(f"{number:03} " + "x" * 30)]
        for more in ({"conversation": name}, {"previous_response_id": before}):
            reply = await asked(echo, given, truncation="auto", max_output_tokens=40, **more)
            assert reply.status_code == 200, reply.text
        before = reply.json()["id"]
    items = (await echo.get(f"/v1/conversations/{name}/items?limit=100")).json()["data"]
    assert len(items) == 24
    for more in ({"conversation": name}, {"previous_response_id": before}):
        assert (await asked(echo, "x", **more)).status_code == 400


async def test_a_loop_of_tools_is_cut(echo: httpx2.AsyncClient) -> None:
    """Of one long turn, the first calls leave together with their outputs."""
    items = [user("Go.")]
    for number in map(str, range(20)):
        items += [call(number), output(number, "z" * 40)]
    reply = await asked(echo, items, truncation="auto")
    assert reply.status_code == 200, reply.text


async def test_what_leaves_is_found_in_a_thread(
    echo: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that is too long may have many items: the event loop is left to others."""
    threads: list[threading.Thread] = []

    def noting(items: Sequence[Placed]) -> list[list[int]]:
        threads.append(threading.current_thread())
        return droppable(items)

    monkeypatch.setattr(responses, "droppable", noting)
    assert (await asked(echo, talk(40), truncation="auto")).status_code == 200
    assert threads
    assert threading.main_thread() not in threads
