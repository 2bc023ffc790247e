"""Tests that the scripts of this folder still run. What they measure is not looked at."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import postgresql, redis_server

FOLDER = Path(__file__).parent
# Its packages are in an environment of its own.
OTHERS = ("sentence_transformers_speed",)
# All modules of the folder, which are the scripts and what they share.
MODULES = sorted({path.stem for path in FOLDER.glob("*.py")} - {Path(__file__).stem, *OTHERS})
# Short runs, and the beginnings of the rows that each prints. Those that take longer have none.
RUNS = {
    "batches.py --model demo --threads 1 --prompt 20 --sequences 1 --cells 8 --repeats 1": ("8 1",),
    "fleet.py --way prefix --conversations 2 --turns 2 --clients 2": ("prefix",),
    "groups.py --seconds 1": ("received", "task begins", "engine's data", "answer", "finish"),
    "logprobs.py speed --tokens 16 --rounds 1": ('"generate_ms":', '"score_ms":', '"decode_ms":'),
    "simulation.py --engines 4 --seconds 4": ("4 prefix", "4 session", "4 least busy"),
    "state_files.py --model demo --tokens 100": ('{"first_turn":',),
    "stored.py rows --rows 100": ("sqlite 100 rows", "sqlite first page", "sqlite a model"),
    "swaps.py --seconds 2 --load 0": ("collation", "by request"),
    "tails.py --turns 1 --seconds 0.2": ("plain 32", "plain 512", "streamed 32", "streamed 512"),
    "turns.py --instructions 100 --turns 2 --conversations 1 --repeats 1 --width 64": (
        "recurrent 1",
        "window 1",
    ),
}


def check(command: str, *rows: str) -> None:
    """Run a script, and check that it prints rows with these beginnings, and numbers after them."""
    name, *words = shlex.split(command)
    run = subprocess.run([sys.executable, FOLDER / name, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    printed = [re.sub(r"[| ]+", " ", line).strip() for line in run.stdout.splitlines()]
    for row in rows:
        found = [line for line in printed if line.startswith(row)]
        assert found, (row, run.stdout)
        for line in found:
            assert re.search(r"\d", line.removeprefix(row)), line
            assert not re.search(r"\b(nan|inf)\b", line), line


@pytest.mark.parametrize("name", MODULES)
def test_a_module_finds_what_it_imports(name: str) -> None:
    """Each module, class and function that a script imports from elsewhere is there."""
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS, ids=lambda command: command.partition(".")[0])
def test_a_short_run_prints_its_rows(command: str) -> None:
    """A short run of a script ends, and each row of its table has numbers."""
    check(command, *RUNS[command])


@pytest.mark.slow
def test_a_run_of_limits_prints_its_rows() -> None:
    """The benchmark of limits has a row for Redis and one for PostgreSQL."""
    reason = postgresql.missing() or redis_server.missing()
    if reason is not None:
        pytest.skip(reason)
    check("limits.py --requests 100", "Redis", "PostgreSQL")


@pytest.mark.slow
def test_the_steps_of_a_traced_run_have_rows(tmp_path: Path) -> None:
    """The comparison with llama-server has its row, and the trace of the run has each span."""
    trace = shlex.quote(str(tmp_path / "trace.json"))
    short = "--model demo --clients 1 --repeats 1 --tokens 4"
    check(f"engine.py {short} --modes 'sampled, streamed' --trace {trace}", "sampled, streamed")
    check(f"trace.py {trace} --sequences 1", "between steps", "decode", "sample", "hand over")
