"""Tests of queries: how they are read, and OpenAI's errors for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.request import Exchange, parameters
from latimer.adapter.validation import parse, read_query
from latimer.schemas.openai.chat import ChatRequest
from latimer.schemas.openai.stored import CompletionsQuery, MetadataUpdate
from pydantic import TypeAdapter

QUERY = TypeAdapter(CompletionsQuery)
UPDATE = TypeAdapter(MetadataUpdate)


def exchange_of(query: bytes) -> Exchange:
    """Return an exchange with a query."""
    return Exchange({"query_string": query, "headers": []}, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (b"", {}),
        (b"limit=5&order=desc", {"limit": "5", "order": "desc"}),
        (b"limit=1&limit=2", {"limit": "2"}),
        (b"model=org%2Fmodel+1%20x", {"model": "org/model 1 x"}),
        ("model=é".encode(), {"model": "é"}),
        (b"after=", {"after": ""}),
        (b"metadata[k]=v", {"metadata": {"k": "v"}}),
        (b"metadata%5Bk%5D=v", {"metadata": {"k": "v"}}),
        (b"metadata%5bk%5d=v&metadata[l]=%C3%A9", {"metadata": {"k": "v", "l": "é"}}),
        (b"metadata[k]=v&metadata[k]=w", {"metadata": {"k": "w"}}),
        (b"metadata[a[b]%26=]=c", {"metadata[a[b]&": "]=c"}),
        (b"metadata[a[b]%26%3D]=c", {"metadata": {"a[b]&=": "c"}}),
        (b"metadata[]=v", {"metadata": {"": "v"}}),
        (b"metadata=a&metadata[k]=v", {"metadata": {"k": "v"}}),
        (b"metadata[k]=v&metadata=a", {"metadata": "a"}),
        (b"metadata[k=v", {"metadata[k": "v"}),
        (b"flag", {"flag": ""}),
    ],
)
def test_parameters(query: bytes, found: dict[str, Any]) -> None:
    """Parameters are read as clients encode them, and pairs of an object become one object."""
    assert parameters(query) == found


@pytest.mark.parametrize("query", [b"model=%ff", b"model=\xff", b"%c3=1"])
def test_a_query_is_utf8(query: bytes) -> None:
    """A query that is not UTF-8 is an error, since no replacement could be the client's text."""
    with pytest.raises(InvalidRequest, match="Invalid query string: it is not UTF-8"):
        parameters(query)


def test_a_query_has_defaults() -> None:
    """Without parameters the first 20 items are listed, oldest first and without filters."""
    query = read_query(exchange_of(b""), QUERY, strict=True)
    assert (query.after, query.limit, query.order) == (None, 20, "asc")
    assert (query.model, query.metadata) == (None, None)


def test_a_query_is_typed() -> None:
    """Numbers and objects of a query have their types."""
    asked = b"after=x&limit=100&order=desc&model=demo&metadata[k]=1&metadata[l]="
    query = read_query(exchange_of(asked), QUERY, strict=True)
    assert (query.after, query.limit, query.order) == ("x", 100, "desc")
    assert (query.model, query.metadata) == ("demo", {"k": "1", "l": ""})


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        (b"limit=none", "limit", "Invalid type for 'limit': expected an integer, but got a string"),
        (b"limit=1.5", "limit", "Invalid type for 'limit': expected an integer, but got a string"),
        (b"limit=", "limit", "Invalid type for 'limit': expected an integer, but got a string"),
        (b"limit=%D9%A3", "limit", "Invalid type for 'limit': expected an integer, but got a stri"),
        (b"limit=0", "limit", "Invalid 'limit': integer below minimum value. Expected a value"),
        (b"limit=-3", "limit", "Invalid 'limit': integer below minimum value."),
        (b"limit=101", "limit", "Invalid 'limit': integer above maximum value. Expected a value"),
        (b"limit=" + b"9" * 99, "limit", "Invalid 'limit': integer above maximum value."),
        (b"limit=" + b"9" * 60_000, "limit", "Invalid type for 'limit': expected an integer, but"),
        (b"order=up", "order", "Invalid value: 'up'. Supported values are: 'asc' and 'desc'."),
        (b"metadata=a", "metadata", "Invalid type for 'metadata': expected an object, but got a s"),
        (b"metadata[k]=%00", "metadata", "Invalid 'metadata': null characters (U+0000) are not"),
        (b"metadata[%00]=k", "metadata", "Invalid 'metadata': null characters (U+0000) are not"),
        (b"metadata[" + b"k" * 65 + b"]=", "metadata", "Invalid 'metadata': property name too"),
        (b"metadata[k]=" + b"v" * 513, "metadata.k", "Invalid 'metadata.k': string too long."),
        (b"&".join(b"metadata[%d]=" % n for n in range(17)), "metadata",
         "Invalid 'metadata': object too long. Expected an object with maximum length 16"),
        (b"model[a]=b", "model", "Invalid type for 'model': expected a string, but got an object"),
    ],
)  # fmt: skip
def test_invalid_queries(query: bytes, param: str, message: str) -> None:
    """An invalid parameter is a 400 that names it, in OpenAI's words."""
    with pytest.raises(InvalidRequest) as caught:
        read_query(exchange_of(query), QUERY, strict=False)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(message)


def test_unknown_parameters_are_listed() -> None:
    """Unknown parameters are ignored and listed in a header; under `strict` they are an error."""
    exchange = exchange_of(b"limit=1&foo=1&b%20r[x]=2")
    assert read_query(exchange, QUERY, strict=False).limit == 1
    assert exchange.headers == [(b"x-latimer-ignored", b"b%20r, foo")]
    with pytest.raises(InvalidRequest, match="Unknown parameter: 'b r'"):
        read_query(exchange_of(b"limit=1&foo=1&b%20r[x]=2"), QUERY, strict=True)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "metadata", "Missing required parameter: 'metadata'."),
        ({"metadata": "a"}, "metadata", "Invalid type for 'metadata': expected an object"),
        ({"metadata": {"a": 1}}, "metadata.a", "Invalid type for 'metadata.a': expected a string"),
        ({"metadata": {"a": "\0"}}, "metadata", "Invalid 'metadata': null characters (U+0000)"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "Invalid 'metadata': object"),
    ],
)
def test_invalid_updates(body: dict[str, Any], param: str, message: str) -> None:
    """An update needs metadata within OpenAI's limits and without null characters."""
    with pytest.raises(InvalidRequest) as caught:
        parse(UPDATE, (), body)
    assert caught.value.param == param
    assert caught.value.message.startswith(message)


def test_an_update_may_be_null() -> None:
    """Metadata may be null, or have the longest keys and values that OpenAI allows."""
    assert parse(UPDATE, (), {"metadata": None}).metadata is None
    most = {**{f"k{n}": "" for n in range(15)}, "k" * 64: "v" * 512}
    assert parse(UPDATE, (), {"metadata": most}).metadata == most


def test_metadata_of_a_chat_request_has_no_null_character() -> None:
    """A null character in the metadata of a chat request is a 400, since it may be stored."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "metadata": {"a": "b\0"}}
    with pytest.raises(InvalidRequest, match="Invalid 'metadata': null characters") as caught:
        parse(TypeAdapter(ChatRequest), (), body)
    assert caught.value.param == "metadata"
