"""Cases of slow readers, disconnects, the queue, silent clients and engines, and other models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from chaos.acts import another_model, floods, leaves, pipelines, reads_nothing, stays_silent
from chaos.case import (
    ALL,
    CHAT,
    FAKE_KOBOLD,
    FAKE_SERVER,
    FAKES,
    INSIDE,
    PLAIN_AND_STREAMED,
    REAL,
    RIGHT,
    SILENT,
    Case,
)
from chaos.client import Reply

MODEL, PRESSURE, LEAVING, SILENCE, QUEUE = (
    "6 another model", "8 backpressure", "9 the client left", "10 silence", "queue",
)  # fmt: skip
REALS = (REAL, INSIDE)
SERVED = RIGHT | {429}
STORY = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
# Completions that are still running when the client leaves, of real and of fake engines.
TALE: dict[str, Any] = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True}
SLOW: dict[str, Any] = {"prompt": "endless slow:5", "max_tokens": 4000}


def _models() -> Iterator[Case]:
    for what in ("name", "template", "vocabulary", "context", "all"):
        for closes in (True, False):
            how = "after a restart" if closes else "while connections stay open"
            yield Case(
                name=f"another {what} {how}", kind=MODEL, act=another_model(what, closes),
                # Each response of koboldcpp has its own connection.
                engines=FAKES if closes else (FAKE_SERVER,),
                beside=False, short=closes and what != "all",
            )  # fmt: skip


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
    bodies = {name: {**endless, **fields} for name, fields in more.items()}
    large = {"prompt": "FAULT:large-text count:2000", "stream": True, "max_tokens": 4000}
    bodies["large events, n 8"] = {**large, "n": 8}
    bodies["large events, 8 prompts"] = {**large, "prompt": [large["prompt"]] * 8}
    for name, body in bodies.items():
        yield Case(
            name=f"reads nothing of {name}", kind=PRESSURE, engines=(FAKE_SERVER,), body=body,
            act=reads_nothing(3 if "large" in name else 2), short=name.endswith("n 8"),
        )  # fmt: skip
    yield Case(
        name="reads nothing of one choice", kind=PRESSURE, engines=(FAKE_KOBOLD,), body=endless,
        act=reads_nothing(), beside=False,
    )  # fmt: skip
    yield Case(
        name="300 requests leave few idle connections", kind=PRESSURE, engines=FAKES,
        body={"max_tokens": 16}, act=floods(300), expect=SERVED, seconds=30, short=True,
    )  # fmt: skip


def _left(name: str, engines: tuple[str, ...] = ALL, **fields: Any) -> Case:
    common = {"beside": False, "expect": RIGHT}
    return Case(name=f"left {name}", kind=LEAVING, engines=engines, **{**common, **fields})


def _left_in_answers() -> Iterator[Case]:
    for way, more in ("", {}), (" a stream", {"stream": True}):
        for after in (0.0, 0.01, 0.03, 0.3):
            for twice in (False, True):
                name = f"after {after:g} s{way}" + " with a second request" * twice
                act, late = leaves(after, twice=twice), after == 0.3
                yield _left(name, FAKES, body={**SLOW, **more}, act=act, short=late)
                short = late and not way
                yield _left(name, REALS, body={**TALE, **more}, act=act, short=short)
    slow, tale = {**SLOW, "stream": True}, {**TALE, "stream": True}
    yield _left("in a stream", FAKES, body=slow, act=leaves(begun=True))
    yield _left("in a stream", REALS, body=tale, act=leaves(begun=True))
    act = leaves(begun=True, twice=True)
    yield _left("in a stream with a second request", FAKES, body=slow, act=act)
    several: dict[str, dict[str, Any]] = {
        "n 8": {"n": 8},
        "8 prompts": {"prompt": [SLOW["prompt"]] * 8},
        "best_of": {"best_of": 4},
    }
    for name, fields in several.items():
        yield _left(name, (FAKE_SERVER,), body={**SLOW, **fields}, act=leaves(0.2))


def _left_in_requests() -> Iterator[Case]:
    for share in (0.0, 0.1, 0.5, 0.99):
        act = leaves(0.05, share=share)
        yield _left(f"with {share:.0%} of the request sent", act=act)
        yield _left(
            f"with {share:.0%} of 8 MB sent", (FAKE_SERVER, INSIDE), act=act, memory=200,
            body=lambda: {"prompt": "word " * 1_600_000},
        )  # fmt: skip
    yield _left("half a request and silence", act=stays_silent, beside=True)


def _left_in_silence() -> Iterator[Case]:
    chat = {"messages": [{"role": "user", "content": "MARKED"}]}
    for stage in ("request", "headers", "between"):
        fault = f"silence/{stage}"
        for call in ("", "/tokenize", "/props"):
            where: dict[str, Any] = {"body": {}, "fault": fault}
            if call:
                where = {"body": chat, "calls": {call: fault}, "path": CHAT}
            name = f"while {call or 'the answer'} is silent at {stage}"
            short = stage == "request"
            yield _left(name, (FAKE_SERVER,), act=leaves(0.2), short=short, **where)
            name += ", with a second request"
            yield _left(name, (FAKE_SERVER,), act=leaves(0.2, twice=True), **where)
    for stage in ("request", "headers"):
        name = f"while the answer is silent at {stage}"
        yield _left(name, (FAKE_KOBOLD,), fault=f"silence/{stage}", act=leaves(0.2))


_CHOICES = {"oneOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(400)]}
_RULES = "".join(f"r{i} ::= r{i + 1} | [a-z] r{i + 1}\n" for i in range(3000))
LARGE: dict[str, Any] = {
    "a long prompt": {"prompt": "word " * 1_000_000},
    "ids": {"prompt": [5] * 1_000_000},
    "a large schema": {"prompt": "a", "json_schema": _CHOICES},
    "a large regex": {"prompt": "a", "regex": "([a-z]{1,100}[0-9]{1,100}){1,100}"},
    "a large grammar": {"prompt": "a", "grammar": f'root ::= r0\n{_RULES}r3000 ::= "a"'},
    "a scored prompt": {"prompt": "word " * 300, "echo": True, "logprobs": 5, "max_tokens": 0},
}


def _left_in_work() -> Iterator[Case]:
    for name, body in LARGE.items():
        for after in (0.02, 0.2):
            title = f"while {name} is worked on, after {after:g} s"
            engines = (FAKE_SERVER, *REALS)
            yield _left(title, engines, body=body, act=leaves(after), memory=300)
    conversation = {"messages": [{"role": "user", "content": "word " * 40}] * 5000}
    yield _left(
        "while a long conversation is rendered", (FAKE_SERVER, INSIDE), act=leaves(0.1),
        memory=300, body=conversation, path=CHAT,
    )  # fmt: skip
    yield _left("while 1,000 others do", FAKES, act=floods(500, ends=False), body=SLOW)
    act = floods(100, ends=False)
    yield _left("while 100 others do", REALS, act=act, body=TALE, memory=128)


def _pipelines() -> Iterator[Case]:
    for way, more in PLAIN_AND_STREAMED.items():
        yield Case(
            name=f"two requests in a pipeline{way}", kind=LEAVING, body={"max_tokens": 16, **more},
            act=pipelines, short=not way,
        )  # fmt: skip


def _silence() -> Iterator[Case]:
    for way, body in PLAIN_AND_STREAMED.items():
        for stage in ("headers", "between"):
            yield Case(
                name=f"silent at {stage}{way}", kind=SILENCE, engines=(FAKE_SERVER,), body=body,
                fault=f"silence/{stage}", expect=SILENT, seconds=8,
            )  # fmt: skip
        for answer in ("reset/request", "silence/request", "status/503/loading"):
            yield Case(
                name=f"silent before headers, /health {answer}{way}", kind=SILENCE, body=body,
                engines=(FAKE_SERVER,), fault="silence/request", calls={"/health": answer},
                expect=SILENT | {502}, seconds=13, short=answer == "reset/request" and not way,
            )  # fmt: skip
    yield Case(
        name="koboldcpp idle and silent", kind=SILENCE, engines=(FAKE_KOBOLD,), beside=False,
        fault="silence/headers", expect=frozenset({502, 504}), seconds=25,
    )  # fmt: skip


def _queue() -> Iterator[Case]:
    def case(name: str, body: Any, engines: tuple[str, ...] = ALL, **fields: Any) -> Case:
        common: dict[str, Any] = {"kind": QUEUE, "seconds": 60, "beside": False}
        return Case(name=name, body=body, engines=engines, **common, **fields)

    flood = {"act": floods(2000), "expect": SERVED, "memory": 256}
    yield case("2,000 requests at once", {"max_tokens": 16}, FAKES, **flood)
    slow = {"prompt": "count:3 slow:100"}
    yield case("2,000 slow requests at once", slow, (FAKE_SERVER,), **flood)
    flood = {"act": floods(500), "expect": SERVED, "memory": 128}
    yield case("500 requests at once", {"prompt": STORY, "max_tokens": 2}, REALS, **flood)
    for count in (300, 64, 65):
        body = {"prompt": ["echo:a"] * count, "max_tokens": 2}
        check = partial(_has_choices, count)
        yield case(f"{count} prompts in one request", body, check=check, short=count == 300)
    body = {"prompt": ["echo:a"] * 300, "max_tokens": 2, "stream": True}
    yield case("300 prompts streamed", body)


def _has_choices(count: int, reply: Reply) -> list[str]:
    found = len(reply.json()["choices"])
    return [] if found == count else [f"{found} choices for {count} prompts"]


CASES = [
    *_models(),
    *_pressure(),
    *_left_in_answers(),
    *_left_in_requests(),
    *_left_in_silence(),
    *_left_in_work(),
    *_pipelines(),
    *_silence(),
    *_queue(),
]
