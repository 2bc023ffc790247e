"""Tests of models in Anthropic's form (contract of messages, section 8)."""

from __future__ import annotations

import pytest
from anthropic.types import ModelInfo
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.messages.models import info_of, page_of
from latimer.backends.base import Model
from support.clients import adapting
from support.engines.echo import Echo

VERSION = {"anthropic-version": "2023-06-01"}
INFOS = [info_of(name) for name in "abcde"]


async def test_the_header_decides_on_the_form() -> None:
    """The list and a model have Anthropic's form with its version header, else OpenAI's."""
    async with adapting(Echo(), any_model=False, model_names=["a/b", "c"]) as client:
        listed = (await client.get("/v1/models", headers=VERSION)).json()
        assert [model["id"] for model in listed["data"]] == ["a/b", "c"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a/b", "c", False)
        for model in listed["data"]:
            ModelInfo.model_validate(model)
        one = await client.get("/v1/models/a/b", headers=VERSION)
        assert one.json() == listed["data"][0]
        assert one.headers["request-id"].startswith("req_")
        plain = await client.get("/v1/models")
        assert plain.json()["object"] == "list"
        assert "request-id" not in plain.headers
        unknown = await client.get("/v1/models/x", headers=VERSION)
        assert unknown.status_code == 404
        assert unknown.json()["error"] == {"type": "not_found_error", "message": "model: x"}


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "c"}, "de", False),
        ({"limit": "2", "before_id": "d"}, "bc", True),
        ({"limit": "9", "before_id": "c"}, "ab", False),
        ({"after_id": "e"}, "", False),
    ],
)
def test_pages(query: dict[str, str], names: str, more: bool) -> None:
    """A page has as many models as are asked for, after or before one of them."""
    page = page_of(INFOS, query)
    assert "".join(one["id"] for one in page["data"]) == names
    assert page["has_more"] == more
    ends = (names[0], names[-1]) if names else (None, None)
    assert (page["first_id"], page["last_id"]) == ends


@pytest.mark.parametrize("limit", ["0", "1001", "x"])
def test_a_limit_out_of_range_is_refused(limit: str) -> None:
    """The size of a page is a number from 1 to 1000."""
    with pytest.raises(InvalidRequest, match=r"^limit: Input should be "):
        page_of(INFOS, {"limit": limit})


@pytest.mark.parametrize("field", ["after_id", "before_id"])
def test_an_unknown_id_is_refused(field: str) -> None:
    """A page next to a model that is not listed is refused; a client would read one twice."""
    with pytest.raises(InvalidRequest, match=rf"^{field}: No model has the id 'x'$"):
        page_of(INFOS, {field: "x"})


def test_what_a_model_can_do() -> None:
    """A model has its context and what its template and its engine can do."""
    model = Model("m", 4096, "{{ reasoning_effort }}", "", "", False, "f", 86_400)
    found = info_of("m", model, reasons=True, structures=True)
    assert (found["created_at"], found["max_input_tokens"]) == ("1970-01-02T00:00:00Z", 4096)
    able = {name for name, one in found["capabilities"].items() if one["supported"]}
    assert able == {"effort", "pdf_input", "structured_outputs", "thinking"}
