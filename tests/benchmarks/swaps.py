"""Measure two models that do not fit together, with two clients that alternate.

    python tests/benchmarks/swaps.py [--seconds 60] [--load 1.0] [--most-wait 5]

Two real llama-servers serve the demo model, one at a time. A shell waits before each start, since a
model of useful size loads for longer than this one. Each client sends its next request when its
last stream has ended. The row "by request" swaps models as soon as the running requests of the
other one have ended.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import orjson

sys.path.insert(0, str(Path(__file__).parent.parent))

from latimer.adapter import OpenAIAdapter
from latimer.adapter.fleet import Fleet
from latimer.adapter.settings import Settings
from latimer.backends.fleet import machine
from latimer.backends.fleet.plan import Plan, View, plan
from latimer.backends.llama_cpp import DEMO_MODEL
from support.servers import llama_server_command, serving

PROMPTS = ("Hello", "What is the capital of France?", "Tell me a story", "Count to ten.")


def by_request(views: Sequence[View], memory: Mapping[str, int] | None, most_wait: float) -> Plan:
    """Decide without collation: a model is unloaded when its running requests have ended."""
    del most_wait
    eager = [view._replace(load_seconds=0.0) for view in views]
    return plan(eager, memory, 0.0)


@dataclass
class Seen:
    """The tokens, the waits and the texts that the clients saw."""

    tokens: int = 0
    streams: int = 0
    cut: int = 0
    waits: list[float] = field(default_factory=list)
    texts: dict[tuple[str, str], set[str]] = field(default_factory=dict)


def client(url: str, model: str, end: float, seen: Seen) -> None:
    """Send one stream after another."""
    with httpx2.Client(base_url=url, timeout=120) as http:
        number = 0
        # The first stream of a client on a busy machine may begin late.
        while not number or time.monotonic() < end:
            prompt = PROMPTS[number % len(PROMPTS)]
            number += 1
            body = {
                "model": model, "stream": True, "max_tokens": 64, "temperature": 0,
                "messages": [{"role": "user", "content": prompt}],
            }  # fmt: skip
            begun, first, text, finished = time.monotonic(), 0.0, "", False
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                for line in reply.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        seen.cut += not finished
                        finished = True
                        break
                    event = orjson.loads(line[6:])
                    choice = event.get("choices", [{}])[0]
                    if choice.get("delta", {}).get("content"):
                        first = first or time.monotonic()
                        text += choice["delta"]["content"]
                        seen.tokens += 1
                    finished = finished or bool(choice.get("finish_reason"))
            seen.cut += not finished
            seen.streams += 1
            seen.waits.append((first or time.monotonic()) - begun)
            seen.texts.setdefault((model, prompt), set()).add(text)


def run(seconds: float, load: float, most_wait: float, policy: Any) -> tuple[Seen, int, float]:
    """Run two clients; return what they saw, the number of loads, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        words = [str(one) for one in llama_server_command(DEMO_MODEL, 0, slots=2, context=512)]
        words[words.index("--port") + 1] = "{port}"
        command = ["sh", "-c", f"sleep {load}; exec {shlex.join(words)}"]
        tables = [
            f'[engines.{name}]\nbackend = "llama-server"\nmachine = "here"\nmemory = "8GiB"\n'
            f"command = {orjson.dumps(command).decode()}\n"
            for name in "ab"
        ]
        file.write_text(
            "\n".join(tables) + f'[machines.here]\nmemory = "10GiB"\nmost_wait = "{most_wait}s"\n'
        )
        fleet = Fleet(Settings.load(file))
        app = OpenAIAdapter(fleet.entries)
        app.service.release = fleet.aclose
        seen = Seen()
        vars(machine)["plan"] = policy
        try:
            with serving(lambda: app) as url:
                begun = time.monotonic()
                threads = [
                    threading.Thread(target=client, args=(url, name, begun + seconds, seen))
                    for name in "ab"
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                taken = time.monotonic() - begun
                loads = sum(one.loads for one in fleet.machines["here"].members)
        finally:
            vars(machine)["plan"] = plan
    return seen, loads, taken


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--most-wait", type=float, default=5)
    values = parser.parse_args()
    print("| policy | tokens/s | streams | swaps | longest wait | mean wait | cut | wrong |")
    print("|---|---|---|---|---|---|---|---|")
    for name, policy in (("collation", plan), ("by request", by_request)):
        seen, loads, taken = run(values.seconds, values.load, values.most_wait, policy)
        wrong = sum(len(texts) > 1 for texts in seen.texts.values())
        mean = sum(seen.waits) / len(seen.waits)
        print(
            f"| {name} | {seen.tokens / taken:.0f} | {seen.streams} | {loads - 1} | "
            f"{max(seen.waits):.2f} s | {mean:.2f} s | {seen.cut} | {wrong} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
