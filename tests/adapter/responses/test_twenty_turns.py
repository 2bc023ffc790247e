"""Tests that a long conversation is the same to the engine, in whichever way a client continues it.

The conversation has twenty turns with reasoning, calls, parallel calls and a custom tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.prompts import prompt_of
from latimer.backends.llama_server import LlamaServer
from latimer.backends.llama_server.translate import own_fields
from support.clients import adapting
from support.dialogue import SCRIPTS, TEMPLATES, TURNS, WAYS, Way
from support.engines.koboldcpp import koboldcpp
from support.scripted import scripted
from support.servers import llama_server

pytestmark = pytest.mark.slow

CONTEXT = 4096
# The items of a response, by the kind of its answer.
CALL, ANSWER = ["reasoning", "function_call"], ["reasoning", "message"]
TWO = ["reasoning", "function_call", "function_call"]
CUSTOM = ["reasoning", "message", "custom_tool_call"]
# Four turns, of which the first has three responses.
FOUR_TURNS = [CALL, CALL, ANSWER, TWO, ANSWER, CUSTOM, ANSWER, ["message"]]
COUNT = len(TURNS) // 4 * len(FOUR_TURNS)


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    """Return the name of a template."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(template: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that answers by the last character of a message."""
    path = tmp_path_factory.mktemp("models") / f"{template}.gguf"
    (first, script), *others = SCRIPTS.items()
    return scripted(
        path, script, TEMPLATES[template], after=first, context=CONTEXT, others=dict(others),
        reads=True,
    )  # fmt: skip


async def run(backend: Backend, make: Callable[[httpx2.AsyncClient], Way]) -> Way:
    """Run the conversation in one way over a backend, and check its items."""
    async with adapting(backend) as client:
        way = make(client)
        await way.run()
    assert way.kinds == FOUR_TURNS * (len(TURNS) // 4)
    return way


def check_cached(way: Way, template: str) -> None:
    """Check that a conversation is not read again."""
    sizes = [usage["input_tokens"] for usage in way.usages]
    totals = [usage["total_tokens"] for usage in way.usages]
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in way.usages]
    assert cached[0] < 8, "the engine still has another conversation"
    assert min(cached[1:]) >= sizes[0]
    if template == "keeping":
        # The end of the answer is read with the next prompt.
        assert all(one >= total - 1 for total, one in zip(totals, cached[1:], strict=False))


async def test_in_process(model: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In process every way has the same ids, and the prompt before them is reused."""
    read: list[Any] = []

    def recorded(*given: Any) -> Any:
        found = prompt_of(*given)
        read.append(found[0])
        return found

    monkeypatch.setattr("latimer.backends.llama_cpp.backend.prompt_of", recorded)
    prompts = []
    for make in WAYS:
        way = await run(LlamaCpp(model, context=CONTEXT, threads=1), make)
        assert [len(ids) for ids in read] == [usage["input_tokens"] for usage in way.usages]
        check_cached(way, template)
        prompts.append([*read])
        read.clear()
    check_same(prompts)


def check_same(prompts: list[list[Any]]) -> None:
    """Check that the ways have the same prompts."""
    assert len(prompts[0]) == COUNT
    for make, found in zip(WAYS, prompts, strict=True):
        assert found == prompts[0], make


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    """Run a llama-server with the model and one slot."""
    with llama_server(model, "--cache-ram", "0", slots=1, context=CONTEXT) as address:
        yield address


async def test_over_llama_server(
    server: str, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server gets the same prompt in every way, and reuses what it has read."""
    read: list[Any] = []

    def recorded(*given: Any) -> Any:
        found = own_fields(*given)
        read.append(found["prompt"])
        return found

    monkeypatch.setattr("latimer.backends.llama_server.call.own_fields", recorded)
    prompts = []
    for make in WAYS:
        await forget(server)
        read.clear()
        way = await run(LlamaServer(server), make)
        check_cached(way, template)
        prompts.append([*read])
    check_same(prompts)


async def forget(server: str) -> None:
    """Let the only slot of a llama-server read something else."""
    async with httpx2.AsyncClient(base_url=server) as client:
        body = {"prompt": "x" * 40, "n_predict": 1}
        assert (await client.post("/completion", json=body)).status_code == 200


async def test_over_koboldcpp(template: str) -> None:
    """Koboldcpp gets the same prompt in every way."""
    prompts = []
    for make in WAYS:
        async with koboldcpp(TEMPLATES[template], "") as (fake, backend):
            fake.others = {end: "".join(pieces) for end, pieces in SCRIPTS.items()}
            await run(backend, make)
            # The first prompts are about the engine itself.
            prompts.append(fake.prompts[-COUNT:])
    check_same(prompts)
