"""The request log: one line for each request, at its end, as JSON or for people.

A line has no prompt, no answer and no key. Lines are written in a thread, so that a slow reader
does not delay requests.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import orjson
from typing_extensions import override

from ..schemas.openai.common import Request
from .dialects import TABLES
from .errors import in_log, printable
from .observers import Observer
from .record import OTHER, Record

Format: TypeAlias = Literal["text", "json"]
Level: TypeAlias = Literal["debug", "info", "warning", "error"]

# The bytes of lines that wait for a slow reader; more are dropped, and counted.
MOST_WAITING = 2**22
# Seconds between attempts to say that lines were lost, while no others are written.
_AGAIN = 5.0
# Seconds for the last lines at the end.
_LAST = 1.0
# The bytes that one call writes without those of others between them.
_ATOMIC = getattr(select, "PIPE_BUF", 512)
# The bytes of a line from which on it has no response, and those of lines that are written together
# if they have responses.
_MOST_SHOWN, _MOST_TOGETHER = MOST_WAITING // 2, MOST_WAITING // 4


class Writer:
    """A thread that writes lines to a file descriptor.

    Several processes can write to the same pipe or socket. There each write has whole lines only,
    and few bytes, so that no line begins inside another one.

    Lines that cannot be written, such as on a full disk, are lost. When writing works again, a line
    says how many.

    Args:
        form: that of the line about lost ones.
    """

    def __init__(self, descriptor: int = 2, form: Format = "json") -> None:
        self._descriptor = descriptor
        self._form: Format = form
        mode = os.fstat(descriptor).st_mode
        self._is_shared = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # The bytes that were given, and those that the thread has written.
        self._given = self._written = 0
        # The lines that could not be written, the reason, and if the last one is there in part.
        self._lost, self._reason, self._is_cut = 0, "", False
        self._thread = threading.Thread(target=self._run, name="latimer-log", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The bytes that are not written yet."""
        return self._given - self._written

    def write(self, data: bytes) -> bool:
        """Write lines soon; return False if they are dropped, because the reader is too slow."""
        if self._given - self._written + len(data) > MOST_WAITING:
            return False
        self._given += len(data)
        self._queue.put(data)
        return True

    def close(self) -> None:
        """Write what is left, unless that takes too long."""
        self._queue.put(None)
        self._thread.join(_LAST)

    def _run(self) -> None:
        while (data := self._next()) is not None:
            self._put(data)
            self._written += len(data)
        if self._lost:
            self._put(b"")

    def _next(self) -> bytes | None:
        """Return the next lines, or none of them if it is time to try again; None at the end."""
        try:
            return self._queue.get(timeout=_AGAIN if self._lost else None)
        except queue.Empty:
            return b""

    def _put(self, data: bytes) -> None:
        """Write lines, after one about those that were lost before."""
        lost, first = self._lost, b""
        if lost:
            first = b"\n" * self._is_cut + lost_line(lost, self._form, self._reason)
            data = first + data
        done = self._sent(data)
        if done:
            self._is_cut = data[done - 1 : done] != b"\n"
        self._lost = data.count(b"\n", max(done, len(first))) + (lost if done < len(first) else 0)

    def _sent(self, data: bytes) -> int:
        """Write lines; return how many bytes could be written."""
        done = 0
        try:
            for part in parts(data, _ATOMIC) if self._is_shared else (memoryview(data),):
                while part:
                    count = os.write(self._descriptor, part)
                    part = part[count:]
                    done += count
        except OSError as error:
            self._reason = f"the log could not be written: {error.strerror}"
        return done


def parts(data: bytes, size: int) -> Iterator[memoryview]:
    """Yield lines in parts of at most some bytes; a line that is longer is a part of its own."""
    view, start = memoryview(data), 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + size) + 1 or data.find(b"\n", start) + 1
        yield view[start : end or len(data)]
        start = end or len(data)


_LINE = orjson.OPT_APPEND_NEWLINE


def lost_line(count: int, form: Format, reason: str) -> bytes:
    """Return a line that says how many lines of requests were lost, and why."""
    what = "1 line of requests is" if count == 1 else f"{count} lines of requests are"
    text = f"{what} missing, because {reason}."
    if form == "json":
        text = json_line(text, "warning", "log_lost", {"lines": count})
    return f"{text}\n".encode()


def json_line(message: str, level: str, event: str, fields: Mapping[str, Any]) -> str:
    """Return a line of the log that is not about a request."""
    at = f"{datetime.now(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
    found = {"time": at, "level": level, "event": event, "message": message, **fields}
    try:
        return orjson.dumps(found).decode()
    except TypeError:
        # A path that is not UTF-8 has lone surrogates, which `json` escapes.
        return json.dumps(found)


class JsonFormatter(logging.Formatter):
    """A formatter of records as JSON; their `extra` can have an `event` and its `fields`.

    Args:
        worker: the number of the worker, from 1; None for any other process.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = {"logger": record.name, **getattr(record, "fields", {}), **self._worker}
        event = getattr(record, "event", "log")
        return json_line(super().format(record), record.levelname.lower(), event, fields)


class TextFormatter(logging.Formatter):
    """A formatter of records for people; text of a request does not control the terminal.

    Args:
        worker: see `JsonFormatter`.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._start = "" if worker is None else f"worker {worker}: "

    @override
    def format(self, record: logging.LogRecord) -> str:
        return self._start + printable(super().format(record), keep="\n")


def form_of(form: Format | None, has_requests: bool) -> Format:
    """Return the format of all lines: that of the settings, or of the request log by default."""
    if form is not None:
        return form
    return "json" if has_requests and not sys.stderr.isatty() else "text"


class RequestLog(Observer):
    """A log of requests.

    Args:
        write: takes lines of UTF-8, each with its end; returns False if it drops them.
        form: `json`, or `text` for people.
        level: `info` for all requests; `warning` and `error` for those that failed here or on an
            engine.
        content: True to log the response object too, in JSON.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        form: Format = "json",
        level: Level = "info",
        content: bool = False,
    ) -> None:
        self.keeps = content
        self._write = write
        self._is_json = form == "json"
        self._has_all = level in ("debug", "info")
        self._lost = 0

    def take(self, ended: Sequence[Record]) -> None:
        """Write the lines of requests."""
        # The clock of the records has no date.
        offset = time.time() - time.perf_counter()
        # A list of lines would take another kilobyte of memory, and of the cache, for each of them.
        lines = bytearray()
        has_all, is_json, keeps = self._has_all, self._is_json, self.keeps
        for record in ended:
            if has_all or _has_failed(record):
                event = event_of(record, offset)
                if keeps and is_json and record.reply is not None:
                    if len(lines) > _MOST_TOGETHER:
                        self._pass_on(lines)
                        lines.clear()
                    lines += _with_response(event, record.reply)
                else:
                    lines += orjson.dumps(event, None, _LINE) if is_json else line(event)
        if lines:
            self._pass_on(lines)

    @override
    def close(self) -> None:
        if self._lost:
            self._pass_on(b"")

    def _pass_on(self, lines: bytes | bytearray) -> None:
        """Write lines, after one that says how many could not be written before."""
        lost, first = self._lost, b""
        if lost:
            form: Format = "json" if self._is_json else "text"
            first = lost_line(lost, form, "the log is read too slowly")
        self._lost = 0
        if self._write(first + lines) is False:
            self._lost = lost + lines.count(b"\n")


# The fields that say in a line for people how a request has ended.
_REASONS = ("finish_reason", "error_code", "param", "limit")
# The fields of requests that an engine has got.
_ON_ENGINE = ("engine", "stream", "n")
# The ends of times: encoding a `datetime` takes as long as encoding the rest of a line.
_MILLISECONDS = [f".{number:03}Z" for number in range(1000)]


def _with_response(event: dict[str, Any], reply: Mapping[str, Any]) -> bytes:
    """Return a line with the response object, or with its size if it is very large."""
    data = orjson.dumps({**event, "response": reply}, None, _LINE)
    if len(data) > _MOST_SHOWN:
        data = orjson.dumps({**event, "response_bytes": len(data)}, None, _LINE)
    return data


@lru_cache(4)
def _second(second: int) -> str:
    """Return a second since 1970 as its time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _has_failed(record: Record) -> bool:
    """Return True if an error is one of the server or of an engine; a full queue counts as none.

    Anthropic's status for a full queue is 529.
    """
    is_busy = record.status == 529 and record.error_code == "rate_limit_exceeded"
    return (record.status >= 500 and not is_busy) or record.failed >= 500


def event_of(record: Record, offset: float) -> dict[str, Any]:
    """Return the fields of a request that apply; times are milliseconds, to the microsecond.

    Every request takes this path, and `round` would take as long as all the rest.

    Args:
        offset: the difference between the time since 1970 and that of `time.perf_counter`.
    """
    begun_at, ended, failed = record.begun_at, record.ended, record.failed
    at, status = ended + offset, record.status
    # A literal is as large from the start as most lines need.
    event: dict[str, Any] = {
        "time": _second(int(at)) + _MILLISECONDS[int(at % 1 * 1000)],
        "level": "error" if (failed or status >= 500) and _has_failed(record) else "info",
        "event": "background" if record.is_detached else "request",
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": status,
        "duration_ms": (ended - begun_at) * 1e6 // 1 / 1e3,
        "model": record.model,
        "engine": record.engine,
        "stream": record.is_stream,
        "n": record.count,
    }
    if record.queued:
        event["queue_ms"] = record.queued * 1e6 // 1 / 1e3
    if record.begun:
        if record.arrivals:
            event["ttft_ms"] = (record.arrivals[0] - begun_at) * 1e6 // 1 / 1e3
        if record.last:
            event["overhead_ms"] = record.overhead * 1e6 // 1 / 1e3
    else:
        for name in _ON_ENGINE:
            del event[name]
        if record.model == OTHER:
            del event["model"]
    if record.tries:
        event["attempts"] = len(record.tries) + 1
        event["tried"] = [{"engine": one.engine, "reason": one.reason} for one in record.tries]
    if record.prompt_tokens is not None:
        event["prompt_tokens"] = record.prompt_tokens
        event["completion_tokens"] = record.completion_tokens
        if record.finishes:
            event["cached_tokens"] = record.cached_tokens
            if record.reasoning_tokens is not None:
                event["reasoning_tokens"] = record.reasoning_tokens
            event["finish_reason"] = record.reasons[0]
    elif record.begun and any(record.partial):
        event["prompt_tokens"], event["completion_tokens"] = record.partial
        if record.ticket is not None and record.ticket.looked_up:
            event["cached_tokens"] = record.ticket.cached
    if failed or record.error_code:
        event.update(_failure_of(record))
    if record.is_left:
        event["client_gone"] = True
    if record.forwarded:
        event.update(record.forwarded)
    if record.key:
        event["key"] = record.key
    if record.end_user:
        event["user"] = in_log(record.end_user)
    if record.client:
        event["client"] = record.client
    return event


def _failure_of(record: Record) -> dict[str, str]:
    """Return what is known of the error that ended a request."""
    param = _shown(record.param) if record.param else ""
    found = {"error_code": record.error_code, "param": param, "limit": record.limit}
    return {name: value for name, value in found.items() if value}


_WORDS = re.compile(r"[^.\[\]]+")


@cache
def _fields() -> frozenset[str]:
    """Return the names of all fields of requests."""
    names = {word for table in TABLES.values() for name in table for word in name.split(".")}
    todo: list[type[Request]] = [Request]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        for name, field in kind.model_fields.items():
            names |= {name, field.alias or name}
    return frozenset(names)


def _shown(param: str) -> str:
    """Return the path of a field up to the first name that its client has made up."""
    for word in _WORDS.finditer(param):
        if not (word[0].isdigit() or word[0] in _fields()):
            return f"{param[: word.start()]}…"
    return param


@lru_cache(4)
def _clock(second: str) -> str:
    """Return the local time of a second in UTC."""
    return f"{datetime.fromisoformat(f'{second}Z').astimezone():%H:%M:%S}"


def line(event: Mapping[str, Any]) -> bytes:
    """Return the event of a request as a line for people, in local time."""
    words = [_clock(event["time"][:19]), event["method"], event["path"], str(event["status"])]
    if event["event"] != "request":
        words.insert(1, event["event"])
    seconds = event["duration_ms"] / 1e3
    if "model" in event:
        words.append(event["model"])
    if "prompt_tokens" in event:
        generated = event["completion_tokens"]
        words.append(f"{event['prompt_tokens']}+{generated} tok")
        working = seconds - event.get("ttft_ms", 0.0) / 1e3
        if generated > 1 and working > 0:
            words.append(f"{generated / working:.1f} tok/s")
    if "ttft_ms" in event:
        words.append(f"ttft {event['ttft_ms'] / 1e3:.2f} s")
    words.append(f"{seconds:.2f} s")
    words += [str(event[name]) for name in _REASONS if event.get(name)]
    if "tried" in event:
        words.append("after " + ", ".join(f"{o['engine']} {o['reason']}" for o in event["tried"]))
    if "client_gone" in event:
        words.append("client gone")
    words.append(event["request_id"])
    return printable(" ".join(words)).encode() + b"\n"
