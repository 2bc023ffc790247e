"""Tests of what every engine's backend promises, over the real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.base import Backend, Generation, Prompt, Sampling, Stops, Text
from latimer.backends.errors import ContextExceeded, EmptyPrompt, RequestError
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.jobs import run
from support.recordings import DEMO_CHATML
from support.servers import llama_server

GREEDY = Sampling(temperature=0.0)
ENDLESS = Sampling(temperature=0.0, extras={"ignore_eos": True})
COUNT = Text(DEMO_CHATML.format("Count to 12."))
STORY = Prompt(Text("One day,"))
ANSWER = b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."

# Tests of what koboldcpp refuses, or has no recording of.
without_koboldcpp = pytest.mark.parametrize(
    "backend", ["llama_cpp", "llama_server"], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=["llama_cpp", "llama_server", "koboldcpp"])
async def backend(
    request: pytest.FixtureRequest, demo_f32: Path, make_backend: Callable[[str], Backend]
) -> AsyncIterator[Any]:
    """A backend of each engine with the demo model."""
    exact = request.param == "llama_cpp"
    made: Any = LlamaCpp(demo_f32, exact=True) if exact else make_backend(request.param)
    yield made
    await made.aclose()


async def test_facts_of_the_model(backend: Backend) -> None:
    """The backend knows the model's name, context length, chat template and special tokens."""
    model = await backend.model()
    assert model.name in ("demo-f32", "demo.gguf", "koboldcpp/demo")
    assert (model.context, model.adds_bos) == (2048, False)
    assert "<|im_start|>" in (model.template or "")
    assert (model.bos_token, model.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert model.fingerprint.startswith("fp_")


async def test_a_long_answer_is_whole(backend: Backend) -> None:
    """A completion contains all of its text, and its token count excludes the end token."""
    texts, (finish,) = await run(backend, Generation(Prompt(COUNT), 64, sampling=GREEDY))
    assert texts == [ANSWER]
    assert (finish.reason, finish.stop) == ("end", None)
    assert (finish.prompt_tokens, finish.completion_tokens) == (12, 24)
    assert not finish.cached_tokens or backend.capabilities.engine == "llama-server"


async def test_choices_have_seeds_of_their_own(backend: Backend) -> None:
    """Each choice repeats with its seed, alone or with the others, also on fewer slots."""
    # koboldcpp has no recording of more.
    count = 3 if backend.capabilities.engine == "koboldcpp" else 9
    job = Generation(STORY, 8, tuple(range(7, 7 + count)))
    first, finishes = await run(backend, job)
    assert len(set(first)) > 1
    assert [(one.prompt_tokens, one.completion_tokens) for one in finishes] == [(3, 8)] * count
    assert (await run(backend, job))[0] == first
    assert (await run(backend, Generation(STORY, 8, (8,))))[0] == [first[1]]


async def test_what_does_not_fit_is_refused(backend: Backend) -> None:
    """A prompt or a completion beyond the context length raises an error with the numbers."""
    with pytest.raises(ContextExceeded) as caught:
        await run(backend, Generation(Prompt(Text("word " * 3000)), 5))
    assert caught.value.context == 2048 < caught.value.prompt_tokens
    with pytest.raises(ContextExceeded):
        await run(backend, Generation(Prompt(COUNT), 2040))


async def test_no_tokens_need_no_call(backend: Backend) -> None:
    """`max_tokens: 0` counts the prompt and generates nothing."""
    texts, (finish,) = await run(backend, Generation(Prompt(COUNT), 0, sampling=GREEDY))
    assert texts == [b""]
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 12, 0)


@pytest.mark.parametrize("prompt", [Text(""), ()], ids=["text", "ids"])
async def test_an_empty_prompt_is_refused(backend: Backend, prompt: Any) -> None:
    """An empty prompt is rejected for a model without BOS."""
    with pytest.raises(EmptyPrompt):
        await run(backend, Generation(Prompt(prompt), 5))


async def test_ids_are_used_verbatim(backend: Backend) -> None:
    """A prompt of token ids gives the completion of its text, and is counted exactly."""
    ids = await backend.tokenize(COUNT.text, add_special=False, parse_special=True)
    texts, finishes = await run(backend, Generation(Prompt(ids), 20, sampling=GREEDY))
    assert texts == [b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"]
    assert finishes[0].prompt_tokens == len(ids) == 12


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_the_context_may_be_filled(demo_f32: Path, engine: str) -> None:
    """A completion that fits exactly is served, and one without a limit ends at the context."""
    async with AsyncExitStack() as stack:
        backend: Backend
        if engine == "llama_cpp":
            backend = LlamaCpp(demo_f32, exact=True, context=256)
        else:
            server = llama_server(DEMO_MODEL, slots=1, context=256)
            backend = LlamaServer(stack.enter_context(server))
        await stack.enter_async_context(aclosing(backend))
        assert (await backend.model()).context == 256
        texts, _ = await run(backend, Generation(Prompt(COUNT), 256 - 12, sampling=GREEDY))
        assert texts == [ANSWER]
        _, finishes = await run(backend, Generation(Prompt(COUNT), None, sampling=ENDLESS))
        assert (finishes[0].reason, finishes[0].completion_tokens) == ("length", 256 - 12)


@without_koboldcpp
@pytest.mark.parametrize("ids", [(99999,), (-1,), (1, 1024)])
async def test_bad_ids_are_refused(backend: Backend, ids: tuple[int, ...]) -> None:
    """A token id outside the vocabulary, which would abort llama.cpp, is rejected with its
    field."""
    with pytest.raises(RequestError) as caught:
        await run(backend, Generation(Prompt(ids), 5))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError):
        await backend.detokenize(ids)
    biased = Sampling(logit_bias=tuple((token, 1.0) for token in ids))
    with pytest.raises(RequestError) as caught:
        await run(backend, Generation(Prompt(COUNT), 5, sampling=biased))
    assert caught.value.param == "logit_bias"


@without_koboldcpp
async def test_control_tokens_can_be_text(backend: Backend) -> None:
    """Without `parse_special`, a control token's spelling is ordinary text."""
    for parse_special, count in ((True, 1), (False, 5)):
        prompt = Prompt(Text("<|im_end|>", parse_special=parse_special))
        _, finishes = await run(backend, Generation(prompt, 1))
        assert finishes[0].prompt_tokens == count


@without_koboldcpp
async def test_control_tokens_can_be_stops(backend: Backend) -> None:
    """A stop sequence that spells a control token ends the completion at that token."""
    stops = Stops(("<|im_end|>",))
    texts, (finish,) = await run(
        backend, Generation(Prompt(COUNT), 64, stops=stops, sampling=GREEDY)
    )
    assert texts[0].startswith(ANSWER)
    assert finish.completion_tokens == 24
    assert finish.stop == ("<|im_end|>" if isinstance(backend, LlamaCpp) else None)
