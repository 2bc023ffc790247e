"""Instructor around the `openai` client."""

from __future__ import annotations

import instructor
import pytest
from common import TOM, Person
from openai import AsyncOpenAI, OpenAI

ASK = [{"role": "user", "content": TOM}]


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_structured(url: str, mode: instructor.Mode) -> None:
    """Each mode returns an object at the first try."""
    client = instructor.from_openai(OpenAI(base_url=url, api_key="unused"), mode=mode)
    found = client.create(
        model="demo", messages=ASK, response_model=Person, max_retries=0, temperature=0,
        max_tokens=100,
    )  # fmt: skip
    assert isinstance(found, Person)


async def test_partial_objects(url: str) -> None:
    """A stream yields partial objects, and then the whole one."""
    client = instructor.from_openai(
        AsyncOpenAI(base_url=url, api_key="unused"), mode=instructor.Mode.JSON_SCHEMA
    )
    stream = client.create_partial(
        model="demo",
        messages=ASK,
        response_model=Person,
        temperature=0,
        max_tokens=100,
    )
    assert [one async for one in stream][-1].name
