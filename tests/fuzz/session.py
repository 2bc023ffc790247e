"""A client of the process under test that runs cases and checks its state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.cases import Case, Request
from fuzz.client import Answer, ask
from fuzz.engines import Engine
from fuzz.findings import Finding
from fuzz.judge import MUCH, problem, work

# Time limits in seconds for a response: to end, or to disconnect if it has many tokens.
LONGEST_ANSWER, PATIENCE = 20.0, 2.0
# Number of tasks and files by which a quiet process can exceed its start.
MORE = 8
QUESTION = "What is the capital of France?"
WITNESSES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12},
    {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "response_format": {
        "type": "json_schema", "json_schema": {"name": "s", "schema": {
            "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
            "required": ["a"], "additionalProperties": False}}}},
)  # fmt: skip


class Died(Exception):
    """The process under test has ended or no longer responds."""


class Session:
    """A process under test.

    Args:
        engine: the engine that it serves.
        runner: the runner of its clients.

    Raises:
        Died: the process does not answer the known questions.
    """

    def __init__(self, engine: Engine, runner: asyncio.Runner) -> None:
        self.engine = engine
        self._runner = runner
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        program = str(Path(__file__).with_name("served.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, engine.name, *([engine.address] if engine.address else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.statuses: Counter[str] = Counter()
        self.memory: list[int] = []
        # True if further cases would only show the same problem.
        self.stuck = False
        try:
            self.port = int(self._line(60)["port"])
            # The recorded koboldcpp follows no grammar.
            some = WITNESSES[: 1 + (engine.name != "koboldcpp_edited")]
            self._witnesses = [self._witness(body) for body in some]
            if any(one.startswith("!") for one in self._witnesses):
                raise Died(f"the first answers are {self._witnesses}")
            self._start = self._state("settle")
        except BaseException:
            self.stuck = True
            self.close()
            raise

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _line(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise Died(f"no answer from inside within {seconds:g} s") from None
        if not line:
            raise Died(f"the process ended with {self._process.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _state(self, command: str = "state", seconds: float = 40.0) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except OSError:
            raise Died(f"the process ended with {self._process.wait(10)}") from None
        return self._line(seconds)

    def _witness(self, body: dict[str, Any]) -> str:
        """Send a request with a known completion, and return its text."""
        data = json.dumps({"model": "m", "temperature": 0, **body}).encode()
        # The engine may have closed connections, or still work for a client that disconnected.
        for attempt in range(3):
            request = Request("/v1/chat/completions", data)
            answer = self._ask([request], LONGEST_ANSWER)[0]
            if answer.status not in (429, 502, 503, 504):
                break
            time.sleep(0.3 * (attempt + 1))
        if answer.status != 200:
            return f"! {answer.ended} {answer.status} {answer.body[:300]!r}"
        return str(json.loads(answer.body)["choices"][0]["message"]["content"])

    def _ask(self, requests: list[Request], seconds: float | None = None) -> list[Answer]:
        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(
                *(ask(self.port, one, seconds or _patience(one)) for one in requests)
            )

        try:
            return self._runner.run(all_of_them())
        except ConnectionError:
            raise Died("no connections are taken any more") from None

    def run(self, case: Case) -> list[Finding]:
        """Run a case and return its findings. Set `stuck` if a response does not end.

        Raises:
            Died: the process has ended.
        """
        front = self.engine.front
        if front is not None:
            front.facts_changed = False
            front.arm(list(case.edits))
            if case.fresh:
                self._state("renew")
        answers = self._ask(list(case.requests))
        if front is not None:
            front.arm([])
        found = []
        for request, answer in zip(case.requests, answers, strict=True):
            self.statuses[str(answer.status or answer.ended)] += 1
            wrong = problem(request, answer, front is not None)
            if wrong is not None:
                stacks = self._stacks() if answer.ended == "timeout" else answer.body[:500]
                self.stuck |= answer.ended == "timeout"
                found.append(Finding("answer", f"{request.path}: {wrong}", str(stacks)))
        if front is not None and front.facts_changed:
            self._state("renew")
        return found + self._notes(self._state())

    def _stacks(self) -> str:
        return "\n".join(self._state("stacks")["stacks"])

    def _notes(self, state: dict[str, Any]) -> list[Finding]:
        found = [_of_log(text) for text in state["problems"]]
        if "failed" in state:
            found.append(Finding("log", f"a command failed: {state['failed']}"))
        for held in state["held"]:
            what = (
                f"the loop's turn of {held['ms']:.0f} ms, {held['collecting_ms']:.0f} ms of it gc"
            )
            found.append(Finding("held", what, "\n".join(held["stacks"])))
        return found

    def look(self) -> list[Finding]:
        """Check the known completions, and that no tasks or files are left over."""
        found = []
        for body, right in zip(WITNESSES, self._witnesses, strict=False):
            answer = self._witness(body)
            if answer != right:
                self.stuck = True
                found.append(Finding("witness", "a known answer changed", f"{right!r}\n{answer!r}"))
        end = time.monotonic() + 12
        while True:
            state = self._state("settle")
            found += self._notes(state)
            more = {name: state[name] - self._start[name] for name in ("tasks", "files")}
            if max(more.values()) <= MORE:
                break
            if time.monotonic() > end:
                found.append(Finding("left over", f"{more} more than at the start", self._stacks()))
                break
            time.sleep(0.2)
        self.memory.append(state["memory_kib"])
        return found

    def turns(self) -> tuple[Counter[int], float]:
        """Return the number of loop turns by duration in steps of 0.05 ms, and the longest in
        ms."""
        state = self._state("turns")
        return Counter({int(k): v for k, v in state["turns"].items()}), state["longest_ms"]

    def errors(self) -> str:
        """Return the end of the process's standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-10_000:]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(1 if self.stuck else 15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _patience(request: Request) -> float:
    return PATIENCE if work(request) > MUCH else LONGEST_ANSWER


def _of_log(text: str) -> Finding:
    """Return the finding of a log entry, whose last line is the most informative."""
    lines = [line for line in text.splitlines() if line.strip()]
    return Finding("log", f"{lines[0][:60]} … {lines[-1][:120]}" if lines else text, text)
