"""Count the Python calls of a request, which no other work on the machine disturbs; or time it.

    python tests/benchmarks/calls.py [--instructions] [--before DIR] [--list NAME]
    python tests/benchmarks/calls.py --time [--before DIR] [--turns N]

The ASGI app runs in this process without sockets, and may push the tokens of a stream to the server
at once, as in `latimer serve`: over a backend that yields prepared batches, and
over `LlamaServer`, whose connections are replaced by a transport in memory, alone and in a pool.
`observed` has metrics, a request log, and spans without an SDK, which are off elsewhere. What they
do after a request is part of its number, as if it were the only one, and of its time, as for one of
many. `traced` has spans and metrics of an SDK alone, with an exporter that drops them; it is timed
only.
The translator of `proxy.py` runs in the same way. A call is the start or the resumption of a Python
function; those of this file, of the event loop and of uvicorn do not count. The number of a kind of
request is the smallest of several.

`--instructions` counts the bytecode instructions of these functions instead. Their number is closer
to the CPU time of a request, most of whose code runs once.

`--time` has the CPU time of this process instead, on uvloop and with the garbage collector as in
`latimer serve`. Blocks of requests to Latimer and to the translator alternate in one event loop, so
that other work affects both. The time is the 2nd percentile of the blocks of a turn, which other
work disturbs less than the median. Both contain the same small engine in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import HERE, package_of
from benchmarks.fake_engine import FakeEngine
from benchmarks.load import LAST_FRAMES
from benchmarks.translate import Translator
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.observers import MOST_UNSEEN, Observer
from latimer.adapter.request_log import RequestLog, Writer
from latimer.backends.base import Batch, Capabilities, Finish, Generation, Model, Piece
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.llama_server import LlamaServer

ROUNDS = 12
# The tokens of a plain response, and of the two streams whose difference is the cost of a token.
TOKENS, SHORT, LONG = 8, 8, 40
# The requests of a block, and the blocks of each kind and app in a turn.
REQUESTS, BLOCKS = 5, 200
# The event loop, which has no Python code if it is uvloop, and what this file calls.
UNCOUNTED = (
    __file__, "/fake_engine.py", "/base_events.py", "/events.py", "/selector_events.py",
    "/selectors.py", "/_weakrefset.py", "/json/__init__.py", "/json/decoder.py", "/json/encoder.py",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Where the request log is written.
NULL = Writer(os.open(os.devnull, os.O_WRONLY))
# Neither a store nor observers of requests.
BARE: Any = {"store": "off", "metrics": False}

T = TypeVar("T")
App = Callable[[Any, Any, Any], Awaitable[None]]


class Prepared:
    """A backend that yields prepared tokens.

    Args:
        burst: yield all tokens in one batch, instead of each in its own.
    """

    capabilities = Capabilities("prepared", frozenset())

    def __init__(self, burst: bool) -> None:
        self._burst = burst

    async def model(self) -> Model:
        """Return a model with a chat template."""
        return _MODEL

    def known_model(self) -> Model:
        """Return the same: nobody has to ask for it."""
        return _MODEL

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Yield as many tokens as the job allows."""
        pieces = [_PIECE] * (job.max_tokens or TOKENS)
        prepared: list[Batch] = [[*pieces, _FINISH]] if self._burst else [[one] for one in pieces]

        async def batches() -> AsyncIterator[Batch]:
            for batch in prepared:
                yield batch
            if not self._burst:
                yield [_FINISH]

        yield batches()

    async def embedding_model(self) -> None:
        """Return None, because it has no embeddings."""

    async def speaker(self) -> None:
        """Return None, because it does not speak."""

    async def specials(self) -> tuple[()]:
        """Return no control tokens."""
        return ()

    async def health(self) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing."""


_MODEL = Model("m", 8192, TEMPLATE, "", "", False, "prepared-1", 0)
_PIECE = Piece(0, b" word")
_FINISH = Finish(0, "length", None, 12, TOKENS)


class Engine(FakeEngine):
    """A llama-server that sends the number of tokens that a request asks for."""

    def __init__(self, burst: bool) -> None:
        super().__init__()
        self._burst = burst

    def _send(self, parts: list[bytes], body: bytes) -> None:
        if self._burst:
            self._transport.write(b"".join(parts))
        else:
            # The head arrives with the first token.
            self._next([parts[0] + parts[1], *parts[2:]])

    def _next(self, parts: list[bytes]) -> None:
        """Send one part in each turn of the event loop."""
        self._transport.write(parts[0])
        if parts[1:]:
            asyncio.get_running_loop().call_soon(self._next, parts[1:])


class Wire(asyncio.Transport):
    """One end of a connection in memory."""

    def __init__(self, peer: asyncio.Protocol) -> None:
        super().__init__()
        self._peer = peer
        self._is_closed = False

    def write(self, data: Any) -> None:
        """Deliver data in the next turn of the event loop."""
        if not self._is_closed:
            asyncio.get_running_loop().call_soon(self._peer.data_received, bytes(data))

    def is_closing(self) -> bool:
        """Return True after the end."""
        return self._is_closed

    def abort(self) -> None:
        """End this side of the connection."""
        self._is_closed = True

    close = abort

    def pause_reading(self) -> None:
        """Do nothing, because responses are small."""

    def resume_reading(self) -> None:
        """Do nothing."""


async def connect(
    burst: bool, factory: Callable[[], asyncio.Protocol], *_: Any, **__: Any
) -> tuple[Wire, asyncio.Protocol]:
    """Connect a protocol with a new engine, in place of an event loop's `create_connection`."""
    protocol, engine = factory(), Engine(burst)
    wire = Wire(engine)
    engine.connection_made(Wire(protocol))
    protocol.connection_made(wire)
    return wire, protocol


def run(base: type[asyncio.AbstractEventLoop], burst: bool, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop whose outgoing connections lead to an engine in memory."""
    loop = type("Loop", (base,), {"create_connection": staticmethod(partial(connect, burst))})()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def scope_of(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """Return what the scopes of requests and of WebSockets have in common."""
    return {
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1:8000"),
            (b"accept", b"application/json"),
            (b"user-agent", b"OpenAI/Python 3.54.0"),
            (b"authorization", b"Bearer unused"),
            *headers,
        ],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8000),
    }


async def request(app: App, path: str, data: bytes) -> None:
    """Send a request, and check that it succeeds."""
    kind, length = (b"content-type", b"application/json"), str(len(data)).encode()
    scope = scope_of(path, kind, (b"content-length", length))
    scope |= {"type": "http", "method": "POST", "scheme": "http", "extensions": {PUSH: {}}}
    waiting = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200, message
        message[PUSH] = take

    await app(scope, receive, send)


def take(_body: bytes) -> bool:
    """Take a part of a body at once, for a client that reads fast."""
    return True


class Socket:
    """A WebSocket in memory, whose client waits for the last event of each response.

    It takes several texts in one message, as that of `latimer serve` does.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Any] = [{"type": "websocket.connect"}]
        self._arrived = self._ended = self._loop.create_future()

    async def receive(self) -> Any:
        """Return the next message of the client."""
        if not self._waiting:
            self._arrived = self._loop.create_future()
            await self._arrived
        return self._waiting.pop(0)

    async def send(self, message: Any) -> None:
        """Receive a message of the app."""
        # An earlier checkout sends one text in each message.
        data = message.get(FRAMES) or message.get("text", "").encode()
        message[PUSH] = take
        assert b'{"type":"error"' not in data, data
        if any(last in data for last in LAST_FRAMES):
            self._ended.set_result(None)

    def tell(self, message: Any) -> None:
        """Let the app have a message."""
        self._waiting.append(message)
        if not self._arrived.done():
            self._arrived.set_result(None)

    async def ask(self, frame: str) -> None:
        """Send a frame, and wait for the end of its response and of what the app does then."""
        self._ended = self._loop.create_future()
        self.tell({"type": "websocket.receive", "text": frame})
        await self._ended
        for _ in range(3):
            later = self._loop.create_future()
            self._loop.call_soon(later.set_result, None)
            await later


class Profile:
    """The calls in a block, or its bytecode instructions, by the code of the function."""

    counts_instructions = False

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()

    def __enter__(self) -> Profile:
        if self.counts_instructions:
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _trace(self, frame: FrameType, what: str, _argument: Any) -> Any:
        if what == "opcode":
            self.calls[frame.f_code] += 1
        elif what == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _note(self, frame: FrameType, what: str, _argument: Any) -> None:
        if what == "call":
            self.calls[frame.f_code] += 1

    def counted(self) -> Counter[str]:
        """Return the calls that count, by the function's file, line and name."""
        found: Counter[str] = Counter()
        for code, count in self.calls.items():
            if not code.co_filename.endswith(UNCOUNTED):
                file = "/".join(Path(code.co_filename).parts[-3:])
                found[f"{file}:{code.co_firstlineno} {code.co_qualname}"] += count
        return found


async def fewest(app: App, path: str, body: bytes) -> Counter[str]:
    """Return the calls of a request: of several equal ones, those of the one with the fewest."""
    found: list[Counter[str]] = []
    for number in range(ROUNDS):
        with Profile() as profile:
            await request(app, path, body)
            _observe(app)
        # The first requests fill caches.
        if number > 2:
            found.append(profile.counted())
    return min(found, key=Counter.total)


@asynccontextmanager
async def connected(app: App) -> AsyncIterator[Socket]:
    """Open a WebSocket of responses."""
    socket = Socket()
    scope = {**scope_of(RESPONSES), "type": "websocket", "scheme": "ws", "subprotocols": []}
    scope["extensions"] = {FRAMES: {}, PUSH: {}}
    task = asyncio.ensure_future(app(scope, socket.receive, socket.send))
    yield socket
    socket.tell({"type": "websocket.disconnect", "code": 1000})
    await task


async def responses(app: App, tokens: int) -> tuple[Counter[str], Counter[str]]:
    """Return the calls of a streamed response by POST, and by a frame of a WebSocket."""
    body = {"model": "m", "max_output_tokens": tokens, "temperature": 0, "input": "Hello"}
    posted = await fewest(app, RESPONSES, json.dumps({**body, "stream": True}).encode())
    frame = json.dumps({"type": "response.create", **body})
    found: list[Counter[str]] = []
    async with connected(app) as socket:
        for number in range(ROUNDS):
            with Profile() as profile:
                await socket.ask(frame)
            if number > 2:
                found.append(profile.counted())
    return posted, min(found, key=Counter.total)


def body_of(path: str, tokens: int, stream: bool) -> bytes:
    """Return the body of a request."""
    body: dict[str, Any] = {"model": "m", "max_tokens": tokens, "temperature": 0}
    if not path.endswith("/completions") or path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello"
    return json.dumps({**body, "stream": True} if stream else body).encode()


PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# What is counted for an app without an engine only, as a stream.
RESPONSES = "/v1/responses"
STREAMED = ("streamed response", "response over a WebSocket")
# The message of a server that takes frames, and the extension of one that takes a part of a body
# without a message.
FRAMES, PUSH = "latimer.frames", "latimer.push"
# The apps whose messages are counted, too.
MESSAGES = {"messages": "/v1/messages"}
WITH_MESSAGES = ("", "over llama-server: ")


def prepared(burst: bool) -> App:
    """Return Latimer over a backend that yields prepared batches."""
    return OpenAIAdapter(Prepared(burst), any_model=True, **BARE)  # type: ignore[arg-type]


def over_llama_server(_burst: bool) -> App:
    """Return Latimer over llama-server."""
    return OpenAIAdapter(LlamaServer("http://127.0.0.1:9"), any_model=True, **BARE)


def observed(_burst: bool) -> App:
    """Return Latimer over llama-server, with metrics, spans without an SDK, and a request log."""
    options: Any = {**BARE, "metrics": True, "observers": [RequestLog(NULL.write), *_spans()]}
    return OpenAIAdapter(LlamaServer("http://127.0.0.1:9"), any_model=True, **options)


def traced(_burst: bool) -> App:
    """Return Latimer over llama-server, with spans and metrics of an SDK."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    class Dropping(SpanExporter):
        def export(self, spans: Any) -> Any:
            """Do nothing."""

    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(Dropping()))
    spans = _spans(tracers, MeterProvider([InMemoryMetricReader()]))
    return OpenAIAdapter(LlamaServer("http://127.0.0.1:9"), any_model=True, observers=spans, **BARE)


def _spans(*providers: Any) -> list[Observer]:
    """Return what makes spans; an earlier checkout has no such thing."""
    try:
        from latimer.adapter.traces import Traces
    except ModuleNotFoundError:
        return []
    return [Traces(*providers)]


def over_pool(count: int, **options: Any) -> App:
    """Return Latimer over a model of some llama-servers."""
    engines = [LlamaServer(f"http://127.0.0.{index}:9") for index in range(1, count + 1)]
    pool = Pool("m", [Replica(f"e{index}", engine) for index, engine in enumerate(engines)])
    app = OpenAIAdapter([ModelEntry(pool, ("m",))], **{**BARE, **options})

    async def release() -> None:
        for engine in engines:
            await engine.aclose()

    app.service.release = release
    return app


def over_one(_burst: bool) -> App:
    """Return Latimer over a model of one llama-server."""
    return over_pool(1)


def over_four(_burst: bool) -> App:
    """Return Latimer over a model of four llama-servers, for a key with limits."""
    limits = {"requests_per_minute": 2**30, "tokens_per_minute": 2**30, "concurrent": 2**20}
    return over_pool(4, keys={"team": {"digest": digest_of("unused"), **limits}})


def translator(_burst: bool) -> App:
    """Return the translator that `proxy.py` compares Latimer with."""
    return Translator(9)


# The apps of Latimer, by the start of the names of their numbers; and those that are timed.
APPS = {
    "": prepared,
    "over llama-server: ": over_llama_server,
    "observed, over llama-server: ": observed,
    "over a pool of one: ": over_one,
    "over a pool of four, with limits: ": over_four,
}
TIMED = {
    "over llama-server: ": over_llama_server,
    "observed, over llama-server: ": observed,
    "traced, over llama-server: ": traced,
    "py-translate: ": translator,
}


class Kind(NamedTuple):
    """A kind of measurement: a request, or a token, the difference of two answers.

    Args:
        end: the end of its name, after the name of the path.
        burst: all tokens of an answer arrive at once.
    """

    end: str
    burst: bool
    stream: bool = False
    is_token: bool = False

    def bodies(self, path: str) -> list[bytes]:
        """Return the body of the request, or those of the short and of the long one."""
        counts = (SHORT, LONG) if self.is_token else (TOKENS,)
        return [body_of(path, count, self.stream) for count in counts]


KINDS = (
    Kind("", True),
    Kind(", token in a burst", True, True, True),
    Kind(", token", False, True, True),
    Kind(", token of a plain response", False, False, True),
)


def measure(apps: Mapping[str, Callable[[bool], App]] = APPS) -> dict[str, Counter[str]]:
    """Return the calls of each kind of request, and those of all tokens beyond a short answer."""
    found: dict[str, Counter[str]] = {}

    async def count(place: str, burst: bool) -> None:
        app = apps[place](burst)
        paths = PATHS
        # An earlier checkout has no messages.
        if place in WITH_MESSAGES and any(
            getattr(route, "path", "") in MESSAGES.values() for route in getattr(app, "routes", ())
        ):
            paths = {**PATHS, **MESSAGES}
        for name, path in paths.items():
            for kind in KINDS:
                if kind.burst is burst:
                    *short, calls = [await fewest(app, path, body) for body in kind.bodies(path)]
                    for one in short:
                        # This keeps negative counts, of functions that only the short one calls.
                        calls.subtract(one)
                    found[place + name + kind.end] = calls
        if not place and isinstance(app, OpenAIAdapter):
            both = zip(await responses(app, SHORT), await responses(app, LONG), strict=True)
            for name, (few, many) in zip(STREAMED, both, strict=True):
                if burst:
                    found[name] = few.copy()
                many.subtract(few)
                found[f"{name}, token" + " in a burst" * burst] = many
        await _close(app)

    for place in apps:
        for burst in (True, False):
            run(asyncio.SelectorEventLoop, burst, count(place, burst))
    return found


async def block(app: App, path: str, data: bytes) -> float:
    """Return the CPU time of a request, in microseconds."""
    before = time.process_time_ns()
    for _ in range(REQUESTS):
        await request(app, path, data)
    return (time.process_time_ns() - before) / 1e3 / REQUESTS


async def after(app: App, path: str, data: bytes) -> float:
    """Return the CPU time of a request's observers, which take many requests together."""
    if not isinstance(app, OpenAIAdapter) or not app._service.observers.all:
        return 0.0
    _observe(app)
    for _ in range(MOST_UNSEEN - 1):
        await request(app, path, data)
    before = time.process_time_ns()
    _observe(app)
    # The thread that writes the log.
    while NULL.waiting:
        time.sleep(0.001)  # noqa: ASYNC251
    return (time.process_time_ns() - before) / 1e3 / (MOST_UNSEEN - 1)


def turn() -> dict[str, float]:
    """Return the CPU time of each kind of request and token, in microseconds."""
    import uvloop

    found: dict[str, float] = {}

    async def clock(burst: bool) -> None:
        apps = {place: make(burst) for place, make in TIMED.items()}
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 4, 1_000)
        for name, path in PATHS.items():
            for kind in KINDS:
                if kind.burst is burst:
                    found.update(await _timed(apps, name + kind.end, path, kind))
        for app in apps.values():
            await _close(app)

    for burst in (True, False):
        run(uvloop.Loop, burst, clock(burst))
    return found


async def _timed(apps: Mapping[str, App], name: str, path: str, kind: Kind) -> dict[str, float]:
    bodies = kind.bodies(path)
    times: dict[tuple[str, bytes], list[float]] = {}
    for number in range(BLOCKS + 1):
        for place, app in apps.items():
            for body in bodies:
                one = await block(app, path, body)
                # The first requests fill caches.
                if number:
                    times.setdefault((place, body), []).append(one)
    for place, app in apps.items():
        for body in bodies:
            # A timer takes them too early at times, which leaves few.
            most = sorted([await after(app, path, body) for _ in range(9)])
            times[place, body] = [one + most[4] for one in times[place, body]]
    least = {key: sorted(found)[BLOCKS // 50] for key, found in times.items()}
    if not kind.is_token:
        return {place + name: least[place, bodies[0]] for place in apps}
    short, long = bodies
    return {
        place + name: (least[place, long] - least[place, short]) / (LONG - SHORT) for place in apps
    }


def _observe(app: App) -> None:
    """Let observers take the requests that have ended."""
    if isinstance(app, OpenAIAdapter) and app._service.observers.all:
        app._service.observers.flush()
        for one in app._service.observers.all:
            # Spans take several turns of the event loop. An earlier checkout has none.
            if getattr(one, "follows", False):
                one.close()


async def _close(app: App) -> None:
    if isinstance(app, OpenAIAdapter):
        await app.aclose()


def numbers(found: Mapping[str, Counter[str]]) -> dict[str, int]:
    """Return the number of calls for each kind of request, and for one token of each stream."""
    # A timer that runs during a long stream adds a few calls in all.
    return {
        name: round(calls.total() / (LONG - SHORT)) if "token" in name else calls.total()
        for name, calls in found.items()
    }


def listed(calls: Counter[str]) -> str:
    """Return a line for each function: the number of its calls, its place and its name."""
    return "".join(f"{count:4} {name}\n" for name, count in calls.most_common() if count)


def in_checkout(tree: Path, *words: str) -> dict[str, float]:
    """Return the numbers of another checkout, measured in a process of its own."""
    command = [sys.executable, __file__, "--json", *words]
    with package_of(tree) as environment:
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(output.stdout)
    return found


def print_times(turns: int, before: Path | None) -> None:
    """Time this checkout and another one in turns, and print a table."""
    trees = {"now": HERE} if before is None else {"before": before, "now": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(turns):
        for name, tree in trees.items():
            found[name].append(in_checkout(tree, "--time"))
    *places, peer = TIMED
    for kind in found["now"][0]:
        for place in places:
            if not kind.startswith(place):
                continue
            own = peer + kind.removeprefix(place)
            for name, all_turns in found.items():
                times = [one[kind] for one in all_turns]
                ratios = [one[kind] / one[own] for one in all_turns]
                sys.stdout.write(
                    f"{kind:56} {name:6} {statistics.median(times):7.2f} us "
                    f"({min(times):.2f} to {max(times):.2f}); py-translate "
                    f"{statistics.median([one[own] for one in all_turns]):6.2f}; ratio "
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})\n"
                )


def main() -> None:
    """Count or time, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--before", type=Path, help="another checkout, to compare with")
    options.add_argument("--list", metavar="NAME", help="list the calls of one kind of request")
    options.add_argument("--time", action="store_true", help="measure CPU time instead of calls")
    options.add_argument("--instructions", action="store_true", help="count bytecode instructions")
    options.add_argument("--turns", type=int, default=7, help="turns of --time")
    options.add_argument("--json", action="store_true", help="print JSON, of one turn")
    arguments = options.parse_args()
    if arguments.time:
        if arguments.json:
            sys.stdout.write(json.dumps(turn()))
        else:
            print_times(arguments.turns, arguments.before)
        return
    Profile.counts_instructions = arguments.instructions
    found = measure({**APPS, "py-translate: ": translator})
    now = numbers(found)
    if arguments.json:
        sys.stdout.write(json.dumps(now))
    elif arguments.list:
        sys.stdout.write(listed(found[arguments.list]))
    else:
        words = ["--instructions"] if arguments.instructions else []
        before = in_checkout(arguments.before, *words) if arguments.before else {}
        for name, count in now.items():
            line = f"{name:65} {count:6}"
            sys.stdout.write(
                f"{line}   before {before[name]:6}\n" if name in before else f"{line}\n"
            )


if __name__ == "__main__":
    main()
