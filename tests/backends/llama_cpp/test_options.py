"""Tests of the engine's options in process: split files, LoRA adapters, KV cache types and
batches."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gguf
import pytest
from latimer.backends.base import Generation, Prompt, Sampling, Text
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from support import gguf_files
from support.jobs import run
from support.recordings import DEMO_CHATML
from support.reference import prompt_tokens

FRANCE = Text(DEMO_CHATML.format("What is the capital of France?"))
SENTENCE = Text("The capital of France is Paris. One day, a cat sat on the mat and said: hello!")
ANSWER = "The capital of France is Paris."


async def answer(path: Path = DEMO_MODEL, **options: Any) -> str:
    """Return a greedy completion."""
    backend = LlamaCpp(path, context=512, **options)
    async with aclosing(backend):
        job = Generation(Prompt(FRANCE), 20, (1,), sampling=Sampling(0.0))
        return (await run(backend, job))[0][0].decode()


async def scores(path: Path, **options: Any) -> list[float]:
    """Return the log-probabilities of a sentence."""
    backend = LlamaCpp(path, context=512, **options)
    async with aclosing(backend):
        tokens = await prompt_tokens(backend, SENTENCE)
    return [token.logprob for token in tokens if token.logprob is not None]


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attention": True},
        {"flash_attention": False},
        {"mmap": True},
        {"mmap": False},
        {"mlock": True},
        {"mlock": True, "mmap": False},
        {"batch": 1},
        {"batch": 7},
        {"batch": 4096},
        {"threads": 1},
        {"parallel": 1},
        *({"cache_type": kind} for kind in ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1")),
    ],
    ids=str,
)
async def test_every_option_gives_the_same_sure_answer(options: dict[str, Any]) -> None:
    """No option changes a completion that the model is sure of."""
    assert await answer(**options) == ANSWER


async def test_a_smaller_memory_is_a_coarser_one() -> None:
    """KV cache types with fewer bits move the log-probabilities further."""
    exact = await scores(DEMO_MODEL, cache_type="f32", flash_attention=False)
    moved = []
    for kind in ("f16", "q8_0", "q4_0"):
        found = await scores(DEMO_MODEL, cache_type=kind)
        moved.append(max(abs(a - b) for a, b in zip(exact, found, strict=True)))
    assert 0 < moved[0] < moved[1] < moved[2] < 2


@pytest.mark.parametrize("options", [{"cache_type": "q8_0"}, {"flash_attention": True}], ids=str)
def test_what_contradicts_exact_is_refused(options: dict[str, Any]) -> None:
    """Options that contradict `exact` are rejected."""
    with pytest.raises(EngineError, match="'exact'"):
        LlamaCpp(exact=True, **options)


async def test_a_quantised_memory_without_flash_attention_is_no_engine() -> None:
    """A combination that llama.cpp does not support is an error at load time, with llama.cpp's
    reason."""
    with pytest.raises(EngineError, match=r"cannot create a context: .*flash_attn"):
        await answer(cache_type="q4_0", flash_attention=False)


async def test_any_part_of_a_model_stands_for_all(tmp_path: Path) -> None:
    """Any part's file name loads a split model, and the model's name has no part number."""
    gguf_files.copy(DEMO_MODEL, tmp_path / "split.gguf", tensors_a_part=15)
    parts = [tmp_path / f"split-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        assert await answer(part) == ANSWER
    async with aclosing(LlamaCpp(parts[1])) as backend:
        assert (await backend.model()).name == "split"
    parts[2].unlink()
    with pytest.raises(EngineError, match=r"has 3 parts; missing: split-00003-of-00003\.gguf"):
        await answer(parts[0])


async def test_an_adapter_counts_as_if_it_were_in_the_weights(tmp_path: Path) -> None:
    """A LoRA adapter at a scale gives the log-probabilities of the merged weights."""
    adapter = tmp_path / "adapter.gguf"
    deltas = gguf_files.lora(DEMO_MODEL, adapter)
    f32 = gguf.GGMLQuantizationType.F32
    plain = gguf_files.copy(DEMO_MODEL, tmp_path / "plain.gguf", kind=f32)
    for scale in (1.0, 0.5):
        added = {name: scale * delta for name, delta in deltas.items()}
        merged = tmp_path / f"merged-{scale}.gguf"
        gguf_files.copy(DEMO_MODEL, merged, kind=f32, deltas=added)
        wanted = await scores(merged, exact=True)
        found = await scores(plain, exact=True, lora=[(adapter, scale)])
        assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 1e-4
    bare = await scores(plain, exact=True)
    assert max(abs(a - b) for a, b in zip(wanted, bare, strict=True)) > 0.01
    twice = await scores(plain, exact=True, lora=[(adapter, 0.25), (adapter, 0.25)])
    assert max(abs(a - b) for a, b in zip(wanted, twice, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("file", "words"),
    [(Path("nowhere.gguf"), "There is no LoRA"), (DEMO_MODEL, r"cannot apply .* to this model")],
)
async def test_an_adapter_that_is_none_is_told(file: Path, words: str) -> None:
    """The error names a LoRA file that cannot be used, and the reason."""
    with pytest.raises(EngineError, match=words):
        await answer(lora=[file])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 0}, "'context' must be a whole number from 1 to 16777216, not 0."),
        ({"context": -1}, "'context' must be a whole number from 1 to 16777216, not -1."),
        ({"threads": 0}, "'threads' must be a whole number from 1 to 512, not 0."),
        ({"threads": True}, "'threads' must be a whole number from 1 to 512, not True."),
        ({"parallel": 257}, "'parallel' must be a whole number from 1 to 256, not 257."),
        ({"batch": "512"}, "'batch' must be a whole number from 1 to 1048576, not '512'."),
        ({"gpu_layers": 1.5}, "'gpu_layers' must be a whole number from -1 to 1048576, not 1.5."),
        ({"cache_type": "q3"}, "'cache_type' must be one of f32, f16, bf16, q8_0, q5_1, q5_0, "),
    ],
)
def test_a_wrong_option_is_an_error_at_once(options: dict[str, Any], said: str) -> None:
    """An option that the engine cannot have is an error when the backend is made."""
    with pytest.raises(EngineError) as caught:
        LlamaCpp(**options)
    assert str(caught.value).startswith(said)


async def test_no_more_choices_run_than_a_batch_has_tokens() -> None:
    """With a small batch the choices take turns; none waits while those before it get tokens."""
    backend = LlamaCpp(context=1024, parallel=8, batch=4)
    job = Generation(Prompt(Text("one two")), 100, (1,) * 8)
    task = asyncio.create_task(run(backend, job))
    running = set()
    while not task.done():
        load = backend.load()
        running.add(0 if load is None else load.running)
        await asyncio.sleep(0)
    assert len((await task)[0]) == 8
    assert max(running) == 4
    await backend.aclose()
