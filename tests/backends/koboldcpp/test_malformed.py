"""Tests of invalid responses from koboldcpp, and of another model at its address."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx2
import orjson
import pytest
from latimer.backends.base import Finish, Generation, Prompt, Text
from latimer.backends.errors import Busy, EngineError, EngineUnavailable, ModelChanged
from support.engines.recorded import RecordedKoboldcpp, one_token
from support.jobs import run
from support.recordings import body

# The recorded generation has as many tokens, so no second call follows.
JOB = Generation(Prompt(Text("Count to 12.")), 5)
DEEP = b"[" * 200_000
NONSENSE: dict[str, bytes] = {
    "null": b"null",
    "number": b"7",
    "huge": b"1e400",
    "list": b"[[1]]",
    "empty": b"",
    "deep": DEEP,
    "not-utf-8": b'{"result":"\xff"}',
    "odd": b'{"ids":[-1],"result":{},"value":-1,"version":7,"logprobs":[],"results":5}',
    "large": b'{"ids":[1180591620717411303424],"result":[],"value":1e300,"logprobs":{"tokens":7}}',
}


def restart(engine: RecordedKoboldcpp) -> None:
    """Respond like another process."""
    engine.since += 1.0


ASKED = [
    "/api/extra/version",
    "/api/v1/model",
    "/api/extra/true_max_context_length",
    "/props",
    "/api/v1/generate",
    "/api/extra/tokencount",
    "/api/extra/detokenize",
    "/api/extra/generate/stream",
    "/api/extra/last_logprobs",
]


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("path", ASKED)
async def test_koboldcpps_nonsense_is_an_engine_error(path: str, name: str) -> None:
    """An invalid response to any call raises an engine error or has no effect."""
    engine = RecordedKoboldcpp()
    engine.answers[path] = NONSENSE[name]
    if path == "/api/extra/generate/stream":
        engine.answers[path] = b"data: " + NONSENSE[name] + b"\n\n"
    backend, logged = engine.backend, replace(JOB, logprobs=0)
    found = [
        await asyncio.gather(work, return_exceptions=True)
        for work in (
            backend.model(),
            backend.special_tokens(),
            run(backend, JOB),
            run(backend, logged),
        )
    ]
    errors = [one for results in found for one in results if isinstance(one, BaseException)]
    assert all(isinstance(error, EngineError) for error in errors)


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_perf_of_nonsense_is_as_good_as_none(name: str) -> None:
    """A job succeeds when `/api/extra/perf` gives an invalid response."""
    engine = RecordedKoboldcpp()
    engine.answers["/api/extra/perf"] = NONSENSE[name]
    assert (await run(engine.backend, JOB))[0][0]


@pytest.mark.parametrize("ids", [[], [-5], [2**31], [True]], ids=str)
async def test_odd_tokens_are_the_engines_fault(ids: list[int]) -> None:
    """Invalid token ids from the engine raise an engine error, not an error of the request."""
    engine = RecordedKoboldcpp()
    await engine.backend.model()
    engine.answers["/api/extra/tokencount"] = orjson.dumps({"value": len(ids), "ids": ids})
    with pytest.raises(EngineError):
        await run(engine.backend, JOB)


async def test_another_model_is_noticed_before_an_answer() -> None:
    """The backend detects another model before it answers a prompt made for the old one, and the
    call that it sent meanwhile is aborted."""
    engine = RecordedKoboldcpp()
    old = await engine.backend.model()
    await run(engine.backend, JOB)
    other = {"chat_template": "{{ messages }}"}
    restart(engine)
    engine.answers["/props"] = other
    engine.asked.clear()
    with pytest.raises(EngineUnavailable, match="another model"):
        await run(engine.backend, JOB)
    async with asyncio.timeout(5):
        while "/api/extra/abort" not in engine.asked:
            await asyncio.sleep(0.01)
    new = await engine.backend.model()
    assert (new.template, new.fingerprint != old.fingerprint) == ("{{ messages }}", True)
    with pytest.raises(EngineUnavailable):
        await run(engine.backend, replace(JOB, fingerprint=old.fingerprint))
    assert (await run(engine.backend, replace(JOB, fingerprint=new.fingerprint)))[0][0]


async def test_the_same_koboldcpp_again_goes_on() -> None:
    """A restarted koboldcpp with the same model accepts earlier jobs when its model was read again,
    and later jobs cost two checks at most."""
    engine = RecordedKoboldcpp()
    model = await engine.backend.model()
    await run(engine.backend, JOB)
    restart(engine)
    with pytest.raises(ModelChanged):
        await run(engine.backend, JOB)
    assert (await run(engine.backend, replace(JOB, fingerprint=model.fingerprint)))[0][0]
    assert (await engine.backend.model()).fingerprint == model.fingerprint
    engine.asked.clear()
    await run(engine.backend, JOB)
    assert engine.asked.count("/api/extra/perf") <= 2
    assert "/api/v1/model" not in engine.asked


async def test_a_restart_may_change_the_bos() -> None:
    """After a restart the BOS of prompts is read again, although name, context and template are the
    same."""
    engine = RecordedKoboldcpp()
    old = await engine.backend.model()
    restart(engine)
    reply = one_token()
    # Without a BOS, "a" has as many tokens as the tokenizer says.
    reply["results"][0]["prompt_tokens"] = 3
    engine.answers["/api/v1/generate"] = reply
    engine.backend.server.monitor.invalidate()
    new = await engine.backend.model()
    assert (old.adds_bos, new.adds_bos) == (True, False)
    assert old.fingerprint != new.fingerprint


async def test_an_engine_that_overwrites_requests_is_an_error() -> None:
    """koboldcpp's `--gendefaultsoverwrite`, which replaces the limit of tokens, is named when the
    model is read."""
    engine = RecordedKoboldcpp()
    engine.one = orjson.loads(body("koboldcpp", "limit"))
    with pytest.raises(EngineError, match="generates 5 tokens where 1 was requested"):
        await engine.backend.model()


async def test_a_rate_limit_is_named() -> None:
    """koboldcpp's `--ratelimit` beyond the patience is a 429 with its seconds, and the start needs
    one generation only."""
    engine = RecordedKoboldcpp()
    said = "You are sending requests too quickly. Please try again in 89 seconds."
    busy = orjson.dumps({"detail": {"msg": said, "type": "service_unavailable"}})
    engine.one = busy
    assert (await engine.backend.model()).adds_bos
    engine.answers["/api/v1/generate"] = lambda _: httpx2.Response(503, content=busy)
    with pytest.raises(Busy, match="--ratelimit, and accepts its next request in 90 s") as raised:
        await run(engine.backend, replace(JOB, streamed=False))
    assert raised.value.retry_after == 90


async def test_small_requests_come_between_the_choices_of_a_large_one() -> None:
    """A small request runs between the choices of a large one."""
    engine = RecordedKoboldcpp()
    await engine.backend.model()
    order: list[str] = []

    async def ask(name: str, choices: int) -> None:
        job = replace(JOB, seeds=tuple(range(choices)))
        async with engine.backend.open(job) as batches:
            async for batch in batches:
                order.extend(name for event in batch if isinstance(event, Finish))

    large = asyncio.create_task(ask("large", 8))
    while not order:
        await asyncio.sleep(0)
    await asyncio.gather(large, ask("small", 1))
    assert order.index("small") <= 3
    assert order.count("large") == 8
