"""Tests of koboldcpp's streams that end without their final event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx2
import orjson
import pytest
from latimer.backends.base import Finish, Generation, Prompt, Text
from latimer.backends.errors import EngineError
from latimer.backends.koboldcpp import KoboldCpp
from support.engines.recorded import one_token
from support.jobs import run

JOB = Generation(Prompt(Text("Count to 12.")), 5)
CONTROL = ("<|im_end|>", "<|im_start|>")


class Engine:
    """A koboldcpp with one completion, which it streams without a final event.

    Args:
        sent: the texts of its events.
        tokens: the generated tokens, the end token included.
        perf: changes to the response of `/api/extra/perf`.
    """

    def __init__(self, sent: Sequence[str], tokens: Sequence[str], **perf: int) -> None:
        self.sent, self.tokens = sent, tokens
        self.perf = {"idle": 1, "stop_reason": 0, **perf}
        self.since = time.monotonic()
        self.total = 7
        self.grows = 1
        self.busy = 0
        self.version = "1.115.1"
        self.whole = "".join(sent)
        self.reported: Any = {
            "content": [],
            "tokens": list(tokens),
            "token_ids": [100] * len(tokens),
        }

    def _answer(self, request: httpx2.Request) -> Any:
        value = orjson.loads(request.content) if request.content else {}
        match request.url.path.removeprefix("/api"):
            case "/extra/version":
                return {"result": "KoboldCpp", "version": self.version}
            case "/v1/model":
                return {"result": "koboldcpp/one"}
            case "/extra/true_max_context_length":
                return {"value": 2048}
            case "/props":
                return {"chat_template": "<|im_start|>"}
            case "/extra/tokencount":
                # A token for each character; a control token is one.
                text = value["prompt"]
                size = 1 if text in CONTROL else len(text)
                return {"value": size, "ids": [1] * value["special"] + [5] * size}
            case "/extra/detokenize":
                return {"result": "<s>" if value["ids"] == [1] else self.whole}
            case "/v1/generate":
                return one_token()
            case "/extra/last_logprobs":
                return {"logprobs": self.reported}
            case "/extra/perf":
                self.busy -= self.busy > 0
                idle = 0 if self.busy else self.perf["idle"]
                last = {"last_token_count": len(self.tokens), "total_gens": self.total,
                        "uptime": time.monotonic() - self.since}  # fmt: skip
                return {**last, **self.perf, "idle": idle}
        return None

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/api/extra/generate/stream":
            self.total += self.grows
            events = [orjson.dumps({"token": text, "finish_reason": None}) for text in self.sent]
            content = b"".join(b"data: " + event + b"\n\n" for event in events)
            return httpx2.Response(200, content=content)
        return httpx2.Response(200, json=self._answer(request))

    async def finish(self, job: Generation = JOB) -> tuple[bytes, Finish]:
        """Return the text and the finish of a job."""
        client = httpx2.MockTransport(self._respond)
        texts, finishes = await run(KoboldCpp("http://fake", client=client), job)
        return texts[0], finishes[0]


async def test_an_answer_of_all_tokens_is_whole() -> None:
    """The engine's stop reason counts when its tokens give the text that was sent."""
    text, finish = await Engine(["1, 2", ", "], ["1", ",", " 2", ",", " "]).finish()
    assert (text, finish.reason, finish.completion_tokens) == (b"1, 2, ", "length", 5)
    ended = Engine(["1, 2"], ["1", ",", " 2", "<|im_end|>"], stop_reason=1)
    text, finish = await ended.finish()
    assert (text, finish.reason, finish.completion_tokens) == (b"1, 2", "end", 3)


async def test_an_answer_of_no_text_may_be_whole() -> None:
    """A generation that starts with its end token is an empty completion."""
    text, finish = await Engine([], ["<|im_end|>"], stop_reason=1).finish()
    assert (text, finish.reason, finish.completion_tokens) == (b"", "end", 0)


async def test_the_engine_may_be_busy_for_a_moment() -> None:
    """The backend waits for an engine that closes its stream just before it is idle."""
    engine = Engine(["1"], ["1", "<|im_end|>"], stop_reason=1)
    engine.busy = 3
    assert (await engine.finish())[1].reason == "end"


async def test_control_tokens_and_halves_of_characters_are_no_gap() -> None:
    """Control tokens and tokens inside characters, which add no text, do not make a stream
    incomplete."""
    engine = Engine(["ab"], ["a", "<|im_start|>", "b", "<|im_end|>"], stop_reason=1)
    assert (await engine.finish())[1].reason == "end"
    engine = Engine(["a漢"], ["a", "", "", "<|im_end|>"], stop_reason=1)
    assert (await engine.finish())[0] == "a漢".encode()


CUT: dict[str, tuple[list[str], dict[str, int]]] = {
    "first": (["1"], {}),
    "none": ([], {}),
    "end": (["1, "], {"stop_reason": 1}),
    "more": (["1, 2, 3, 4"], {}),
}


@pytest.mark.parametrize("name", CUT)
async def test_a_cut_answer_is_an_error(name: str) -> None:
    """A stream that lacks a token raises an error with any stop reason."""
    sent, perf = CUT[name]
    engine = Engine(sent, ["1", ",", " 2", ",", " "], **perf)
    engine.whole = "1, 2, "
    with pytest.raises(EngineError, match="before it was finished"):
        await engine.finish()


async def test_tokens_of_nobody_prove_nothing() -> None:
    """A stream raises an error when the engine no longer has the tokens of its generation."""
    nothing: dict[str, Any] = {"content": [], "tokens": [], "token_ids": []}
    for reported in (None, nothing):
        engine = Engine(["1"], ["1"])
        engine.reported = reported
        with pytest.raises(EngineError, match="before it was finished"):
            await engine.finish()


@pytest.mark.timed
async def test_an_engine_that_still_generates_has_not_answered() -> None:
    """A stream that closes while the engine still generates raises an error."""
    with pytest.raises(EngineError, match="still generating"):
        await Engine(["1"], ["1"], idle=0).finish()


async def test_a_stream_that_ends_for_no_reason_is_an_error() -> None:
    """An aborted or failed generation raises an error."""
    with pytest.raises(EngineError, match="without a finish reason"):
        await Engine(["1"], ["1"], stop_reason=-2).finish()


async def test_an_older_koboldcpp_proves_by_counts() -> None:
    """With an older version, a stream is complete only when its token count and generation number
    match."""

    def engine(sent: str, **perf: int) -> Engine:
        made = Engine([sent], list("12345"), **perf)
        made.version = "1.76"
        return made

    text, finish = await engine("12345").finish()
    assert (text, finish.reason, finish.completion_tokens) == (b"12345", "length", 5)
    assert (await engine("1234", stop_reason=1).finish())[1].reason == "end"
    for made in (engine("1234"), engine("12345", total_gens=3), engine("12345", stop_reason=1)):
        with pytest.raises(EngineError, match="before it was finished"):
            await made.finish()
    other = engine("12345")
    other.grows = 2
    with pytest.raises(EngineError, match="before it was finished"):
        await other.finish()


async def test_more_tokens_than_asked_are_an_error() -> None:
    """More tokens than requested raise an error, in events, in text and in the engine's count,
    where one is too much."""
    for sent, tokens in ((["x"] * 40, ["x"]), (["x" * 40_000], ["x"]), (["x"] * 6, ["x"] * 6)):
        with pytest.raises(EngineError, match="more than the 5 tokens"):
            await Engine(sent, tokens).finish()
