"""Tests of standard streams that cannot block or fail."""

from __future__ import annotations

import subprocess
import sys

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
