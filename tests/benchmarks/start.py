"""Compare the start, the memory and the first requests of the proxy with those of py-translate.

    python tests/benchmarks/start.py --starts 10
    python tests/benchmarks/start.py --before ../before

All servers run over one fake llama-server, and take turns. A start is the time from the process
until `/health` responds with 200, and until the first chat request is answered. The memory is that
of a server that has answered 100 chat requests. Python's compiled files exist, as in an installed
package. The table has the medians and the ranges.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES, HERE, on_core, package_of
from benchmarks.fake_engine import TOKENS, fake_engine, free_port, wait_for

# The requests before the memory is measured, and the seconds from the last one until then.
REQUESTS, PAUSE = 100, 1.0
HEALTH, CHAT, RESPONSES = "/health", "/v1/chat/completions", "/v1/responses"
BODIES: Mapping[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS},
    RESPONSES: {"input": "hello", "max_output_tokens": 16},
}
LATIMER = (
    "-c", "import sys; from latimer.adapter.cli import main; main(sys.argv[1:])", "serve",
    "http://127.0.0.1:{engine}", "--port", "{port}",
)  # fmt: skip
TRANSLATE = (str(Path(__file__).parent / "translate.py"), "{port}", "{engine}")

Figures = dict[str, float]


class Client:
    """A client with one connection to a server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(self, path: str) -> float:
        """Send a request; return the milliseconds until its response.

        Raises:
            RuntimeError: the status is not 200.
        """
        body = json.dumps({"model": "fake", **BODIES[path]}) if path in BODIES else None
        begun = time.perf_counter()
        self._connection.request("GET" if body is None else "POST", path, body)
        response = self._connection.getresponse()
        response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status}")
        return (time.perf_counter() - begun) * 1e3

    def wait(self, path: str) -> None:
        """Send a request until its status is 200."""
        while True:
            with contextlib.suppress(RuntimeError):
                self.ask(path)
                return
            time.sleep(0.002)


def memory(pid: int) -> Figures:
    """Return the MB of a process in RAM: all of it, and without what others share with it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(size) * 1024 / 1e6 for name, size in re.findall(r"(\w+): +(\d+) kB", text)}
    return {"RSS, MB": sizes["Rss"], "PSS, MB": sizes["Pss"]}


@contextlib.contextmanager
def started(command: Sequence[str], engine: int, environment: Mapping[str, str]) -> Iterator[Any]:
    """Start a server; yield its process, and a client when it accepts connections."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *(word.format(port=port, engine=engine) for word in command)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {min(CORES)}),
    )
    try:
        wait_for(port)
        yield process, Client(port)
    finally:
        process.terminate()
        process.wait(30)


def measure(command: Sequence[str], engine: int, environment: Mapping[str, str]) -> Figures:
    """Start a server twice; return the figures."""
    found: Figures = {}
    is_latimer = command is LATIMER
    begun = time.perf_counter()
    with started(command, engine, environment) as (process, client):
        if is_latimer:
            client.wait(HEALTH)
            found["start to /health, s"] = time.perf_counter() - begun
        found["first chat, ms"] = client.ask(CHAT)
        found["start to chat, s"] = time.perf_counter() - begun
        found["start to chat, CPU s"] = on_core(process.pid) / 1e6
        found["second chat, ms"] = client.ask(CHAT)
        for _ in range(REQUESTS - 2):
            client.ask(CHAT)
        time.sleep(PAUSE)
        found |= memory(process.pid)
        if is_latimer:
            found["first response, ms"] = client.ask(RESPONSES)
            found["second response, ms"] = client.ask(RESPONSES)
            time.sleep(PAUSE)
            after = memory(process.pid)
            found |= {f"after a response: {name}": size for name, size in after.items()}
    if is_latimer:
        with started(command, engine, environment) as (_, client):
            client.wait(HEALTH)
            found["first response at the start, ms"] = client.ask(RESPONSES)
            found["second response at the start, ms"] = client.ask(RESPONSES)
    return found


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--starts", type=int, default=10)
    options.add_argument("--before", type=Path, help="another checkout")
    arguments = options.parse_args()
    with contextlib.ExitStack() as stack:
        trees = {"Latimer": HERE}
        if arguments.before is not None:
            trees = {"before": arguments.before, **trees}
        servers: dict[str, tuple[Sequence[str], dict[str, str]]] = {
            "py-translate": (TRANSLATE, {**os.environ}),
            **{
                name: (LATIMER, stack.enter_context(package_of(tree)))
                for name, tree in trees.items()
            },
        }
        engine = stack.enter_context(fake_engine(max(CORES)))
        found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in servers}
        # The first turn compiles what is not compiled yet.
        for turn in range(arguments.starts + 1):
            for name, (command, environment) in servers.items():
                environment.pop("PYTHONDONTWRITEBYTECODE", None)
                for figure, value in measure(command, engine, environment).items():
                    if turn:
                        found[name][figure].append(value)
        sys.stdout.write(table(found))


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the medians and ranges as a Markdown table."""
    lines = ["| | " + " | ".join(found) + " |", "|---" + "|--:" * len(found) + "|"]
    for figure in found["Latimer"]:
        cells = [shown(values.get(figure, ())) for values in found.values()]
        lines.append(f"| {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def shown(values: Sequence[float]) -> str:
    """Return the median of a figure, and its range."""
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
