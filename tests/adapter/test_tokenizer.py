"""Tests of the tokenizer endpoints, as evaluation harnesses use them."""

from __future__ import annotations

import threading
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.model_entry import ModelEntry
from latimer.backends.base import TokenIds
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import adapting, client_of
from support.engines.echo import Echo

TEXTS = ("Hello! How can I help you today?", "<|im_start|>user\nCount to 7.<|im_end|>\n", "")


async def test_what_a_client_must_know(client: httpx2.AsyncClient) -> None:
    """`/tokenizer_info` returns special tokens, context length and chat template."""
    info = (await client.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["add_bos_token"]) == ("<|im_end|>", False)
    assert info["model_max_length"] > 0
    assert "<|im_start|>" in info["chat_template"]


@pytest.mark.parametrize("text", TEXTS)
async def test_there_and_back(client: httpx2.AsyncClient, text: str) -> None:
    """Text survives tokenizing and detokenizing, with control tokens and nothing added."""
    body = {"prompt": text, "add_special_tokens": False}
    reply = (await client.post("/tokenize", json=body)).json()
    assert reply["count"] == len(reply["tokens"])
    back = await client.post("/detokenize", json={"tokens": reply["tokens"]})
    assert back.json() == {"prompt": text}


async def test_half_a_character_is_replaced(echo: httpx2.AsyncClient) -> None:
    """Ids of an incomplete character decode to U+FFFD."""
    ids = (await echo.post("/tokenize", json={"prompt": "漢"})).json()["tokens"]
    assert len(ids) == 3
    reply = await echo.post("/v1/detokenize", json={"tokens": ids[:1]})
    assert reply.json() == {"prompt": "\ufffd"}


async def test_a_long_text_is_decoded_in_a_thread() -> None:
    """The text of many ids is decoded and written in a thread."""
    places: set[int] = set()

    class Noted(bytes):
        def decode(self, *arguments: Any, **options: Any) -> str:
            places.add(threading.get_ident())
            return super().decode(*arguments, **options)

    class Long(Echo):
        async def detokenize(self, ids: TokenIds) -> bytes:
            return Noted(await super().detokenize(ids))

    async with adapting(Long()) as client:
        reply = await client.post("/detokenize", json={"tokens": [97] * 100_000})
        assert len(reply.json()["prompt"]) >= 100_000
    assert places
    assert threading.get_ident() not in places


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)
async def test_bad_requests(
    echo: httpx2.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    """An invalid request is a 400 that names the field."""
    reply = await echo.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_the_model_that_a_request_names() -> None:
    """The tokenizer is that of the named model; of the first one for other names and for none."""
    bytewise, own = ModelEntry(Echo(), ["bytes"]), ModelEntry(LlamaCpp(gpu_layers=0), ["demo"])
    app = OpenAIAdapter([bytewise, own])
    async with client_of(app) as client:
        counts = {}
        for name in ("bytes", "demo", "unknown", None):
            body = {"prompt": "Hello", "model": name, "add_special_tokens": False}
            ids = (await client.post("/tokenize", json=body)).json()["tokens"]
            counts[name] = len(ids)
            reply = await client.post("/detokenize", json={"tokens": ids, "model": name})
            assert reply.json() == {"prompt": "Hello"}
    assert counts == {"bytes": 5, "demo": 1, "unknown": 5, None: 5}
    await app.aclose()
