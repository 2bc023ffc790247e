"""A local Ray with two applications, and what its processes use; for tests/ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

# Seconds that Ray may take to start on a busy machine.
START = 150.0
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
        ray_actor_options: {{num_cpus: 0.1}}
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


def is_idle(seconds: float = 0.2) -> bool:
    """Return True if the replicas use less than a fifth of a core."""
    before = {pid: cpu_seconds(pid) for pid in replicas()}
    time.sleep(seconds)
    return all(cpu_seconds(pid) - used < seconds / 5 for pid, used in before.items())


def busy_replica(seconds: float = 0.3) -> int:
    """Return the replica that uses the most CPU time."""
    before = {pid: cpu_seconds(pid) for pid in replicas()}
    time.sleep(seconds)
    return max(before, key=lambda pid: cpu_seconds(pid) - before[pid])


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
