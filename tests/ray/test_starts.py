"""Tests that Ray starts and ends every time; `make test-ray` runs them first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from support.ray_server import CONFIG, QUESTION, free_port, note, program, until

STARTS = int(os.environ.get("STARTS", "10"))

pytestmark = pytest.mark.timeout(300)


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that these have started."""
    found = set()
    for folder in Path(f"/proc/{pid}/task").iterdir():
        for one in (folder / "children").read_text().split():
            try:
                found |= {int(one), *descendants(int(one))}
            except OSError:
                # It ended meanwhile.
                continue
    return found


def runs(pid: int) -> bool:
    """Return True if a process has not ended; a dead one may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", range(STARTS))
def test_a_start(number: int, tmp_path: Path) -> None:
    """The driver starts, each application answers, and SIGTERM leaves no process."""
    port = free_port()
    file, log = tmp_path / "serve.yaml", tmp_path / "driver.log"
    file.write_text(CONFIG.format(port=port, store="memory", options=""))
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "latimer.adapter.ray_serve", str(file)]
    begun = time.monotonic()
    with program(command, f"{address}/v1", log) as driver:
        first = time.monotonic() - begun
        until(lambda: httpx2.get(f"{address}/scaled/v1/models", timeout=10).status_code == 401, 90)
        for base, model in (("/v1", "demo"), ("/scaled/v1", "scaled")):
            reply = httpx2.post(
                f"{address}{base}/chat/completions",
                json={**QUESTION, "model": model},
                headers={"authorization": "Bearer secret"},
                timeout=30,
            )
            assert reply.status_code == 200, reply.text
        both = time.monotonic() - begun
        started = descendants(driver.pid)
        assert len(started) > 4
        driver.send_signal(signal.SIGTERM)
        ending = time.monotonic()
        try:
            assert driver.wait(60) == 0, log.read_text()[-4000:]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the driver did not end: {log.read_text()[-4000:]}")
        until(lambda: not any(map(runs, started)), 20)
    load = os.getloadavg()[0]
    note(
        f"start {number + 1}: first answer after {first:.0f} s, both applications after "
        f"{both:.0f} s, all processes ended {time.monotonic() - ending:.0f} s after SIGTERM "
        f"(load {load:.1f})"
    )
