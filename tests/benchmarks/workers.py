"""Measure what one worker and several workers of `latimer serve` carry.

    python tests/benchmarks/workers.py [--kinds 1 2 "2 servers"] [--tokens 64] [--turns 5]
        [--seconds 5]

Two servers of one process each, with half of the connections each, show what the machine itself
allows: its cores may share caches, or be two threads of one core.

The load is `wrk`, with plain chat requests over kept connections. The engine is
`nginx`, which sends the bytes of the fake llama-server. Both are Debian's packages. Both need cores
too, so with as many workers as cores the requests per second do not grow by the number of workers;
long answers need less of that for the work of a worker. The table therefore also has what the
processes cost: the requests of a second of CPU time of the workers, and the CPU time of everything
else on the machine meanwhile. Turns alternate between the kinds. The ratio is the median of the
ratios of turns, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.fake_engine import PROPS, event, final, free_port, wait_for
from support.servers import begun
from support.workers import workers

CONNECTIONS = 32
_TICK = os.sysconf("SC_CLK_TCK")
_SCRIPT = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.body = '{"model":"fake","messages":[{"role":"user","content":"Hello"}],"max_tokens":%d}'
"""
# A file is the response to a GET only; an error page is one to each method.
_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr error;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/1; proxy_temp_path {folder}/2;
  fastcgi_temp_path {folder}/3; uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  keepalive_requests 1000000000; open_file_cache max=10; root {folder};
  server {{
    listen 127.0.0.1:{port};
    default_type application/json;
    location / {{ return 200 '{{"tokens":[]}}'; }}
    location = /props {{ }}
    location = /completion {{ error_page 405 =200 /answer; }}
    location = /answer {{ default_type text/event-stream; }}
  }}
}}
"""


@dataclass
class Turn:
    """The figures of one turn.

    Attributes:
        rate: requests per second.
        own: CPU seconds of the workers per second, and of their parent.
        others: CPU seconds per second of everything else on the machine.
    """

    rate: float
    own: float
    parent: float
    others: float


@contextlib.contextmanager
def double(folder: Path, tokens: int) -> Iterator[str]:
    """Run the engine, whose answers have this number of tokens, and yield its address."""
    port = free_port()
    (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, port=port))
    (folder / "completion").touch()
    events = (event(number) for number in range(tokens))
    (folder / "answer").write_bytes(b"".join([*events, final(tokens)]))
    (folder / "props").write_bytes(PROPS)
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    process = subprocess.Popen([nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def busy() -> float:
    """Return the CPU seconds that the machine has worked."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / _TICK


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def load(addresses: Sequence[str], script: Path, seconds: float) -> float:
    """Return the requests per second that servers answered; all of them must be."""
    running = []
    for address in addresses:
        url, share = f"{address}/v1/chat/completions", CONNECTIONS // len(addresses)
        command = ["wrk", "-t1", f"-c{share}", f"-d{seconds:g}", "-s", str(script), url]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    total = 0.0
    for one in running:
        text, _ = one.communicate()
        assert "Non-2xx" not in text, text
        assert "Socket errors" not in text, text
        found = re.search(r"Requests/sec: +([\d.]+)", text)
        assert found is not None, text
        total += float(found[1])
    return total


def measured(
    addresses: Sequence[str], pids: Sequence[int], parent: int | None, script: Path, seconds: float
) -> Turn:
    """Load servers, after a short warm-up."""
    load(addresses, script, 1)
    start, before, own = time.monotonic(), busy(), sum(map(cpu, pids))
    first = cpu(parent) if parent is not None else 0.0
    rate = load(addresses, script, seconds)
    passed = time.monotonic() - start
    used = (sum(map(cpu, pids)) - own) / passed
    of_parent = (cpu(parent) - first) / passed if parent is not None else 0.0
    return Turn(rate, used, of_parent, (busy() - before) / passed - used - of_parent)


def turn(engine: str, kind: str, script: Path, seconds: float) -> Turn:
    """Measure new servers; see `main` for the kinds."""
    count, _, separate = kind.partition(" ")
    if count == "1" or separate:
        with contextlib.ExitStack() as stack:
            found = [stack.enter_context(begun(engine)) for _ in range(int(count))]
            pids = [process.pid for process, _, _ in found]
            return measured([address for _, address, _ in found], pids, None, script, seconds)
    with workers(engine, count=int(count)) as server:
        return measured([server.address], server.pids, server.process.pid, script, seconds)


def main() -> None:
    """Print the medians of turns: with workers, and with servers of one process each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kinds", nargs="+", default=["1", "2", "2 servers"])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: apt-get install wrk")
    found: dict[str, list[Turn]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, double(Path(name), args.tokens) as engine:
        script = Path(name) / "chat.lua"
        script.write_text(_SCRIPT % args.tokens)
        for _ in range(args.turns):
            for kind in args.kinds:
                one = turn(engine, kind, script, args.seconds)
                found[kind].append(one)
                print(kind, one, flush=True)
    print(
        "| workers | requests/s | ratio | cores: workers | parent | everything else |"
        " requests/CPU s |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for kind, turns in found.items():
        ratios = sorted(
            one.rate / first.rate for one, first in zip(turns, found[args.kinds[0]], strict=True)
        )
        rate, own, parent, others = (
            statistics.median(getattr(one, name) for one in turns)
            for name in ("rate", "own", "parent", "others")
        )
        each = statistics.median(one.rate / one.own for one in turns)
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        row = f"{rate:,.0f} | {ratio} | {own:.2f} | {parent:.2f} | {others:.2f} | {each:,.0f}"
        print(f"| {kind} | {row} |")


if __name__ == "__main__":
    main()
