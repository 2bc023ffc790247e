"""Compare Latimer with other proxies, in front of an engine that costs nothing.

    python tests/benchmarks/proxy.py [--turns 3] [--litellm PYTHON] [--unseen] [--json FILE]
        [--plot FILE]

All servers run together on one machine: the engine itself, nginx and aiohttp, which pass bytes,
`translate.py`, a translator written by hand, Latimer, and LiteLLM's proxy if it is installed. The
proxies are pinned to one core and idle while another one is measured. The engine and the client
share another core. A turn measures every server one after the other. The table has medians of
turns, and Latimer's multiple of the translator. With `--unseen`, Latimer has neither metrics nor
the log of requests, as the translator.

* CPU time per request: chat and completions of 8 tokens by 32 clients, not streamed
* requests per second: the same
* latency: one client; engine and proxy share a core, so that both ways cross between cores equally
  often
* CPU time per token in a burst: the difference between streams of 264 and 8 tokens, sent at once
* CPU time per token, paced: streams of 50 tokens per second
* paced streams: the largest number in one core of which no token is lost, and at most one of 1,000
  comes a whole interval late
* memory after the first answers, and the time from the start of the process to the first answer
* calls of Python functions, of Latimer and of the translator (`calls.py`)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import calls
from benchmarks.fake_engine import LAST, TOKENS
from benchmarks.load import load, pacing, quantile, streams
from benchmarks.peers import UNSEEN, Peer, Server, peers, running
from benchmarks.plots import picture

CLIENTS = 32
# The tokens of the two streams whose difference is the cost of a token in a burst.
SHORT, LONG = 8, 264
BURST_CLIENTS = 4
# The streams whose cost per token is measured, and their tokens.
PACED, PACED_TOKENS = 256, 100
# The numbers of paced streams that are tried, and the tokens of each.
LADDER, LADDER_TOKENS = (768, 704, 640, 576, 512, 448, 384, 256, 128), 250
# The share of tokens that may come late.
LATE = 0.001

# The apps whose Python calls are counted.
APPS = {"py-translate": calls.translator, "Latimer": calls.over_llama_server}

Figures = dict[str, float]


def run(work: Any) -> Any:
    """Run a coroutine on uvloop."""
    import uvloop

    return uvloop.run(work)


def requests(server: Server, kind: str, seconds: float) -> Figures:
    """Return the requests per second of many clients, and the CPU time of each."""
    request = server.peer.requests[kind]("hello", False, TOKENS)
    run(load(server.port, request, server.peer.whole, CLIENTS, seconds / 4))
    before = server.cpu()
    start = time.perf_counter()
    answers = len(run(load(server.port, request, server.peer.whole, CLIENTS, seconds)))
    elapsed = time.perf_counter() - start
    cost = (server.cpu() - before) / answers
    return {f"{kind}, CPU us": cost, f"{kind}, requests/s": answers / elapsed}


def burst(server: Server, seconds: float) -> Figures:
    """Return the CPU time of a token in a stream whose tokens arrive at once."""
    costs = []
    for count in (SHORT, LONG):
        request = server.peer.requests["chat"]("hello", True, count)
        run(load(server.port, request, LAST, BURST_CLIENTS, seconds / 4))
        before = server.cpu()
        found = run(load(server.port, request, LAST, BURST_CLIENTS, seconds))
        costs.append((server.cpu() - before) / len(found))
    return {"token in a burst, CPU us": (costs[1] - costs[0]) / (LONG - SHORT)}


def paced(server: Server, count: int, tokens: int) -> dict[str, float]:
    """Return the figures of concurrent streams of 50 tokens per second."""
    request = server.peer.requests["chat"]("paced", True, tokens)
    before = server.cpu()
    found = pacing(run(streams(server.port, request, count)), tokens)
    return {**found, "cpu_us": (server.cpu() - before) / max(found["frames"], 1)}


def latency(
    servers: Mapping[str, Server], cores: tuple[int, int], seconds: float
) -> dict[str, Figures]:
    """Return the latency of one client, in milliseconds: the engine's, and what a proxy adds."""
    os.sched_setaffinity(servers["direct"].pid, {cores[0]})
    times = {}
    for name, server in servers.items():
        request = server.peer.requests["chat"]("hello", False, TOKENS)
        times[name] = run(load(server.port, request, server.peer.whole, 1, seconds))
    os.sched_setaffinity(servers["direct"].pid, {cores[1]})
    found: dict[str, Figures] = {name: {} for name in servers}
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        direct = quantile(times["direct"], share)
        for name in servers:
            own = quantile(times[name], share)
            shown = own if name == "direct" else own - direct
            found[name][f"{label} of direct, or added to it, ms"] = shown
    return found


def turn(
    servers: Mapping[str, Server], cores: tuple[int, int], seconds: float
) -> dict[str, Figures]:
    """Measure every server once."""
    found = latency(servers, cores, seconds)
    for name, server in servers.items():
        for kind in server.peer.requests:
            found[name] |= requests(server, kind, seconds)
        found[name] |= burst(server, seconds)
        figures = paced(server, PACED // server.peer.slowness, PACED_TOKENS)
        found[name]["paced token, CPU us"] = figures["cpu_us"]
    return found


def held(server: Server) -> dict[int, dict[str, float]]:
    """Return the figures of fewer and fewer paced streams, until none are late."""
    found: dict[int, dict[str, float]] = {}
    for count in LADDER:
        found[count] = paced(server, count // server.peer.slowness, LADDER_TOKENS)
        if is_held(found[count]):
            break
    return found


def is_held(figures: Mapping[str, float]) -> bool:
    """Return True if no token was lost, and few were late."""
    return not figures["lost"] and figures["late"] <= LATE * figures["frames"]


def medians(turns: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the median of each figure."""
    found: dict[str, Figures] = defaultdict(dict)
    for name, figures in turns[0].items():
        for figure in figures:
            found[name][figure] = statistics.median(one[name][figure] for one in turns)
    return dict(found)


def measure(chosen: Mapping[str, Peer], turns: int, seconds: float, ladder: bool) -> dict[str, Any]:
    """Run all servers, and return the figures."""
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, other = cores[0], cores[-1]
    os.sched_setaffinity(0, {other})
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, peer in chosen.items():
            core = other if name == "direct" else proxy_core
            engine = servers["direct"].port if servers else None
            servers[name] = stack.enter_context(running(peer, engine, core))
        before = {
            name: {"memory, MB": server.memory(), "start, s": server.start_seconds}
            for name, server in servers.items()
        }
        found = [turn(servers, (proxy_core, other), seconds) for _ in range(turns)]
        steps = {name: held(server) for name, server in servers.items()} if ladder else {}
    figures = medians(found)
    for name in servers:
        figures[name] |= before[name]
        good = [
            count // chosen[name].slowness
            for count, one in steps.get(name, {}).items()
            if is_held(one)
        ]
        if steps:
            figures[name]["paced streams"] = max(good, default=0)
        counted = calls.numbers(calls.measure({"": APPS[name]})) if name in APPS else {}
        figures[name] |= {f"{kind}, Python calls": count for kind, count in counted.items()}
    return {
        "machine": platform.platform(),
        "python": platform.python_version(),
        "cores": len(cores),
        "does": {name: peer.does for name, peer in chosen.items()},
        "medians": figures,
        "turns": found,
        "ladder": steps,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the medians as a Markdown table."""
    figures: dict[str, Figures] = result["medians"]
    names = list(figures)
    lines = [
        "| | " + " | ".join(names) + " | Latimer ÷ py-translate |",
        "|---" + "|--:" * (len(names) + 1) + "|",
    ]
    rows = [*dict.fromkeys(row for one in figures.values() for row in one)]
    for row in rows:
        cells = [shown(figures[name].get(row)) for name in names]
        ours, base = (figures.get(name, {}).get(row) for name in ("Latimer", "py-translate"))
        ratio = f"{ours / base:.2f}" if ours and base else ""
        lines.append(f"| {row} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines) + "\n"


def shown(value: float | None) -> str:
    """Return a figure with three digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    options.add_argument("--litellm", type=Path, metavar="PYTHON", help="of an environment with it")
    options.add_argument("--only", nargs="+", metavar="NAME", help="these servers only")
    options.add_argument("--unseen", action="store_true", help="without metrics and log")
    options.add_argument("--no-ladder", action="store_true", help="do not count paced streams")
    options.add_argument("--json", type=Path)
    options.add_argument("--plot", type=Path, help="an SVG file to write")
    arguments = options.parse_args()
    chosen = peers(arguments.litellm, UNSEEN if arguments.unseen else ())
    if arguments.only:
        chosen = {
            name: peer for name, peer in chosen.items() if name in ("direct", *arguments.only)
        }
    result = measure(chosen, arguments.turns, arguments.seconds, not arguments.no_ladder)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(picture(result["medians"]))
    sys.stdout.write(table(result))


if __name__ == "__main__":
    main()
