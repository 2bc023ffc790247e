"""A local Ray with two applications, and what its processes use; for tests/ray."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.responses.items import mark_of, named_mark

# Seconds that Ray may take to start on a busy machine.
START = 150.0
# Seconds until the next process of a replica is ready there.
READY = 90.0
BIN = Path(sys.executable).parent

CONFIG = """
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: demo
    route_prefix: /
    import_path: latimer.adapter.ray_serve:app
    args: {{model_name: [demo], store: "{store}"}}
    deployments:
      - name: Latimer
        num_replicas: 2
        autoscaling_config: null
        health_check_period_s: 2
        ray_actor_options: {{num_cpus: 0.1}}{options}
  - name: scaled
    route_prefix: /scaled
    import_path: latimer.adapter.ray_serve:app
    args: {{model_name: [scaled], api_key: [secret]}}
    deployments:
      - name: Latimer
        autoscaling_config:
          min_replicas: 1
          max_replicas: 3
          target_ongoing_requests: 2
          look_back_period_s: 2
          upscale_delay_s: 1
          downscale_delay_s: 5
        ray_actor_options: {{num_cpus: 0.1}}
"""
# A router that counts what it is asked, in a file.
COUNTED = """
        request_router_config:
          request_router_class: support.counting:CountingRouter
          request_router_kwargs: {{file: "{file}"}}
"""
# One more application, to measure what an ingress that reads the body costs.
TWO_HOPS = """
  - name: two-hops
    route_prefix: /two-hops
    import_path: support.two_hops:app
"""


QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
# Many seconds of work, if nobody cancels it.
LONG = {"model": "demo", "prompt": "One", "max_tokens": 1500, "n": 16, "ignore_eos": True}
BRIEF = {"model": "demo", "input": "One", "max_output_tokens": 1}

# The log that a replica has open, whose name ends with the replica's id.
_LOG = re.compile(r"/serve/replica_.*_([^_]+)\.log$")
_RUNNING = re.compile(r"^latimer_num_requests_running\{.*\} (\S+)$", re.MULTILINE)


def free_port() -> int:
    """Return a port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replicas(application: str = "demo") -> set[int]:
    """Return the processes of an application's replicas."""
    return processes(f"ray::ServeReplica:{application}:")


def processes(title: str) -> set[int]:
    """Return the processes whose command lines begin with a text."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "cmdline").read_bytes().startswith(title.encode()):
                    found.add(int(folder.name))
            except OSError:
                # It ended meanwhile.
                continue
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_idle(url: str, sessions: Iterable[str], seconds: float = 0.2) -> bool:
    """Return True if no replica runs a request, nor uses more than a fifth of a core.

    A replica that other programs keep from a core uses little while it generates, so its metrics
    are read, too.

    Args:
        sessions: one of each replica.
    """
    before = {pid: cpu_seconds(pid) for pid in replicas()}
    time.sleep(seconds)
    if any(cpu_seconds(pid) - used > seconds / 5 for pid, used in before.items()):
        return False
    return not any(running(url, session) for session in sessions)


def replica_of(response: str) -> int:
    """Return the process of the replica that has made a response, by the mark in its id."""
    for pid in replicas():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = _LOG.search(str(link.readlink()))
            except OSError:
                # It was closed meanwhile.
                continue
            if found is not None and named_mark(found[1]) == mark_of(response):
                return pid
    pytest.fail(f"no replica has made {response}")


def created(url: str, body: dict[str, Any], **headers: str) -> Any:
    """Create a response, and return it."""
    reply = httpx2.post(f"{url}/responses", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def session_of_each(url: str, header: str = "x-session-id") -> dict[int, str]:
    """Return a session of each of two replicas by its process, when both are ready."""
    ready: set[int] = set()
    found: dict[int, str] = {}
    numbers = itertools.count()
    end = time.monotonic() + READY
    while time.monotonic() < end:
        name = f"session-{next(numbers)}"
        homes = {replica_of(created(url, BRIEF, **{header: name})["id"]) for _ in range(2)}
        if len(ready) == 2:
            # Before, a session may move to a replica that becomes ready.
            assert len(homes) == 1, f"{name} has two replicas"
            found.setdefault(homes.pop(), name)
            if len(found) == 2:
                return found
        ready |= homes
    pytest.fail("all sessions use one replica")


def running(url: str, session: str) -> int:
    """Return how many requests the replica of a session runs."""
    path = f"{url.removesuffix('/v1')}/metrics"
    text = httpx2.get(path, headers={"x-session-id": session}, timeout=10).text
    return int(sum(float(one) for one in _RUNNING.findall(text)))


def leave(url: str, body: dict[str, Any], after: float, **headers: str) -> None:
    """Send a request, and disconnect after some seconds."""
    timeout = httpx2.Timeout(after, connect=5)
    try:
        if body.get("stream"):
            end = time.monotonic() + after
            with httpx2.stream("POST", url, json=body, headers=headers, timeout=30) as response:
                for _ in response.iter_bytes():
                    if time.monotonic() > end:
                        return
        else:
            httpx2.post(url, json=body, headers=headers, timeout=timeout)
    except httpx2.TimeoutException:
        pass


@contextmanager
def program(command: list[str], address: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block; it has to answer first."""
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's own is 15, so a replica would wait for the other programs of the machine.
    variables["RAY_worker_niceness"] = "0"
    variables["PATH"] = f"{BIN}:{variables['PATH']}"
    # The processes of Ray import `support`.
    variables["PYTHONPATH"] = str(Path(__file__).parent.parent)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
    try:
        _wait(process, address, log)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx2.get(f"{address}/models", timeout=10).status_code in (200, 401):
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.5)
    pytest.fail(f"{address} did not start: {log.read_text()[-4000:]}")


def until(is_true: Callable[[], bool], seconds: float) -> float:
    """Wait until a condition holds, and return the seconds that it took."""
    begun = time.monotonic()
    while not is_true():
        assert time.monotonic() - begun < seconds, "it did not happen in time"
        time.sleep(0.1)
    return time.monotonic() - begun


def note(figure: str) -> None:
    """Print what a test measured at once; `make test-ray` shows it."""
    print(f"\n==> {figure}", flush=True)
