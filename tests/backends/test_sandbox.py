"""Tests of scripts in a process with limits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.sandbox import LOOK, Ended, run

MEBIBYTE = 2**20
LIMITS: dict[str, Any] = {"cpu": 5, "memory": 512 * MEBIBYTE}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the file of a script."""
    return tmp_path / "script.py"


def test_a_slow_reader_gets_all(script: Path) -> None:
    """A script that begins to read late gets all of its input, which fills the pipe many times."""
    script.write_text(
        f"import sys, time; time.sleep({4 * LOOK}); print(len(sys.stdin.buffer.read()))"
    )
    ended = run(script, bytes(4 * MEBIBYTE), wait=30, **LIMITS)
    assert ended == Ended(0, b"4194304\n")


def test_an_unread_input_is_no_error(script: Path) -> None:
    """A script may end without reading its input."""
    script.write_text("print('done')")
    assert run(script, bytes(4 * MEBIBYTE), wait=30, **LIMITS) == Ended(0, b"done\n")


def test_files_as_input_and_output(script: Path, tmp_path: Path) -> None:
    """A script can have files instead of pipes; its output is then not returned."""
    script.write_text(
        "import sys; sys.stdin.buffer.seek(2); sys.stdout.buffer.write(sys.stdin.buffer.read())"
    )
    (tmp_path / "in").write_bytes(b"abcd")
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as target:
        assert run(script, source, wait=30, output=target, **LIMITS) == Ended(0)
    assert (tmp_path / "out").read_bytes() == b"cd"


def test_the_time_is_limited(script: Path) -> None:
    """A script that neither reads nor ends is killed in time."""
    script.write_text("import time; time.sleep(60)")
    begin = time.monotonic()
    assert run(script, bytes(4 * MEBIBYTE), wait=0.5, **LIMITS) == Ended(None)
    assert time.monotonic() - begin < 20
