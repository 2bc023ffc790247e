"""Tests of the runner's verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx2
import pytest
from latimer.conformance.check import Body, Check, Fail, Skip, Verdict
from latimer.conformance.runner import run
from latimer.conformance.target import Api


async def judged(body: Body) -> Verdict:
    """Return the verdict on a check with this body."""
    async with httpx2.AsyncClient() as client:
        return await run(Check("a.b", "", "must", "", body), lambda: Api(client, "m"))


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([Fail(), Skip(), Skip()], ("fail", 3, 0)),
        ([Fail(), Skip(), None], ("flaky", 3, 1)),
        ([Skip()], ("skip", 1, 0)),
    ],
)
async def test_an_inconclusive_run_hides_no_failure(
    outcomes: Sequence[Exception | None], verdict: tuple[str, int, int]
) -> None:
    """A check that fails is not skipped because a later run of it is inconclusive."""
    left = iter(outcomes)

    async def body(api: Api) -> None:
        if (error := next(left)) is not None:
            raise error

    found = await judged(body)
    assert (found.outcome, found.runs, found.passes) == verdict


@pytest.mark.parametrize(
    "error", [asyncio.LimitOverrunError("a page without an end", 0), httpx2.InvalidURL("a\tb")]
)
async def test_no_response_ends_the_run(error: Exception) -> None:
    """A page of 64 KiB in place of a stream, or an id that no path can have, fails its check."""

    async def body(api: Api) -> None:
        raise error

    found = await judged(body)
    assert (found.outcome, type(error).__name__ in found.detail) == ("fail", True)
