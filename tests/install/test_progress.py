"""Tests of the progress that `make serve ENGINE=in-process` shows while it compiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from install.progress import percent_of, run


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("  [12/345] /usr/bin/c++ -DX[1/2] x.cpp\n", 3),
        ("[345/345] Linking\n", 100),
        ("  [  3%] Building CXX object\n", 3),
        ("[100%] Built target\n", 100),
        ("  -- Found Threads: TRUE\n", None),
        ("  x [1/2]\n", None),
    ],
)
def test_lines_have_percents(line: str, percent: int | None) -> None:
    """The steps of Ninja and Make are read, and nothing else."""
    assert percent_of(line) == percent


def test_progress_is_shown_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each twentieth is a line, and the log has all lines."""
    program = "for n in range(1, 201): print(f'  [{n}/200] c++')"
    log = tmp_path / "log"
    assert run(log, [sys.executable, "-c", program]) == 0
    assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == [
        *range(5, 101, 5)
    ]
    assert len(log.read_text().splitlines()) == 200


def test_a_failure_shows_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last lines, the log and the exit code tell why a compilation failed."""
    program = "import sys; print('first'); print('x\\n' * 50); print('no compiler'); sys.exit(3)"
    assert run(tmp_path / "log", [sys.executable, "-c", program]) == 3
    said = capsys.readouterr().out
    assert "no compiler\n    The whole output is in" in said
    assert "first" not in said
