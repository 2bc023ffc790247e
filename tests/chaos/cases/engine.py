"""Cases of engines that are broken, malformed, unreachable, loading or silent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.engines.mistakes import BODIES, STAGES, VALUES

from chaos.acts import after_restart, unreachable
from chaos.case import (
    BROKEN,
    CHAT,
    FAKE_KOBOLD,
    FAKE_SERVER,
    FAKES,
    GONE,
    MAYBE,
    PLAIN_AND_STREAMED,
    RIGHT,
    SILENT,
    Case,
)
from chaos.client import Reply

FAULT = "7 engine's fault"
WAYS: dict[str, dict[str, Any]] = {**PLAIN_AND_STREAMED, " with logprobs": {"logprobs": 2}}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "MARKED"}]}


def _case(name: str, fault: str, expect: frozenset[int] = BROKEN, **fields: Any) -> Iterator[Case]:
    """Yield a fault for plain and streamed requests, or for those in `ways`."""
    engines = fields.pop("engines", FAKES)
    ways = fields.pop("ways", ("", " streamed"))
    for way in ways:
        yield Case(
            name=name + way, kind=FAULT, engines=engines, fault=fault, expect=expect,
            body=WAYS[way], **fields,
        )  # fmt: skip


def _wire() -> Iterator[Case]:
    for stage in STAGES:
        short = stage in ("headers", "between")
        # A valid stream of koboldcpp can lack its last event.
        yield from _case(f"reset at {stage}", f"reset/{stage}", GONE, short=short)
        expect = MAYBE if stage == "last" else GONE
        yield from _case(f"closed at {stage}", f"close/{stage}", expect, short=stage == "event")
    yield from _case("closed without the end of the framing", "close/end", MAYBE)
    for what in ("garbage", "huge", "negative", "short", "line", "extension"):
        yield from _case(f"chunk {what}", f"chunk/{what}", GONE, short=what == "garbage")
    for what in ("long", "huge"):
        yield from _case(f"length {what}", f"length/{what}", MAYBE)
    for what in (
        "no-http", "binary", "http2", "http09", "no-colon", "nul", "version", "status-zero",
        "status-999", "status-long", "gzip", "redirect",
    ):  # fmt: skip
        yield from _case(what, what, short=what in ("no-http", "redirect"))
    yield from _case("drip", "drip", RIGHT, short=True)
    for what in ("lines", "line", "names", "status"):
        yield from _case(f"head of {what} without end", f"head/{what}", short=what == "lines")
    for what in ("large-event", "no-line", "data-lines"):
        yield from _case(what, what, seconds=20, short=what == "no-line", ways=("",))
    for what in ("comments", "empty-events", "line-ends"):
        yield from _case(what, what, seconds=20, ways=(" streamed",))


def _status() -> Iterator[Case]:
    for body in BODIES:
        for status in ("500", "400"):
            expect = frozenset({400, 502, 503})
            yield from _case(f"{status} {body}", f"status/{status}/{body}", expect, ways=("",))
    busy = frozenset({502, 503, 429})
    for body in ("right", "empty", "html"):
        yield from _case(
            f"503 {body}", f"status/503/{body}", busy, ways=("",), engines=(FAKE_SERVER,)
        )
    # koboldcpp says so while requests of other clients fill its queue: the call is sent again for a
    # minute, and keeps its turn.
    yield from _case(
        "503 for a minute", "status/503/right", busy, ways=("",), engines=(FAKE_KOBOLD,),
        seconds=75, beside=False,
    )  # fmt: skip
    for status, expect in (
        ("429", frozenset({429, 502, 503})), ("404", BROKEN), ("401", GONE), ("403", GONE),
        ("501", BROKEN), ("418", BROKEN), ("301", BROKEN), ("202", BROKEN),
    ):  # fmt: skip
        for body in ("right", "empty", "html"):
            yield from _case(f"{status} {body}", f"status/{status}/{body}", expect, ways=("",))
    loading = frozenset({503})
    yield from _case("loading", "status/503/loading", loading, short=True, engines=(FAKE_SERVER,))
    yield from _case("error body of 150 MB", "status/500/large", seconds=20, short=True, ways=("",))


# Fields of events that Latimer reads.
EVENTS: dict[str, dict[str, tuple[str, ...]]] = {
    FAKE_SERVER: {
        "first": ("content", "tokens", "stop", "tokens_predicted", "tokens_evaluated", "index"),
        "last": ("stop", "stop_type", "tokens_predicted", "tokens_evaluated", "timings",
                 "timings.cache_n", "stopping_word"),
    },
    FAKE_KOBOLD: {"first": ("token", "finish_reason"), "last": ("token", "finish_reason")},
}  # fmt: skip
ENTRY = (
    "completion_probabilities", "completion_probabilities.0", "completion_probabilities.0.id",
    "completion_probabilities.0.logprob", "completion_probabilities.0.top_logprobs",
    "completion_probabilities.0.top_logprobs.0", "completion_probabilities.0.top_logprobs.0.id",
    "completion_probabilities.0.top_logprobs.0.logprob",
)  # fmt: skip
# Values that are valid there and give another text.
TEXTS = {"string", "text", "surrogate"}


def _fields() -> Iterator[Case]:
    for engine, events in EVENTS.items():
        for which, names in events.items():
            for name in names:
                for value in VALUES:
                    if name in ("content", "token") and value in TEXTS:
                        continue
                    yield from _case(
                        f"{name} of the {which} event {value}", f"set/{which}/{name}/{value}",
                        MAYBE, engines=(engine,), ways=("",),
                        short=(name, value) in (("tokens_predicted", "huge"), ("token", "null")),
                    )  # fmt: skip
                yield from _case(
                    f"the {which} event without {name}", f"drop/{which}/{name}", MAYBE,
                    engines=(engine,), ways=("",),
                )  # fmt: skip
    for name in ENTRY:
        for value in VALUES:
            yield from _case(
                f"{name} {value}", f"set/first/{name}/{value}", MAYBE, engines=(FAKE_SERVER,),
                ways=(" with logprobs",),
            )  # fmt: skip


def _events() -> Iterator[Case]:
    for what in (
        "half", "notjson", "null", "list", "number", "string", "empty", "object", "utf8", "nul",
        "twice", "deep", "error", "error-null", "error-list", "error-string", "bom",
    ):  # fmt: skip
        for which in ("first", "last"):
            yield from _case(
                f"the {which} event {what}", f"event/{which}/{what}", MAYBE,
                short=(which, what) in (("first", "utf8"), ("last", "null"), ("first", "half")),
            )  # fmt: skip
    # A stream of koboldcpp can end without its last event; Latimer then asks for the reason.
    yield from _case("no last event", "event/last/missing", engines=(FAKE_SERVER,), short=True)
    yield from _case("no last event", "event/last/missing", MAYBE, engines=(FAKE_KOBOLD,))
    yield from _case("the last event again", "event/last/again", MAYBE)
    name, fault = "an error event in the middle", "event/first/error"
    yield from _case(name, fault, engines=(FAKE_SERVER,), short=True)
    # Only streams of koboldcpp have events.
    yield from _case(name, fault, engines=(FAKE_KOBOLD,), ways=(" streamed",), short=True)


QUESTIONS = {
    FAKE_SERVER: ("/props", "/tokenize", "/slots", "/detokenize"),
    FAKE_KOBOLD: (
        "/api/extra/version", "/api/v1/model", "/api/extra/true_max_context_length", "/props",
        "/api/extra/tokencount", "/api/extra/perf", "/api/extra/last_logprobs",
        "/api/extra/detokenize",
    ),
}  # fmt: skip
ANSWERS = (
    "event/only/null", "event/only/list", "event/only/object", "event/only/notjson",
    "event/only/number", "event/only/deep", "status/500/html", "status/404/empty", "reset/request",
    "reset/event", "head/lines",
)  # fmt: skip
SHAPES = {
    "/props": (
        "default_generation_settings", "default_generation_settings.n_ctx", "model_path",
        "model_alias", "chat_template", "bos_token", "total_slots", "build_info", "modalities",
        "media_marker",
    ),
    "/tokenize": ("tokens", "tokens.0"),
    "/api/extra/tokencount": ("ids", "ids.0", "value"),
    "/api/v1/model": ("result",),
    "/api/extra/true_max_context_length": ("value",),
    "/api/extra/version": ("result", "version", "vision"),
    "/api/extra/last_logprobs": (
        "logprobs", "logprobs.content", "logprobs.content.0", "logprobs.content.0.logprob",
        "logprobs.tokens", "logprobs.tokens.0",
    ),
}  # fmt: skip


def _questions() -> Iterator[Case]:
    """Yield faults of calls other than generations, after a restart that repeats all of them."""
    for engine, paths in QUESTIONS.items():
        for path in paths:

            def case(name: str, fault: str, **fields: Any) -> Case:
                return Case(
                    name=name, kind=FAULT, engines=(engine,), calls={path: fault},  # noqa: B023
                    act=after_restart, expect=RIGHT | GONE, beside=False, **fields,
                )  # fmt: skip

            for answer in ANSWERS:
                yield case(f"{path}: {answer}", answer, body={"logprobs": 1})
            where: dict[str, Any] = {"body": {"logprobs": 1, "parse_special": True}}
            if path == "/props":
                where = {"body": MESSAGES, "path": CHAT}
            elif path == "/tokenize":
                # Without log-probabilities no prompt needs to be tokenized.
                where = {"body": {**MESSAGES, "logprobs": True}, "path": CHAT}
            for name in SHAPES.get(path, ()) if engine == FAKE_SERVER or path != "/props" else ():
                for value in VALUES:
                    # Any text is a valid template.
                    if name != "chat_template" or value not in ("string", "text"):
                        yield case(f"{name} of {path} {value}", f"set/only/{name}/{value}", **where)


def _no_more(reply: Reply) -> list[str]:
    """Check that a completion has no more tokens than requested."""
    size = sum(map(len, reply.texts().values()))
    return [f"{size} tokens came, though 6 were asked for"] if size > 6 else []


def _gone() -> Iterator[Case]:
    for way, body in PLAIN_AND_STREAMED.items():
        yield Case(
            name=f"nobody listens{way}", kind=FAULT, engines=FAKES, body=body, act=unreachable,
            expect=frozenset({503}), beside=False, short=True,
        )  # fmt: skip
    yield Case(
        name="connections are reset when they are opened", kind=FAULT, engines=FAKES,
        calls={"accept": "reset"}, act=after_restart, expect=GONE, beside=False,
    )  # fmt: skip
    yield Case(name="the engine is back", kind=FAULT, engines=FAKES, act=after_restart, short=True)
    for stage in ("headers", "event", "between", "last"):
        yield from _case(
            f"silence at {stage}", f"silence/{stage}", SILENT, engines=(FAKE_SERVER,),
            seconds=8, short=stage == "between",
        )  # fmt: skip
    for way, body in PLAIN_AND_STREAMED.items():
        yield Case(
            name=f"more events than tokens were asked for{way}", kind=FAULT, engines=FAKES,
            body={**body, "prompt": "FAULT:many echo:abcdef", "max_tokens": 6}, expect=MAYBE,
            check=_no_more, short=not way,
        )  # fmt: skip


CASES = [*_wire(), *_status(), *_fields(), *_events(), *_questions(), *_gone()]
