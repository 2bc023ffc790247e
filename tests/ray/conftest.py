"""A local Ray with two applications, and a plain server of the same model to compare with."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from support.postgresql import missing, postgresql
from support.ray_server import (
    BIN,
    CONFIG,
    COUNTED,
    TWO_HOPS,
    free_port,
    note,
    program,
    replicas,
    until,
)


@pytest.fixture(scope="session")
def ray_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of what the driver writes."""
    return tmp_path_factory.mktemp("ray") / "driver.log"


@pytest.fixture(scope="session")
def database() -> Iterator[str]:
    """Run a PostgreSQL, and yield its URL; it is empty if there is none."""
    if missing():
        yield ""
        return
    with postgresql() as server:
        yield server.url()


@pytest.fixture
def shared(database: str) -> str:
    """Return the URL of the store that the replicas share."""
    if not database:
        pytest.skip(str(missing()))
    return database


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file whose bytes are the questions to the router of the two replicas."""
    return tmp_path_factory.mktemp("questions") / "count"


@pytest.fixture(scope="session")
def served(
    ray_log: Path, database: str, questions: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run Ray Serve, and yield the address of its proxy and its driver."""
    port = free_port()
    file = ray_log.with_name("serve.yaml")
    options = COUNTED.format(file=questions)
    text = CONFIG.format(port=port, store=database or "memory", options=options)
    file.write_text(text + TWO_HOPS)
    address = f"http://127.0.0.1:{port}"
    begun = time.monotonic()
    command = [sys.executable, "-m", "latimer.adapter.ray_serve", str(file)]
    with program(command, f"{address}/v1", ray_log) as driver:
        until(lambda: httpx2.get(f"{address}/scaled/v1/models", timeout=10).status_code == 401, 60)
        until(lambda: len(replicas()) == 2, 60)
        note(f"start of Ray and two applications: {time.monotonic() - begun:.0f} s")
        yield address, driver


@pytest.fixture(scope="session")
def url(served: tuple[str, subprocess.Popen[bytes]]) -> str:
    """Return the base URL of the application with two replicas."""
    return f"{served[0]}/v1"


@pytest.fixture(scope="session")
def plain(ray_log: Path) -> Iterator[str]:
    """Run `latimer serve` with the same model, and yield its base URL."""
    address = f"http://127.0.0.1:{(port := free_port())}/v1"
    command = [str(BIN / "latimer"), "serve", "--port", str(port)]
    with program(command, address, ray_log.with_name("plain.log")):
        yield address
