"""Tests of `POST /v1/embeddings` over models that embed only, and over a chat model."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest
import tiktoken
from latimer.adapter import OpenAIAdapter
from latimer.adapter.endpoints.embeddings import send
from latimer.adapter.generation.token_ids import forget
from latimer.adapter.request import Exchange
from latimer.backends.base import Backend, Embeddings
from latimer.backends.koboldcpp import KoboldCpp
from latimer.schemas.openai.embeddings import EmbeddingRequest
from support.embedding_reference import cosine, embedding_reference
from support.embeddings import ENGINES, MODELS, embedding
from support.embeddings import TEXTS as RECORDED
from support.engines.replay import EMBEDDINGS, Replay, replaying
from support.turns import measured

E = "/v1/embeddings"
CLOSE = 0.99999
# Seconds of CPU time. The design limit is 5 ms; the rest is tolerance for a busy machine.
LONGEST = 0.02
TEXTS = ["the capital of France", "mira vipa kato", "text 1", "the quick brown fox " * 10]
REFERENCE = embedding_reference(MODELS / "bert-mean.gguf")
NAME = "cl100k_base"

Ask = Callable[..., Any]


@pytest.fixture(scope="module", params=ENGINES)
async def embedder(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """Return an engine with BERT and mean pooling."""
    with embedding(request.param, "bert-mean") as backend:
        yield backend
        await backend.aclose()


@pytest.fixture
def ask(embedder: Backend, client_of: Any) -> Ask:
    """Return a function that sends a request to an adapter with the given options."""

    async def send_to(body: dict[str, Any], path: str = E, **options: Any) -> httpx2.Response:
        async with client_of(OpenAIAdapter(embedder, model_names=["bert"], **options)) as client:
            reply: httpx2.Response = await client.post(path, json={"model": "bert", **body})
            return reply

    return send_to


async def vectors(ask: Ask, given: Any, **body: Any) -> list[Any]:
    """Return the vectors of a request that succeeds."""
    reply = await ask({"input": given, **body})
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


async def expected(embedder: Backend, text: str) -> Any:
    """Return the reference's vector of a text."""
    ids = await embedder.tokenize(text, add_special=True, parse_special=False)
    return REFERENCE.vector(ids)


async def test_texts(ask: Ask, embedder: Backend) -> None:
    """One text and several have the reference's vectors, in order and of unit length."""
    found = await vectors(ask, TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        assert cosine(vector, await expected(embedder, text)) > CLOSE
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
        # Numbers are written so that they read back as the same 32-bit float.
        assert array("f", vector).tolist() == vector
    (alone,) = await vectors(ask, TEXTS[1])
    assert cosine(alone, found[1]) > CLOSE


async def test_a_control_token_in_a_text_is_text(ask: Ask, embedder: Backend) -> None:
    """A control token that is spelled in a text is not parsed."""
    (found,) = await vectors(ask, "a [SEP] b")
    ids = await embedder.tokenize("a [SEP] b", add_special=True, parse_special=True)
    assert cosine(found, await expected(embedder, "a [SEP] b")) > CLOSE
    assert cosine(found, REFERENCE.vector(ids)) < CLOSE


async def test_ids(ask: Ask) -> None:
    """Ids are one input, lists of ids several; nothing is added, and the reply says so."""
    reply = await ask({"input": [[5, 6, 7], [8, 9]]})
    assert reply.headers["x-latimer-inexact"] == "input"
    found = [item["embedding"] for item in reply.json()["data"]]
    for ids, vector in zip(([5, 6, 7], [8, 9]), found, strict=True):
        assert cosine(vector, REFERENCE.vector(ids)) > CLOSE
    (alone,) = await vectors(ask, [5, 6, 7])
    assert cosine(alone, found[0]) > CLOSE


async def test_usage(ask: Ask, embedder: Backend) -> None:
    """The usage counts the tokens of all inputs, without special tokens that were added."""
    ids = await embedder.tokenize(TEXTS[0], add_special=False, parse_special=False)
    reply = await ask({"input": [TEXTS[0], TEXTS[0]]})
    assert reply.json()["usage"] == {"prompt_tokens": 2 * len(ids), "total_tokens": 2 * len(ids)}


async def test_many_inputs(ask: Ask, embedder: Backend) -> None:
    """2,048 inputs are answered in their order."""
    found = await vectors(ask, [f"text {number}" for number in range(2_048)])
    assert len(found) == 2_048
    for number in (0, 1, 1_000, 2_047):
        assert cosine(found[number], await expected(embedder, f"text {number}")) > CLOSE


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        (lambda long: long, "input"),
        (lambda long: [long], "input[0]"),
        (lambda long: ["a", long, "b"], "input[1]"),
        (lambda _long: [5] * 600, "input"),
        (lambda _long: [[5] * 600], "input[0]"),
        (lambda _long: "x" * 600_000, "input"),
        (lambda _long: ["a", "x" * 600_000], "input[1]"),
    ],
)  # fmt: skip
async def test_a_long_input_is_not_cut(ask: Ask, inputs: Callable[[str], Any], param: str) -> None:
    """An input beyond the context is a 400 in OpenAI's words, with the counts and its place."""
    reply = await ask({"input": inputs("kato " * 600)})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param
    assert error["message"].startswith("This model's maximum context length is 512 tokens, however")


@pytest.mark.parametrize(
    ("given", "param"),
    [([99_999], "input"), ([[99_999]], "input[0]"), ([[5], [99_999]], "input[1]")],
)
async def test_an_unknown_id(ask: Ask, given: Any, param: str) -> None:
    """An id outside of the model's vocabulary is a 400 that names its input."""
    reply = await ask({"input": given})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"Invalid '{param}': 99999 is not a token id of this model.")


async def test_dimensions(ask: Ask) -> None:
    """Vectors are cut and scaled to unit length only for a model that is declared for it."""
    (whole,) = await vectors(ask, TEXTS[0])
    reply = await ask({"input": TEXTS[0], "dimensions": 8}, matryoshka=True)
    (found,) = [item["embedding"] for item in reply.json()["data"]]
    length = math.hypot(*whole[:8])
    assert found == pytest.approx([number / length for number in whole[:8]], abs=1e-5)
    refused = await ask({"input": TEXTS[0], "dimensions": 8})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "dimensions")
    assert error["code"] == "unsupported_parameter"
    assert "matryoshka=True" in error["message"]


async def test_the_models_own_dimensions(ask: Ask) -> None:
    """The model's own size changes nothing, but OpenAI's limits reject it; more is a 400."""
    body = {"input": TEXTS[0], "dimensions": REFERENCE.size}
    assert (await ask(body)).status_code == 200
    assert (await ask(body, matryoshka=True, limits="openai")).status_code == 200
    assert (await ask(body, limits="openai")).status_code == 400
    more = {**body, "dimensions": REFERENCE.size + 1}
    error = (await ask(more, matryoshka=True)).json()["error"]
    assert error["code"] == "integer_above_max_value"
    assert f"<= {REFERENCE.size}," in error["message"]
    error = (await ask(more)).json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert "matryoshka=True" in error["message"]


async def test_strict(ask: Ask) -> None:
    """`strict` rejects unknown fields, and ids whose vocabulary nobody named."""
    assert (await ask({"input": "a", "user": "u"}, strict=True)).status_code == 200
    unknown = await ask({"input": "a", "truncate": True})
    assert (unknown.status_code, unknown.headers["x-latimer-ignored"]) == (200, "truncate")
    assert (await ask({"input": "a", "truncate": True}, strict=True)).status_code == 400
    reply = await ask({"input": [5, 6]}, strict=True)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input")
    assert "or in the setting logit_bias_vocabulary." in error["message"]


async def test_null_is_the_default(ask: Ask) -> None:
    """An explicit null is the field's default."""
    names = EmbeddingRequest.model_fields.keys() - {"input"}
    reply = await ask({"input": TEXTS[0], **dict.fromkeys(names)})
    assert reply.status_code == 200, reply.text
    assert not {"x-latimer-ignored", "x-latimer-inexact"} & reply.headers.keys()
    assert isinstance(reply.json()["data"][0]["embedding"], list)


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings/", "//v1/embeddings"])
async def test_every_path_has_openais_shape(ask: Ask, path: str) -> None:
    """The path without /v1 has OpenAI's shape, too."""
    reply = (await ask({"input": "a"}, path)).json()
    assert list(reply) == ["object", "data", "model", "usage"]
    assert (reply["object"], reply["data"][0]["object"]) == ("list", "embedding")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/rerank", {"query": "Hi", "documents": ["a"]}),
    ],
)
async def test_a_model_that_only_embeds(
    ask: Ask, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Other tasks of a model that only embeds are a 404 or 400 that names the model."""
    reply = await ask({**body, "stream": stream}, path)
    error = reply.json()["error"]
    status = 400 if path == "/v1/rerank" else 404
    assert (reply.status_code, error["param"], error["code"]) == (status, "model", None)
    assert error["message"].startswith("This is not a ")


async def test_a_model_for_chat(client: httpx2.AsyncClient) -> None:
    """Embeddings of a model that only generates are a 400 that names the model."""
    reply = await client.post(E, json={"model": "m", "input": "Hi"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "model", None)
    assert error["message"].startswith("This is not an embedding model and thus not supported in")


async def test_together(ask: Ask) -> None:
    """Vectors of requests at the same time are those of each alone."""
    alone = [(await vectors(ask, text))[0] for text in TEXTS]
    together = await asyncio.gather(*(vectors(ask, text) for text in TEXTS * 2))
    for one, (other,) in zip(alone * 2, together, strict=True):
        assert cosine(one, other) > CLOSE


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give tiktoken one encoding, of single bytes and a word."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"capital": 256}
    encoding = tiktoken.Encoding(NAME, pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: [NAME])
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _name: encoding)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("few_words")
async def test_ids_of_another_vocabulary(ask: Ask, embedder: Backend) -> None:
    """Ids of a named vocabulary are embedded as their text; no setting of the client changes."""
    ids = [*b"the ", 256, *b" of [SEP]"]
    for body, options in (
        ({}, {"logit_bias_vocabulary": NAME}),
        ({"logit_bias_vocabulary": NAME}, {"strict": True}),
    ):
        reply = await ask({"input": [ids], **body}, **options)
        assert reply.status_code == 200, reply.text
        assert "x-latimer-inexact" not in reply.headers
        (item,) = reply.json()["data"]
        vector = await expected(embedder, "the capital of [SEP]")
        assert cosine(item["embedding"], vector) > CLOSE


@pytest.mark.usefixtures("few_words")
async def test_ids_that_cut_a_character(ask: Ask, embedder: Backend) -> None:
    """Bytes of incomplete characters at both ends are dropped, and the reply says so."""
    cut = ["é".encode()[1:], b" mira ", "漢".encode()[:2]]
    options = {"logit_bias_vocabulary": NAME}
    reply = await ask({"input": [*b"".join(cut)]}, **options)
    assert reply.headers["x-latimer-inexact"] == "input"
    (item,) = reply.json()["data"]
    assert cosine(item["embedding"], await expected(embedder, " mira ")) > CLOSE
    assert (await ask({"input": [*b"".join(cut)]}, strict=True, **options)).status_code == 400
    for given, param in (([*cut[2]], "input"), ([[*b"a"], [*cut[0], *cut[0] * 4]], "input[1]"),
                         ([97, 0xFF, 97], "input"), ([[300]], "input[0]")):  # fmt: skip
        error = (await ask({"input": given}, **options)).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_value")


@pytest.mark.usefixtures("few_words")
async def test_koboldcpp(client_of: Any) -> None:
    """Texts are embedded, with an inexact usage; ids need a vocabulary, which makes them text."""
    texts = [text for text in RECORDED if "<" not in text]
    with replaying(Replay(EMBEDDINGS)) as (address, _replay):
        backend = KoboldCpp(address)

        async def ask_it(given: Any, **options: Any) -> httpx2.Response:
            async with client_of(OpenAIAdapter(backend, any_model=True, **options)) as client:
                reply: httpx2.Response = await client.post(E, json={"model": "m", "input": given})
                return reply

        reply = await ask_it(texts)
        assert reply.headers["x-latimer-inexact"] == "usage"
        assert [len(one["embedding"]) for one in reply.json()["data"]] == [64] * len(texts)
        refused = await ask_it(texts, strict=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "usage")
        ids = await ask_it([[*b"1"]])
        assert (ids.status_code, ids.json()["error"]["param"]) == (400, "input[0]")
        decoded = await ask_it([[*b"1"]], logit_bias_vocabulary=NAME)
        assert decoded.status_code == 200, decoded.text
        await backend.aclose()


async def test_a_large_reply_leaves_the_loop_to_others() -> None:
    """No iteration of the event loop takes more than 20 ms for 2,048 vectors of 1,024 numbers."""
    vector = array("f", [math.sin(number) for number in range(1_024)])
    found = Embeddings([vector] * 2_048, 5)

    async def app(scope: Any, receive: Any, send_part: Any) -> None:
        if scope["type"] == "http":
            encoding: Any = scope["path"][1:]
            request = EmbeddingRequest(input="a", encoding_format=encoding)
            await send(Exchange(scope, receive, send_part), request, "m", found)

    with measured(lambda: app) as (address, loop):
        async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
            for encoding in ("float", "base64"):
                loop.longest = 0.0
                reply = await client.get(f"/{encoding}")
                assert len(reply.json()["data"]) == 2_048
                assert int(reply.headers["content-length"]) == len(reply.content)
                assert loop.longest < LONGEST


@pytest.mark.parametrize(
    "engine", ["llama_cpp", pytest.param("llama_server", marks=pytest.mark.slow)]
)
def test_a_large_request_leaves_the_loop_to_others(engine: str) -> None:
    """No iteration of the event loop takes more than 50 ms for large inputs of any form."""
    inputs = {
        "many texts": ["the quick brown fox " * 2] * 2_048,
        "a long text": "word " * 400_000,
        "many ids": [[5] * 20] * 2_048,
        "too many ids": [[5] * 500_000] * 2,
    }
    with embedding(engine, "bert-mean") as backend:
        app = OpenAIAdapter(backend, any_model=True)
        with measured(lambda: app) as (address, loop):
            for name, given in inputs.items():
                loop.longest = 0.0
                body = {"model": "m", "input": given, "encoding_format": "base64"}
                reply = httpx2.post(address + E, json=body, timeout=60)
                assert reply.status_code == (200 if "many" in name[:4] else 400), reply.text[:200]
                assert loop.longest < 0.05, name
