"""Cases of slow readers, disconnects, the queue, silent clients and engines, and other models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from chaos.acts import another_model, floods, leaves, pipelines, reads_nothing, stays_silent
from chaos.case import (
    ALL,
    FAKE_KOBOLD,
    FAKE_SERVER,
    FAKES,
    INSIDE,
    REAL,
    RIGHT,
    SILENT,
    Case,
)  # fmt: skip
from chaos.client import Reply

MODEL, PRESSURE, LEAVING, SILENCE, QUEUE = (
    "6 another model", "8 backpressure", "9 the client left", "10 silence", "queue",
)  # fmt: skip
# A completion that continues until the context is full.
LONG: dict[str, Any] = {"prompt": "endless", "ignore_eos": True, "temperature": 1}
STORY = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"


def _models() -> Iterator[Case]:
    for what in ("name", "template", "vocabulary", "context", "all"):
        for closes in (True, False):
            how = "after a restart" if closes else "while connections stay open"
            yield Case(
                name=f"another {what} {how}",
                kind=MODEL,
                # Each response of koboldcpp has its own connection.
                engines=FAKES if closes else (FAKE_SERVER,),
                act=another_model(what, closes),
                beside=False,
                short=closes and what != "all",
            )


def _pressure() -> Iterator[Case]:
    endless = {"prompt": "endless", "max_tokens": 8000, "stream": True}
    more: dict[str, dict[str, Any]] = {
        "one choice": {},
        "n 8": {"n": 8},
        "n 32": {"n": 32},
        "8 prompts": {"prompt": ["endless"] * 8},
        "n 8 with logprobs": {"n": 8, "logprobs": 5},
        "8 prompts, n 4": {"prompt": ["endless"] * 8, "n": 4},
        "best_of": {"best_of": 1},
    }
    for name, fields in more.items():
        yield Case(
            name=f"reads nothing of {name}",
            kind=PRESSURE,
            engines=(FAKE_SERVER,),
            body={**endless, **fields},
            act=reads_nothing(most=32),
            short=name == "n 8",
        )
    large = {"prompt": "FAULT:large-text count:2000", "stream": True, "max_tokens": 4000}
    for name, fields in (("n 8", {"n": 8}), ("8 prompts", {"prompt": [large["prompt"]] * 8})):
        yield Case(
            name=f"reads nothing of large events, {name}",
            kind=PRESSURE,
            engines=(FAKE_SERVER,),
            body={**large, **fields},
            act=reads_nothing(seconds=3, most=32),
            short=name == "n 8",
        )
    yield Case(
        name="reads nothing of one choice",
        kind=PRESSURE,
        engines=(FAKE_KOBOLD,),
        body=endless,
        act=reads_nothing(most=32),
        beside=False,
    )
    yield Case(
        name="300 requests leave few idle connections",
        kind=PRESSURE,
        engines=FAKES,
        body={"max_tokens": 16},
        act=floods(300),
        expect=RIGHT | {429},
        seconds=30,
        short=True,
    )


TALE = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True}
SLOW = {"prompt": "endless slow:5", "max_tokens": 4000}
LARGE: dict[str, Any] = {
    "a long prompt": {"prompt": "word " * 1_000_000},
    "ids": {"prompt": [5] * 1_000_000},
    "a large schema": {
        "prompt": "a",
        "json_schema": {"oneOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(400)]},
    },
    "a large regex": {"prompt": "a", "regex": "([a-z]{1,100}[0-9]{1,100}){1,100}"},
    "a large grammar": {
        "prompt": "a",
        "grammar": "root ::= r0\n"
        + "".join(f"r{i} ::= r{i + 1} | [a-z] r{i + 1}\n" for i in range(3000))
        + 'r3000 ::= "a"',
    },
    "a scored prompt": {"prompt": "word " * 300, "echo": True, "logprobs": 5, "max_tokens": 0},
}


def _left(name: str, engines: tuple[str, ...] = ALL, **fields: Any) -> Case:
    return Case(
        name=f"left {name}",
        kind=LEAVING,
        engines=engines,
        **{"beside": False, "expect": RIGHT, **fields},
    )


def _leaving() -> Iterator[Case]:
    yield from _left_in_answers()
    yield from _left_in_requests()
    yield from _left_in_silence()
    yield from _left_in_work()


def _left_in_answers() -> Iterator[Case]:
    for way, more in (("", {}), (" a stream", {"stream": True})):
        for after in (0.0, 0.01, 0.03, 0.3):
            for twice in (False, True):
                name = f"after {after:g} s{way}" + " with a second request" * twice
                act, late = leaves(after, twice=twice), after == 0.3
                yield _left(name, FAKES, body={**SLOW, **more}, act=act, short=late)
                yield _left(
                    name,
                    (REAL, INSIDE),
                    body={**TALE, **more},
                    act=act,
                    short=late and not way,
                )
    yield _left("in a stream", FAKES, body={**SLOW, "stream": True}, act=leaves(begun=True))
    yield _left(
        "in a stream", (REAL, INSIDE), body={**TALE, "stream": True}, act=leaves(begun=True)
    )
    yield _left(
        "in a stream with a second request",
        FAKES,
        body={**SLOW, "stream": True},
        act=leaves(begun=True, twice=True),
    )
    several: dict[str, dict[str, Any]] = {
        "n 8": {"n": 8},
        "8 prompts": {"prompt": ["endless slow:5"] * 8},
        "best_of": {"best_of": 4},
    }
    for name, fields in several.items():
        yield _left(name, (FAKE_SERVER,), body={**SLOW, **fields}, act=leaves(0.2))


def _left_in_requests() -> Iterator[Case]:
    for share in (0.0, 0.1, 0.5, 0.99):
        yield _left(f"with {share:.0%} of the request sent", act=leaves(0.05, share=share))
        yield _left(
            f"with {share:.0%} of 8 MB sent",
            (FAKE_SERVER, INSIDE),
            act=leaves(0.05, share=share),
            body=lambda: {"prompt": "word " * 1_600_000},
            memory=200,
        )


def _left_in_silence() -> Iterator[Case]:
    for stage in ("request", "headers", "between"):
        for path in ("", "@/tokenize", "@/props"):
            calls = {path[1:]: f"silence/{stage}"} if path else {}
            fault = "" if path else f"silence/{stage}"
            body = {"messages": [{"role": "user", "content": "MARKED"}]}
            yield _left(
                f"while {path[1:] or 'the answer'} is silent at {stage}",
                (FAKE_SERVER,),
                body=body if path else {},
                fault=fault,
                calls=calls,
                act=leaves(0.2),
                path="/v1/chat/completions" if path else "/v1/completions",
                short=stage == "request",
            )
            yield _left(
                f"while {path[1:] or 'the answer'} is silent at {stage}, with a second request",
                (FAKE_SERVER,),
                body=body if path else {},
                fault=fault,
                calls=calls,
                act=leaves(0.2, twice=True),
                path="/v1/chat/completions" if path else "/v1/completions",
            )
    for stage in ("request", "headers"):
        yield _left(
            f"while the answer is silent at {stage}",
            (FAKE_KOBOLD,),
            fault=f"silence/{stage}",
            act=leaves(0.2),
        )


def _left_in_work() -> Iterator[Case]:
    for name, body in LARGE.items():
        for after in (0.02, 0.2):
            yield _left(
                f"while {name} is worked on, after {after:g} s",
                body=body,
                act=leaves(after),
                memory=300,
                engines=(FAKE_SERVER, REAL, INSIDE),
                short=False,
            )
    conversation = [{"role": "user", "content": "word " * 40}] * 5000
    yield _left(
        "while a long conversation is rendered",
        (FAKE_SERVER, INSIDE),
        act=leaves(0.1),
        memory=300,
        body={"messages": conversation},
        path="/v1/chat/completions",
    )
    yield _left("while 1,000 others do", FAKES, act=floods(500, ends=False), body=SLOW)
    yield _left(
        "while 100 others do", (REAL, INSIDE), act=floods(100, ends=False), body=TALE, memory=128
    )
    yield _left("half a request and silence", act=stays_silent, beside=True)


def _pipelines() -> Iterator[Case]:
    for way, more in (("", {}), (" streamed", {"stream": True})):
        yield Case(
            name=f"two requests in a pipeline{way}",
            kind=LEAVING,
            engines=ALL,
            body={"max_tokens": 16, **more},
            act=pipelines,
            short=not way,
        )


def _silence() -> Iterator[Case]:
    for way, more in (("", {}), (" streamed", {"stream": True})):
        for stage in ("headers", "between"):
            yield Case(
                name=f"silent at {stage}{way}",
                kind=SILENCE,
                engines=(FAKE_SERVER,),
                body=more,
                fault=f"silence/{stage}",
                expect=SILENT,
                seconds=8,
            )
        for answer in ("reset/request", "silence/request", "status/503/loading"):
            yield Case(
                name=f"silent before headers, /health {answer}{way}",
                kind=SILENCE,
                body=more,
                engines=(FAKE_SERVER,),
                fault="silence/request",
                calls={"/health": answer},
                expect=frozenset({502, 503, 504}),
                seconds=13,
                short=answer == "reset/request" and not way,
            )
    yield Case(
        name="koboldcpp idle and silent",
        kind=SILENCE,
        engines=(FAKE_KOBOLD,),
        beside=False,
        fault="silence/headers",
        expect=frozenset({502, 504}),
        seconds=25,
    )


def _queue() -> Iterator[Case]:
    served = RIGHT | {429}
    yield Case(
        name="2,000 requests at once",
        kind=QUEUE,
        engines=FAKES,
        body={"max_tokens": 16},
        act=floods(2000),
        expect=served,
        seconds=60,
        beside=False,
        memory=256,
    )
    yield Case(
        name="2,000 slow requests at once",
        kind=QUEUE,
        engines=(FAKE_SERVER,),
        seconds=60,
        body={"prompt": "count:3 slow:100"},
        act=floods(2000),
        expect=served,
        beside=False,
        memory=256,
    )
    yield Case(
        name="500 requests at once",
        kind=QUEUE,
        engines=(REAL, INSIDE),
        seconds=60,
        beside=False,
        body={"prompt": STORY, "max_tokens": 2},
        act=floods(500),
        expect=served,
        memory=128,
    )
    for count in (300, 64, 65):
        yield Case(
            name=f"{count} prompts in one request",
            kind=QUEUE,
            seconds=60,
            short=count == 300,
            body={"prompt": ["echo:a"] * count, "max_tokens": 2},
            beside=False,
            check=partial(_choices, count),
        )
    yield Case(
        name="300 prompts streamed",
        kind=QUEUE,
        seconds=60,
        beside=False,
        body={"prompt": ["echo:a"] * 300, "max_tokens": 2, "stream": True},
    )


def _choices(count: int, reply: Reply) -> list[str]:
    found = len(reply.json()["choices"])
    return [] if found == count else [f"{found} choices for {count} prompts"]


CASES = [
    *_models(),
    *_pressure(),
    *_leaving(),
    *_pipelines(),
    *_silence(),
    *_queue(),
]
