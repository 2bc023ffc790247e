"""Streams, down to the byte (contract 1.7, 2.7, 3.5)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from ..check import Fail, Skip, Unsupported, check, expect
from ..raw import connected, exchange
from ..target import Api, datas_in

H, C = "/chat/completions", "/completions"
ASK = "Count to 12."
# In seconds: the timing of the chunks of a shorter answer proves nothing.
QUICK = 0.9


def _chat(api: Api, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": ASK}]
    return {"model": api.model, "messages": messages, "stream": True, "max_tokens": 12, **body}


@check("streaming.frames",
       "Each event of a stream is one line that begins with `data: `, and a blank line.",
       "must", "1.7")  # fmt: skip
async def frames(api: Api) -> None:
    reply = await exchange(api, "POST", H, _chat(api))
    text = reply.body.decode().replace("\r\n", "\n")
    expect(text.endswith("\n\n"), f"expected a blank line at the end, but got {text[-60:]!r}")
    for event in text[:-2].split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        expect(
            all(line.startswith("data: ") for line in lines), f"expected data: …, but got {event!r}"
        )
        expect(len(lines) <= 1, f"expected one line for an event, but got {event!r}")


@check("streaming.done", "A stream ends with the event [DONE], which occurs once.",
       "must", "1.7 [SPEC]")  # fmt: skip
async def done(api: Api) -> None:
    for path, body in ((H, _chat(api)), (C, _completion(api))):
        reply = await exchange(api, "POST", path, body)
        if reply.status in (404, 405, 501):
            raise Unsupported(f"the endpoint {path} does not exist: status {reply.status}")
        datas = datas_in(reply.body.decode()) or [reply.body.decode()]
        last = datas[-1][:100]
        expect(datas[-1] == "[DONE]", f"{path}: expected data: [DONE], but got {last!r}")
        count = datas.count("[DONE]")
        expect(count == 1, f"{path}: expected one [DONE], but got {count}")


def _completion(api: Api, **body: Any) -> dict[str, Any]:
    return {"model": api.model, "prompt": "1, 2, 3,", "stream": True, "max_tokens": 8, **body}


async def _both(api: Api, **body: Any) -> AsyncIterator[list[Any]]:
    """Yield the chunks of a chat completion, and then those of a completion.

    A server without completions is judged by its chat first.
    """
    yield await api.chat_stream(ASK, **body)
    yield await api.complete_stream(**body)


@check("streaming.same-id", "All chunks of a stream have the same id, created and model.",
       "must", "2.7 10.28")  # fmt: skip
async def same_id(api: Api) -> None:
    async for chunks in _both(api, max_tokens=6):
        found = {(c["id"], c["created"], c["model"]) for c in chunks}
        expect(len(found) == 1, f"expected one id, created and model, but got {found}")


@check("streaming.object",
       "Chunks of a chat completion have the object chat.completion.chunk, and those of a "
       "completion text_completion.",
       "must", "2.7 3.5")  # fmt: skip
async def objects(api: Api) -> None:
    kinds = iter(("chat.completion.chunk", "text_completion"))
    async for chunks in _both(api, max_tokens=4):
        expected = next(kinds)
        found = {chunk["object"] for chunk in chunks}
        expect(found == {expected}, f"expected {expected}, but got {found}")


@check("streaming.role-once",
       "In a chat completion stream, the first delta has the role assistant, and no other has a "
       "role.",
       "must", "3.5 10.25")  # fmt: skip
async def role_once(api: Api) -> None:
    deltas = [
        c["choices"][0]["delta"] for c in await api.chat_stream(ASK, max_tokens=6) if c["choices"]
    ]
    roles = [index for index, delta in enumerate(deltas) if delta.get("role") is not None]
    expect(roles == [0], f"expected the role in chunk 0 only, but got it in {roles}")
    expect(deltas[0]["role"] == "assistant", f"expected assistant, but got {deltas[0]}")


@check("streaming.delta-object",
       "In a chat completion stream, every delta is an object, never null.",
       "must", "3.5 [EXP]")  # fmt: skip
async def delta_object(api: Api) -> None:
    for chunk in await api.chat_stream(ASK, max_tokens=6):
        for choice in chunk["choices"]:
            expect(isinstance(choice.get("delta"), dict), f"expected an object, but got {choice}")


@check("streaming.last-delta",
       "In a chat completion stream, the chunk with the finish_reason has an empty delta.",
       "should", "3.5")  # fmt: skip
async def last_delta(api: Api) -> None:
    for chunk in await api.chat_stream(ASK, max_tokens=6):
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                expect(choice["delta"] == {}, f"expected an empty delta, but got {choice}")


@check("streaming.finish-once", "In a stream, only the last chunk of a choice has a finish_reason.",
       "must", "3.5 10.26")  # fmt: skip
async def finish_once(api: Api) -> None:
    async for chunks in _both(api, max_tokens=6):
        choices = [c["choices"][0] for c in chunks if c["choices"]]
        ends = [i for i, choice in enumerate(choices) if choice["finish_reason"] is not None]
        expect(
            ends == [len(choices) - 1],
            f"expected a finish_reason in the last chunk only, but got it in chunks {ends}",
        )


@check("streaming.concat",
       "The deltas of a streamed chat completion join to the content of one that is not streamed.",
       "must", "10.29")  # fmt: skip
async def concat(api: Api) -> None:
    whole = (await api.chat(ASK, temperature=0, max_tokens=20))["choices"][0]["message"]["content"]
    chunks = await api.chat_stream(ASK, temperature=0, max_tokens=20)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    expect(text == whole, f"expected {whole!r}, but got {text!r}")


@check("streaming.concat-completion",
       "The chunks of a streamed completion join to the text of one that is not streamed.",
       "must", "10.29")  # fmt: skip
async def concat_completion(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": 12}
    whole = (await api.complete(api.stable("1, 2, 3,"), **full))["choices"][0]["text"]
    chunks = await api.complete_stream(api.stable("1, 2, 3,"), **full)
    text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    expect(text == whole, f"expected {whole!r}, but got {text!r}")


@check("streaming.choice-keys",
       "Each choice of a streamed completion has text, index, logprobs and finish_reason, which "
       "may be null.",
       "should", "2.7 [DD]")  # fmt: skip
async def choice_keys(api: Api) -> None:
    for chunk in await api.complete_stream("1, 2, 3,", max_tokens=4):
        for choice in chunk["choices"]:
            missing = {"text", "index", "logprobs", "finish_reason"} - choice.keys()
            expect(not missing, f"expected {sorted(missing)} in a choice, but got {choice}")


@check("streaming.in-pieces", "A long answer is streamed in several chunks.",
       "must", "3.5", alone=True)  # fmt: skip
async def in_pieces(api: Api) -> None:
    start = time.monotonic()
    chunks = await api.chat_stream("Count to 60.", max_tokens=150, temperature=0)
    took = time.monotonic() - start
    texts = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
    texts = [text for text in texts if text]
    if len("".join(texts)) < 8:
        raise Skip("the model generates too little text")
    if len(texts) == 1 and 0.3 < took < QUICK:
        raise Skip(f"the first chunk came after {took:.2f} s, when the answer was complete")
    expect(len(texts) > 1, f"expected several chunks, but got {texts}")


@check("streaming.usage",
       "With include_usage, the last chunk of a stream has no choices and a usage that adds up.",
       "must", "10.21")  # fmt: skip
async def usage(api: Api) -> None:
    more = {"stream_options": {"include_usage": True}, "max_tokens": 4}
    async for chunks in _both(api, **more):
        last = chunks[-1]
        expect(last["choices"] == [], f"expected no choices in the last chunk, but got {last}")
        counts = last.get("usage")
        expect(isinstance(counts, dict), f"expected usage in the last chunk, but got {last}")
        total = counts["prompt_tokens"] + counts["completion_tokens"]
        expect(
            total == counts["total_tokens"],
            f"expected a total_tokens that adds up, but got {counts}",
        )


@check("streaming.usage-null",
       "With include_usage, every chunk of a stream except the last has usage null.",
       "must", "10.21 [SPEC]")  # fmt: skip
async def usage_null(api: Api) -> None:
    more = {"stream_options": {"include_usage": True}, "max_tokens": 4}
    async for chunks in _both(api, **more):
        found = [chunk.get("usage", "no key") for chunk in chunks[:-1]]
        expect(
            set(map(str, found)) == {"None"}, f"expected usage null in each chunk, but got {found}"
        )


@check("streaming.no-usage",
       "Without include_usage, no chunk of a stream has usage, and every chunk has a choice.",
       "must", "10.22")  # fmt: skip
async def no_usage(api: Api) -> None:
    async for chunks in _both(api, max_tokens=4):
        empty = [chunk for chunk in chunks if not chunk["choices"]]
        expect(not empty, f"expected a choice in each chunk, but got {empty[:1]}")
        counts = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        expect(not counts, f"expected no usage, but got {counts[:1]}")


@check("streaming.usage-equal",
       "A streamed chat completion has the same usage as one that is not streamed.",
       "should", "10.24")  # fmt: skip
async def usage_equal(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": 10}
    plain = (await api.chat(ASK, **full))["usage"]
    chunks = await api.chat_stream(ASK, stream_options={"include_usage": True}, **full)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        found = chunks[-1]["usage"][name]
        expect(found == plain[name], f"{name}: expected {plain[name]}, but got {found}")


@check("streaming.choices-in-order",
       "In a chat completion stream with n 2, choice 0 begins before choice 1.",
       "must", "3.5 10.51 [EXP]")  # fmt: skip
async def choices_in_order(api: Api) -> None:
    # Where the choices race, one stream has them in order by chance.
    for _ in range(8):
        chunks = await api.chat_stream(ASK, n=2, max_tokens=4)
        seen: list[int] = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                if choice["index"] not in seen:
                    seen.append(choice["index"])
        expect(seen == [0, 1], f"expected choice 0 and then choice 1, but got {seen}")


@check("streaming.all-choices",
       "In a greedy completion stream with n 2, both choices have the same text and end once.",
       "must", "10.51")  # fmt: skip
async def all_choices(api: Api) -> None:
    chunks = await api.complete_stream(api.stable("1, 2, 3,"), n=2, max_tokens=6, temperature=0)
    texts = {0: "", 1: ""}
    ends = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ends.append(choice["index"])
    expect(sorted(ends) == [0, 1], f"expected one end of choices 0 and 1 each, but got {ends}")
    expect(texts[0] == texts[1], f"expected the same greedy text twice, but got {texts}")


@check("streaming.utf8", "A stream never splits a character between chunks.", "must", "1.7 10.30")
async def utf8(api: Api) -> None:
    question = "Show me an emoji of fire." if api.hint == "demo" else "Write five emoji."
    chunks = await api.chat_stream(question, max_tokens=24, temperature=0)
    texts = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    expect(
        not any("\ufffd" in text for text in texts),
        f"expected no replacement character, but got {texts}",
    )


@check("streaming.one-choice", "A chunk of a chat completion stream has at most one choice.",
       "should", "2.7 3.5")  # fmt: skip
async def one_choice(api: Api) -> None:
    for chunk in await api.chat_stream(ASK, n=2, max_tokens=4):
        expect(len(chunk["choices"]) <= 1, f"expected at most one choice, but got {chunk}")


@check("streaming.first-chunk",
       "The first chunk of a stream arrives before the answer is complete.",
       "should", "3.5", alone=True)  # fmt: skip
async def first_chunk(api: Api) -> None:
    start = time.monotonic()
    body = _chat(
        api, max_tokens=500, temperature=0, messages=[{"role": "user", "content": "Count to 300."}]
    )
    first = 0.0
    async with connected(api, "POST", H, body) as (reader, _writer):
        while chunk := await reader.read(65536):
            if not first and b"data:" in chunk:
                first = time.monotonic() - start
    whole = time.monotonic() - start
    if whole < QUICK:
        raise Skip(f"the whole answer took only {whole:.2f} s")
    expect(
        first < 0.8 * whole,
        f"expected the first chunk early, but got it after {first:.2f} of {whole:.2f} s",
    )


@check("streaming.disconnect", "Generation is cancelled when the client disconnects.",
       "must", "1.7 10.85", alone=True)  # fmt: skip
async def disconnect(api: Api) -> None:
    count = [{"role": "user", "content": "Count to 1000."}]
    one = _chat(api, max_tokens=1, stream=False)
    start = time.monotonic()
    await exchange(api, "POST", H, one)
    idle = time.monotonic() - start
    for _ in range(8):
        async with connected(api, "POST", H, _chat(api, messages=count, max_tokens=1500)) as (
            reader,
            _writer,
        ):
            await reader.readuntil(b"data:")
    await asyncio.sleep(1.5)
    start = time.monotonic()
    await exchange(api, "POST", H, one)
    took = time.monotonic() - start
    expect(
        took < idle + 1.0,
        f"expected the next answer after {idle:.2f} s, but got it after {took:.2f} s",
    )


@check("streaming.connection-close",
       "The server closes the connection after a stream if the request has Connection: close.",
       "must", "1.7", alone=True)  # fmt: skip
async def connection_close(api: Api) -> None:
    try:
        reply = await asyncio.wait_for(exchange(api, "POST", H, _chat(api)), 5)
    except TimeoutError:
        raise Fail("expected the connection to close, but it stayed open for 5 s") from None
    expect(reply.status == 200, f"expected status 200, but got {reply.status}")


@check("streaming.json-lines", "The JSON of a stream's event contains no line break.",
       "must", "1.7")  # fmt: skip
async def json_lines(api: Api) -> None:
    reply = await exchange(api, "POST", C, _completion(api, prompt="a\nb\nc\n", max_tokens=12))
    for line in reply.body.decode().split("\n"):
        if line.startswith("data: {"):
            try:
                json.loads(line.removeprefix("data: "))
            except ValueError:
                raise Fail(f"expected JSON without line breaks, but got {line[:120]!r}") from None
