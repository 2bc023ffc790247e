"""Tools of a chat request that are rejected before a grammar is made."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.chat.tools import Offered, tool_set_of
from latimer.adapter.errors import InvalidRequest
from latimer.schemas.openai.messages import Function


@pytest.mark.parametrize("kind", ["array", "string", ["array", "null"]])
def test_parameters_are_an_object(kind: Any) -> None:
    """Parameters of another type are rejected with OpenAI's message and code."""
    function = Function(name="f", parameters={"type": kind})
    written = '["array", "null"]' if isinstance(kind, list) else f'"{kind}"'
    with pytest.raises(InvalidRequest) as caught:
        tool_set_of([Offered(function, "tools[0].function")], "auto")
    assert str(caught.value) == (
        "Invalid schema for function 'f': schema must be a JSON Schema of 'type: \"object\"', "
        f"got 'type: {written}'."
    )
    assert caught.value.param == "tools[0].function.parameters"
    assert caught.value.code == "invalid_function_parameters"


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"type": ["object", "null"]}])
def test_parameters_that_may_be_an_object(schema: Any) -> None:
    """A schema without a type is one of an object."""
    function = Function(name="f", parameters=schema)
    assert tool_set_of([Offered(function, "functions[0]")], "auto").listed == [function]
