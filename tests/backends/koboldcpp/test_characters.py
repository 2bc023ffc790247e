"""Tests of answers with a grammar that take several calls, some of which end inside a character."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
from latimer.backends.base import Generation, Grammar, Prompt, Sampling, Text
from latimer.backends.errors import EngineError
from latimer.backends.koboldcpp import KoboldCpp, characters
from latimer.backends.koboldcpp import run as koboldcpp_run
from support.engines.koboldcpp import FakeKoboldcpp, Generated
from support.engines.model import EOS, Task
from support.jobs import run

FORCED = "aé🎉日" * 8


@dataclass
class ForcedKoboldcpp(FakeKoboldcpp):
    """A koboldcpp whose grammar allows one text, whose tokens are bytes.

    Args:
        changes: True to generate another text when the grammar is begun once more.
    """

    changes: bool = False
    begun: int = 0
    _at: int = 0

    async def _texts(
        self, one: Generated, body: dict[str, Any], task: Task
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the next bytes of the text; those of characters that are not whole are lost."""
        if body.get("grammar") != "root ::= [^b]*":
            async for part in super()._texts(one, body, task):
                yield part
            return
        if not body.get("grammar_retain_state"):
            self._at = 0
            self.begun += 1
        forced = ("é" * self.changes * (self.begun > 1) + FORCED).encode()
        data = forced[self._at : self._at + body["max_length"]]
        self._at += len(data)
        one.tokens += [(byte, self._spelled(byte)) for byte in data]
        yield data.decode(errors="ignore"), ""
        if len(data) < body["max_length"]:
            one.tokens.append((EOS, self._spelled(EOS)))
            yield "", "stop"
        yield "", "length"


def job_of(max_tokens: int, streamed: bool) -> Generation:
    """Return a job whose grammar forces the text."""
    return Generation(
        Prompt(Text("text")),
        max_tokens,
        sampling=Sampling(temperature=0.0),
        grammar=Grammar("gbnf", "root ::= [^b]*", "grammar"),
        streamed=streamed,
    )


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("longest", [4, 5, 7, 9, 33])
async def test_calls_that_end_inside_a_character(
    longest: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer with a grammar is the grammar's text, wherever its calls end."""
    monkeypatch.setattr(koboldcpp_run, "longest_call", lambda _: longest)
    async with ForcedKoboldcpp() as fake:
        backend = KoboldCpp(fake.url)
        for most in (200, 2 * longest + 1):
            text = FORCED.encode()[:most].decode(errors="ignore")
            fake.begun = 0
            texts, finishes = await run(backend, job_of(most, streamed))
            assert b"".join(texts).decode() == text
            assert finishes[0].completion_tokens == min(most, len(FORCED.encode()))
            assert fake.begun > 1
        await backend.aclose()


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_calls_that_cannot_be_repeated(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer whose calls end inside a character is an error, rather than a text that its grammar
    does not allow, if koboldcpp does not repeat them or its tokens do not show their bytes."""
    monkeypatch.setattr(koboldcpp_run, "longest_call", lambda _: 5)
    async with ForcedKoboldcpp(changes=True) as fake:
        backend = KoboldCpp(fake.url)
        with pytest.raises(EngineError, match="ended a call inside a character"):
            await run(backend, job_of(30, streamed))
        monkeypatch.setattr(koboldcpp_run, "longest_call", lambda _: 2)
        fake.changes = False
        with pytest.raises(EngineError, match="ended a call inside a character"):
            await run(backend, job_of(30, streamed))
        monkeypatch.setattr(characters, "RARE", ())
        with pytest.raises(EngineError, match="does not show where characters end"):
            await run(backend, job_of(30, streamed))
        await backend.aclose()
