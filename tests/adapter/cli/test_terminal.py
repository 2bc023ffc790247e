"""Tests of standard streams that cannot block or fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from latimer.backends.llama_cpp import DEMO_MODEL
from support.copies import Latimer
from support.servers import free_port, wait_for

CODE = """
import sys
from latimer.adapter.cli import terminal
terminal.secure()
sys.stderr.write("x" * 99 + "\\n")
for _ in range(20):
    sys.stderr.write("y" * 99_999 + "\\n")
print("z" * 200_000)
"""


def test_a_log_that_nobody_reads_is_dropped() -> None:
    """A full pipe for the log does not stop the process, and its output is complete."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout, process.stderr:
        assert len(process.stdout.read()) == 200_001
        assert process.wait(30) == 0
        logged = process.stderr.read()
    assert logged.startswith(b"x" * 99 + b"\n" + b"y" * 1000)
    assert len(logged) < 1_000_000


FULL = """
import resource, sys
from latimer.adapter.cli import terminal
terminal.secure()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
print("one", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
print("two is cut", file=sys.stderr)
print("three is lost", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("four", file=sys.stderr)
print("five", file=sys.stderr)
"""


def test_a_line_after_a_full_disk_is_whole(tmp_path: Path) -> None:
    """The first line after a full disk is not joined with one that is there in part."""
    file = tmp_path / "log"
    with file.open("ab") as log:
        subprocess.run([sys.executable, "-c", FULL], stderr=log, check=True, timeout=30)
    assert file.read_text() == "one\ntw\nfour\nfive\n"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_log_has_no_lines_below_its_level(workers: str, tmp_path: Path) -> None:
    """`--log-level error` leaves a log without errors empty, and `info` has the lines of the start
    and of the end."""
    for level, expected in (("error", set()), ("info", {"start", "drain"})):
        port = free_port()
        file = tmp_path / level
        options = [str(DEMO_MODEL), "--backend", "llama-server"]
        if workers == "2":
            options = ["http://127.0.0.1:1", "--workers", workers]
        options += ["--log-level", level, "--port", str(port)]
        with file.open("wb") as log:
            process: Latimer[bytes] = Latimer(["latimer", "serve", *options], stderr=log)
            try:
                wait_for(f"http://127.0.0.1:{port}/", process)
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
        events = {json.loads(line)["event"] for line in file.read_text().splitlines()}
        assert events >= expected
        assert bool(events) == bool(expected), events
