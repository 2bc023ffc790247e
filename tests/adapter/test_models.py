"""Tests of the sizes and capabilities of a model in `/v1/models`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.endpoints import models as module
from latimer.adapter.endpoints.models import abilities_of, object_of
from latimer.adapter.model_entry import ModelEntry, Policy, ServedModel
from latimer.backends.base import EmbeddingModel, Model
from latimer.backends.errors import EngineUnavailable
from latimer.backends.llama_server import LlamaServer
from latimer.backends.speech.base import Speaker
from support.clients import client_of as client_in
from support.engines.echo import Echo
from support.engines.fleet import Engine, pool_of

TEMPLATES = Path(__file__).parent.parent / "templates"
SIZES = {"n_ctx_train", "n_embd", "n_params", "n_vocab", "size", "vocab_type"}


async def listed(client: httpx2.AsyncClient) -> dict[str, Any]:
    """Return the only model in the list."""
    (model,) = (await client.get("/v1/models")).json()["data"]
    found: dict[str, Any] = model
    return found


async def test_a_model_says_how_long_its_context_is(client: httpx2.AsyncClient) -> None:
    """The context length has the same value in every spelling, on every engine."""
    model = await listed(client)
    assert list(model)[:4] == ["id", "object", "created", "owned_by"]
    context = model["context_length"]
    assert context > 0
    assert (model["max_model_len"], model["meta"]["n_ctx"]) == (context, context)
    body = {"model": model["id"], "prompt": "a", "max_tokens": context + 1}
    error = (await client.post("/v1/completions", json=body)).json()["error"]
    assert f"maximum context length is {context} tokens" in error["message"]
    assert (await client.get(f"/v1/models/{model['id']}")).json() == model


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_sizes_come_from_the_model(apps: Any, client_of: Any, engine: str) -> None:
    """llama.cpp reports the same sizes of a model in process and over llama-server."""
    async with client_of(apps(engine)) as client:
        meta = (await listed(client))["meta"]
    del meta["n_ctx"]
    assert set(meta) == SIZES
    assert (meta["n_vocab"], meta["n_embd"]) == (1024, 192)
    assert meta["n_params"] == 1_967_808


async def test_unknown_sizes_are_left_out(apps: Any, client_of: Any) -> None:
    """koboldcpp reports only the context length, so nothing else is listed."""
    async with client_of(apps("koboldcpp")) as client:
        model = await listed(client)
    assert list(model["meta"]) == ["n_ctx"]
    assert "frequency_penalty" not in model["supported_parameters"]


async def test_openai_python_reads_models(echo: httpx2.AsyncClient) -> None:
    """OpenAI's SDK reads the four keys, and keeps the others."""
    sdk = openai.AsyncOpenAI(base_url="http://latimer/v1", api_key="x", http_client=echo)
    models = [model async for model in sdk.models.list()]
    assert [model.id for model in models] == ["demo"]
    assert models[0].owned_by == "latimer"
    extra = models[0].model_extra or {}
    assert extra["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    assert {"temperature", "tools", "top_k"} <= set(extra["supported_parameters"])


@pytest.mark.parametrize(
    ("lacks", "missing"),
    [
        ({"refused": {"logprobs": "Omit it."}}, {"logprobs", "top_logprobs"}),
        ({"refused": {"top_logprobs": "Omit it."}}, {"top_logprobs"}),
        ({"grammars": frozenset({"gbnf"})}, {"response_format", "structured_outputs"}),
        ({"grammars": frozenset({"json_schema"})}, {"tool_choice"}),
        ({"grammars": frozenset()}, {"response_format", "structured_outputs", "tool_choice"}),
        ({"extras": frozenset({"top_k"})}, {"min_p"}),
    ],
)
async def test_parameters_that_an_engine_rejects_are_not_listed(
    lacks: dict[str, Any], missing: set[str]
) -> None:
    """A parameter that needs a refused one, or a grammar that the engine lacks, is not listed."""
    lists = []
    for changed in ({}, lacks):
        backend = Echo()
        backend.capabilities = replace(Echo.capabilities, **changed)
        served = ServedModel(backend, await backend.model(), Policy())
        lists.append((await object_of("m", served, None))["supported_parameters"])
    assert set(lists[0]) - set(lists[1]) == missing


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", True, False),
        ("HuggingFaceTB-SmolLM3-3B", False, True),
        ("openai-gpt-oss-120b", True, True),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", False, True),
        ("google-gemma-2-2b-it", False, False),
        ("", False, False),
    ],
)
async def test_abilities_come_from_the_template(
    template: str, tools: bool, reasoning: bool
) -> None:
    """Tools and reasoning are detected in the template; an instruct format has neither."""
    text = (TEMPLATES / f"{template}.jinja").read_text() if template else None
    model = Model("m", 1000, text, "<s>", "</s>", False, "fp_0", 7)
    backend = LlamaServer("http://127.0.0.1:1")
    assert await abilities_of(ServedModel(backend, model, Policy())) == (tools, reasoning)
    other = Policy(chat_format="alpaca")
    assert await abilities_of(ServedModel(backend, model, other)) == (False, False)


async def test_images_are_named(echo: httpx2.AsyncClient) -> None:
    """A model that accepts images is listed with the words of llama-server and of Ollama."""
    model = Model("m", 9, None, "", "", False, "fp_0", 7, frozenset({"image", "audio"}))
    found = await object_of(
        "m", ServedModel(LlamaServer("http://127.0.0.1:1"), model, Policy()), None
    )
    assert found["architecture"]["input_modalities"] == ["text", "image", "audio"]
    assert found["capabilities"] == ["completion", "multimodal", "vision", "audio"]
    assert (await listed(echo))["capabilities"][0] == "completion"


@pytest.mark.parametrize(
    ("facts", "outputs", "capabilities"),
    [
        (EmbeddingModel(64, "mean", 512, generates=False), ["embeddings"], ["embedding"]),
        (EmbeddingModel(None, None, None, generates=False), ["embeddings"], ["embedding"]),
        (EmbeddingModel(0, "rank", 512, generates=False), ["rerank"], ["rerank"]),
        (EmbeddingModel(64, "last", 512), ["text", "embeddings"], ["completion", "embedding"]),
        (None, ["text"], ["completion"]),
    ],
)
async def test_what_a_model_makes(
    facts: EmbeddingModel | None, outputs: list[str], capabilities: list[str]
) -> None:
    """A model is listed with what it makes, and a length of 512 if it only embeds so much."""
    model = Model("m", 9, None, "", "", False, "fp_0", 7)
    served = ServedModel(LlamaServer("http://127.0.0.1:1"), model, Policy(matryoshka=True))
    found = await object_of("m", served, facts)
    assert found["architecture"]["output_modalities"] == outputs
    assert found["capabilities"] == capabilities
    assert ("temperature" in found["supported_parameters"]) == ("text" in outputs)
    assert ("dimensions" in found["supported_parameters"]) == ("embeddings" in outputs)
    context = 512 if facts and facts.context and not facts.generates else 9
    assert found["context_length"] == found["max_model_len"] == found["meta"]["n_ctx"] == context


class Reticent(Engine):
    """An engine that says slowly whether it speaks, and fails when it is asked what it embeds.

    Args:
        seconds: the time of the first answer.
        error: the second answer.
    """

    def __init__(self, name: str, seconds: float, error: Exception | None = None) -> None:
        super().__init__(name)
        self.seconds, self.no = seconds, error

    async def speaker(self) -> Speaker | None:
        """Answer late."""
        await asyncio.sleep(self.seconds)
        return None

    async def embedding_model(self) -> EmbeddingModel | None:
        """Fail."""
        if self.no is not None:
            raise self.no
        return None


async def listed_by(*pools: Sequence[Reticent]) -> tuple[dict[str, Any], float]:
    """Return the list of the models of a fleet by their names, and the seconds that it took."""
    entries = [ModelEntry(await pool_of(*engines), (engines[0].name,)) for engines in pools]
    app = OpenAIAdapter(entries)
    async with client_in(app) as client:
        begun = time.monotonic()
        reply = await client.get("/v1/models")
        taken = time.monotonic() - begun
        for one in reply.json()["data"]:
            assert (await client.get(f"/v1/models/{one['id']}")).json() == one
    await app.aclose()
    assert reply.status_code == 200
    return {one["id"]: one for one in reply.json()["data"]}, taken


async def test_the_engines_of_a_list_are_asked_at_once() -> None:
    """A list takes as long as the slowest engine, and not as long as all of them together."""
    names = "abcd"
    models, taken = await listed_by(*([Reticent(n, 0.4), Reticent(n * 2, 0.4)] for n in names))
    assert [*models] == [*names]
    assert taken < 1.6


class Mutual(Reticent):
    """An engine that says whether it speaks only after it was asked what it embeds."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0)
        self.second = asyncio.Event()

    async def speaker(self) -> Speaker | None:
        """Wait for the other question."""
        await self.second.wait()
        return None

    async def embedding_model(self) -> EmbeddingModel | None:
        """Note the question."""
        self.second.set()
        return None


async def test_an_engine_is_asked_all_at_once() -> None:
    """An engine that hangs takes as long as one question, and not as long as each of them."""
    models, taken = await listed_by([Mutual("a")])
    assert [*models] == ["a"]
    assert taken < module.PATIENCE


async def test_an_engine_that_does_not_answer_takes_no_model_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list has all models in time, also if an engine hangs or is lost while it is asked."""
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    lost = EngineUnavailable("The engine at http://127.0.0.1:1 cannot be reached.")
    models, taken = await listed_by(
        [Reticent("a", 0)], [Reticent("b", 0, lost)], [Reticent("c", 60)]
    )
    assert [*models] == ["a", "b", "c"]
    assert "context_length" not in models["b"]
    assert models["a"]["context_length"] == models["c"]["context_length"] == 4096
    assert taken < 5
