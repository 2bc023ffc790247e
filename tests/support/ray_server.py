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
    args: {{model_name: [demo], store: {store}}}
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


def free_port() -> int:
    """Return a port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replicas(application: str = "demo") -> set[int]:
    """Return the processes of an application's replicas."""
    title = f"ray::ServeReplica:{application}:".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "cmdline").read_bytes().startswith(title):
                    found.add(int(folder.name))
            except OSError:
                # It ended meanwhile.
                continue
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def program(command: list[str], address: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block; it has to answer first."""
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    variables["PATH"] = f"{BIN}:{variables['PATH']}"
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
