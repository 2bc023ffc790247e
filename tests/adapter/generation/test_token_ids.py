"""Tests of biases and prompts in the token ids of OpenAI's vocabularies.

A small encoding replaces tiktoken's own, which cannot be downloaded everywhere.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import tiktoken
import tiktoken.registry
from conftest import MODELS
from latimer.adapter import OpenAIAdapter
from latimer.adapter.generation import token_ids as vocabularies
from latimer.adapter.generation.token_ids import forget, load, loaded, to_text
from latimer.backends.errors import EngineError, RequestError, Unsupported
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import adapting
from support.engines.echo import Echo
from support.recordings import DEMO_CHATML

WORDS = [b" Paris", b" Lisbon", b"The", b" capital", b"\xe6\xbc", b" Parisian", b" river"]
NAME = "cl100k_base"
CAPITAL = DEMO_CHATML.format("What is the capital of France?")


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give tiktoken one encoding, of single bytes and a few words."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {word: 256 + number for number, word in enumerate(WORDS)}
    encoding = tiktoken.Encoding(NAME, pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: [NAME, "o200k_base"])

    def get(name: str) -> tiktoken.Encoding:
        if name != NAME:
            raise OSError("no network")
        return encoding

    monkeypatch.setattr(tiktoken, "get_encoding", get)
    forget()
    yield
    forget()


def word(data: bytes) -> str:
    """Return a word's id as a JSON key."""
    return str(256 + WORDS.index(data))


async def complete(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    """Send a greedy completion request."""
    greedy = {"model": "m", "prompt": CAPITAL, "temperature": 0, **body}
    return await client.post("/v1/completions", json=greedy)


async def test_a_bias_finds_the_models_own_token(scorer: httpx2.AsyncClient) -> None:
    """A bias on a token that the model has too is exact."""
    reply = await complete(scorer, logit_bias={word(b" Paris"): -100}, logit_bias_vocabulary=NAME)
    assert reply.status_code == 200, reply.text
    assert "Paris" not in reply.json()["choices"][0]["text"]
    assert "x-latimer-inexact" not in reply.headers


async def test_a_token_of_several_biases_the_first(scorer: httpx2.AsyncClient) -> None:
    """A bias on a word of several model tokens applies to the first, and the response says so."""
    reply = await complete(
        scorer, logit_bias={word(b" Parisian"): 90}, logit_bias_vocabulary=NAME, max_tokens=2
    )
    text = reply.json()["choices"][0]["text"]
    # The bias forces the word's first token twice.
    assert text == text[: len(text) // 2] * 2
    assert " Parisian".startswith(text[: len(text) // 2])
    assert reply.headers["x-latimer-inexact"] == "logit_bias"


async def test_half_a_character_is_a_token_too(scorer: httpx2.AsyncClient) -> None:
    """A bias on bytes that are not valid UTF-8 applies to their longest prefix that is a token."""
    reply = await complete(
        scorer, logit_bias={word(b"\xe6\xbc"): 1, "230": 1}, logit_bias_vocabulary=NAME
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-latimer-inexact"] == "logit_bias"


async def test_a_strict_server_refuses_what_is_inexact(make_backend: Any, client_of: Any) -> None:
    """With `strict` a bias that cannot be exact is a 400."""
    backend = make_backend("llama_cpp")
    app = OpenAIAdapter(backend, any_model=True, strict=True, logit_bias_vocabulary=NAME)
    async with client_of(app) as client:
        reply = await complete(client, logit_bias={word(b" Parisian"): -100})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias")
        assert (await complete(client, logit_bias={word(b" Paris"): -100})).status_code == 200
    await app.aclose()


async def test_prompts_of_ids_are_read_in_that_vocabulary(scorer: httpx2.AsyncClient) -> None:
    """A prompt of ids is decoded with the vocabulary and gives the same answer as its text."""
    ids = list(CAPITAL.encode())
    reply = await complete(scorer, prompt=ids, logit_bias_vocabulary=NAME)
    assert reply.json()["choices"] == (await complete(scorer)).json()["choices"]
    assert reply.json()["usage"]["prompt_tokens"] == 15


async def test_prompts_of_ids_need_no_engine() -> None:
    """An engine that refuses biases of another vocabulary takes prompts of its ids."""
    engine = Echo()
    hint = {"logit_bias_vocabulary": "Omit it."}
    engine.capabilities = replace(Echo.capabilities, refused=hint)
    async with adapting(engine) as client:
        reply = await complete(client, prompt=[256], logit_bias_vocabulary=NAME)
        assert reply.json()["choices"][0]["text"] == " Paris"
        reply = await complete(client, logit_bias={"256": 1}, logit_bias_vocabulary=NAME)
        assert reply.json()["error"]["param"] == "logit_bias_vocabulary"


async def test_a_bos_in_that_vocabulary_is_not_added_again(client_of: Any) -> None:
    """A prompt of ids that spell the model's BOS gives the same answer as its text."""
    backend = LlamaCpp(MODELS / "spm.gguf")
    app = OpenAIAdapter(backend, any_model=True)
    text = (await backend.model()).bos_token + "Hello"
    body = {"logit_bias_vocabulary": NAME, "echo": True, "logprobs": 0, "max_tokens": 0}
    async with client_of(app) as client:
        found = (await complete(client, prompt=list(text.encode()), **body)).json()
        plain = (await complete(client, prompt=text, **body)).json()
        assert found["choices"][0]["text"] == text
        assert (found["choices"], found["usage"]) == (plain["choices"], plain["usage"])
    await app.aclose()


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"logit_bias": {"9999": 1}}, "logit_bias.9999", "not a token id of cl100k_base"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999", "9999999999 is not"),
        ({"prompt": [9999]}, "prompt", "not a token id of cl100k_base"),
        ({"prompt": [230]}, "prompt", "do not decode to complete characters"),
    ],
)
async def test_ids_that_are_none_are_refused(
    demo: httpx2.AsyncClient, body: dict[str, Any], param: str, says: str
) -> None:
    """An unknown id and an id of an incomplete character are 400s."""
    reply = await complete(demo, logit_bias_vocabulary=NAME, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]


async def test_a_vocabulary_that_cannot_be_had(demo: httpx2.AsyncClient) -> None:
    """A vocabulary that cannot be loaded is a 400 that says where to put its file."""
    reply = await complete(demo, logit_bias={"1": 1}, logit_bias_vocabulary="o200k_base")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "logit_bias_vocabulary")
    assert "TIKTOKEN_CACHE_DIR" in error["message"]


async def test_an_engine_that_tells_no_vocabulary(apps: Any, client_of: Any) -> None:
    """koboldcpp rejects `logit_bias_vocabulary` by name."""
    async with client_of(apps("koboldcpp")) as client:
        reply = await complete(client, logit_bias={"300": 1}, logit_bias_vocabulary=NAME)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "logit_bias_vocabulary")


def test_a_missing_file_is_a_clear_error_at_the_start() -> None:
    """A vocabulary that is missing or unknown is a clear error at the start."""
    with pytest.raises(EngineError, match=r"TIKTOKEN_CACHE_DIR .*: no network"):
        load("o200k_base")
    with pytest.raises(RequestError, match="Supported values"):
        load("latin")


def test_ids_to_text() -> None:
    """Ids decode to whole characters, even if a character spans several ids."""
    assert to_text(load(NAME), [256 + WORDS.index(b"\xe6\xbc"), 0xA2]).text == "漢"


async def test_a_download_that_hangs_holds_nobody(
    monkeypatch: pytest.MonkeyPatch, demo: httpx2.AsyncClient
) -> None:
    """A vocabulary download that hangs delays only its own requests, and for a limited time."""
    over, asked = threading.Event(), []

    def hang(name: str) -> None:
        asked.append(name)
        over.wait(30)
        raise OSError

    # Load tiktoken's list of names first.
    with pytest.raises(RequestError):
        await loaded("latin")
    monkeypatch.setattr(tiktoken, "get_encoding", hang)
    monkeypatch.setattr(vocabularies, "PATIENCE", 0.3)
    wanting = [
        asyncio.create_task(complete(demo, prompt=[65], logit_bias_vocabulary=NAME))
        for _ in range(3)
    ]
    assert (await complete(demo, max_tokens=2)).status_code == 200
    start = time.monotonic()
    for reply in await asyncio.gather(*wanting):
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias_vocabulary")
        assert "not downloaded within" in reply.json()["error"]["message"]
    with pytest.raises(Unsupported, match="not downloaded within"):
        await loaded(NAME)
    assert time.monotonic() - start < 15
    assert asked == [NAME]
    threads = [one for one in threading.enumerate() if one.name == "latimer-vocabulary"]
    assert threads
    assert all(thread.daemon for thread in threads)
    over.set()


async def test_what_could_not_be_had_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed download is not retried for a while, even if clients repeat the request."""
    asked = []

    def fail(name: str) -> None:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    for _ in range(3):
        with pytest.raises(Unsupported, match="no network"):
            await loaded(NAME)
    assert len(asked) == 1
    monkeypatch.setattr(vocabularies, "AGAIN", 0.0)
    with pytest.raises(Unsupported, match="no network"):
        await loaded(NAME)
    assert len(asked) == 2
    for number in range(100):
        with pytest.raises(RequestError, match="Supported values"):
            await loaded(f"latin-{number}")
    assert len(vocabularies._loads) <= 3
