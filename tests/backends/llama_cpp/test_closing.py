"""Tests that the end of an engine waits for other threads, which use what llama.cpp frees then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import MODELS
from latimer.backends.base import MEDIA, Generation, Grammar, Media, Prompt, Sampling, Text
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp import LlamaCpp
from llama_cpp import mtmd_cpp
from support.jobs import run
from support.projector import png, projector

DRY = Generation(
    Prompt(Text("hello")), 2, sampling=Sampling(extras={"dry_multiplier": 1.0, "dry_base": 1.5})
)


async def closed_during(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, backend: LlamaCpp, job: Generation
) -> None:
    """Close a backend while a job calls a function of llama.cpp, which ends later."""
    call: Callable[..., Any] = getattr(module, name)
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert goes_on.wait(10)
        return call(*arguments)

    await backend.model()
    monkeypatch.setattr(module, name, slow)
    asked = asyncio.create_task(run(backend, job))
    assert await asyncio.to_thread(begun.wait, 10)
    closing = asyncio.create_task(backend.aclose())
    await asyncio.wait([closing], timeout=0.2)
    assert not closing.done()
    goes_on.set()
    await closing
    with pytest.raises(EngineError, match="shut down"):
        await asyncio.wait_for(asked, 5)


async def test_the_vocabulary_is_kept_for_a_dry_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that closes while a DRY sampler is made ends after it."""
    await closed_during(monkeypatch, llama_cpp, "llama_sampler_init_dry", LlamaCpp(), DRY)


async def test_the_projector_is_kept_for_an_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine that closes while an image is decoded ends after it."""
    backend = LlamaCpp(MODELS / "bpe.gguf", mmproj=projector(tmp_path / "mmproj.gguf", 64))
    image = Media("image", png(32, 32, 32), "messages")
    job = Generation(Prompt(Text(f"see {MEDIA} here"), media=(image,)), 2)
    await closed_during(monkeypatch, mtmd_cpp, "mtmd_tokenize", backend, job)


async def test_grammars_that_wait_get_the_end_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job whose grammar waits for the compiler gets an error when the engine closes, and so does
    one that comes later."""
    backend = LlamaCpp()
    await backend.model()
    engine = await backend._engine()
    assert engine.generator is not None
    grammars = engine.generator.grammars
    slow = Generation(Prompt(Text("a")), 2, grammar=Grammar("gbnf", 'root ::= "a"', ""))
    others = [
        Generation(Prompt(Text("a")), 2, grammar=Grammar(*one, ""))
        for one in (("gbnf", 'root ::= "b"'), ("json_schema", "{}"), ("regex", "b"))
    ]
    call = llama_cpp.llama_sampler_init_grammar
    begun, goes_on = threading.Event(), threading.Event()

    def held(*arguments: Any) -> Any:
        begun.set()
        assert goes_on.wait(10)
        return call(*arguments)

    monkeypatch.setattr(llama_cpp, "llama_sampler_init_grammar", held)
    asked = [asyncio.create_task(run(backend, slow))]
    assert await asyncio.to_thread(begun.wait, 10)
    asked += [asyncio.create_task(run(backend, one)) for one in others]
    while len(grammars._compiled._running) < 3:
        await asyncio.sleep(0.01)
    closing = asyncio.create_task(backend.aclose())
    while not grammars._executor._shutdown:
        await asyncio.sleep(0.01)
    goes_on.set()
    await closing
    for one in asked:
        with pytest.raises(EngineError, match="shut down"):
            await asyncio.wait_for(one, 5)
    with pytest.raises(EngineError, match="shut down"):
        await grammars.compile(Grammar("gbnf", 'root ::= "c"', ""))
