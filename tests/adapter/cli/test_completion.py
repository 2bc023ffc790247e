"""Tests of `latimer completion`, `latimer --version`, and the sections of the help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from latimer.adapter.cli import main
from latimer.adapter.option import option_of
from latimer.adapter.settings import Settings
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server.command import SUPPORTED

COMMIT = "0123456789" * 4


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with one model, hf:test/one:Q8_0."""
    root = tmp_path / "models--test--one"
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    shutil.copy(DEMO_MODEL, root / "snapshots" / COMMIT / "one-Q8_0.gguf")
    monkeypatch.delenv("LLAMA_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def bash(line: str, folder: Path) -> list[str]:
    """Return the completions of a line in bash, as Tab would insert them."""
    script = CliRunner().invoke(main, ["completion", "bash"]).output
    code = (
        f'{script}\ncompopt() {{ COMPREPLY+=("compopt $*"); }}\n'
        f"COMP_LINE={line!r} COMP_POINT={len(line)}\n"
        "_latimer_completion latimer\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("latimer ser", ["serve"]),
        ("latimer serve --prompt-l", ["--prompt-lookup"]),
        ("latimer serve --backend ko", ["koboldcpp"]),
        ("latimer serve hf:te", ["test/one:Q8_0"]),
        ("latimer models rm ", ["hf:test/one:Q8_0"]),
        ("latimer serve ./x", ["compopt -o default"]),
    ],
)
def test_bash_completes(line: str, found: list[str], cache: Path) -> None:
    """Commands, options, choices, names of models and files are completed after a Tab in bash."""
    assert bash(line, cache) == found


def test_every_shell_has_a_script() -> None:
    """bash, zsh and fish have a script, and another shell is wrong usage."""
    for shell in ("bash", "zsh", "fish"):
        done = CliRunner().invoke(main, ["completion", shell])
        assert done.exit_code == 0
        assert "_LATIMER_COMPLETE" in done.output
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=done.output, text=True, check=True, timeout=60)
    assert CliRunner().invoke(main, ["completion", "tcsh"]).exit_code == 2


def test_a_completion_imports_no_engine(cache: Path) -> None:
    """The completion of a model's name imports no server, no engine and no client of the hub."""
    code = (
        "import sys\nfrom latimer.adapter.cli import main\n"
        "try:\n main(prog_name='latimer')\nexcept SystemExit:\n pass\n"
        "heavy = {'uvicorn', 'starlette', 'llama_cpp', 'numpy', 'jinja2', 'httpx2'}\n"
        "print(heavy & sys.modules.keys())"
    )
    environment = {"COMP_WORDS": "latimer serve hf:", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={**os.environ, **environment, "_LATIMER_COMPLETE": "bash_complete"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["plain,hf:test/one:Q8_0", "set()"]


def test_the_version_has_the_builds_of_llama_cpp() -> None:
    """`--version` has the commit in process and the build of the server; the first line stays."""
    done = subprocess.run(["latimer", "--version"], capture_output=True, text=True, check=True)
    first, process, server = done.stdout.splitlines()
    assert re.fullmatch(r"latimer, version \d+\.\d+\.\d+", first)
    assert re.match(
        r"llama\.cpp in process: llama-cpp-python [\d.]+, llama\.cpp commit [0-9a-f]+", process
    )
    assert re.match(r"llama-server: .*\d.* \(/.*llama-server\)", server)


def test_the_version_imports_no_engine() -> None:
    """`--version` loads neither the in-process engine nor a server."""
    code = (
        "import sys\nfrom latimer.adapter.cli.report import versions\nversions()\n"
        "heavy = {'uvicorn', 'starlette', 'llama_cpp', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_help_has_sections() -> None:
    """The help of `serve` has a section for each group of settings, each with its options."""
    shown = CliRunner().invoke(main, ["serve", "--help"], terminal_width=100).output
    sections = dict(re.findall(r"^(\w[\w ]*):\n((?:  .*\n|\n)+)", shown, re.MULTILINE))
    groups = {
        option_of(field).group
        for name, field in Settings.model_fields.items()
        if not option_of(field).is_table
    }
    assert groups | {"Options"} == sections.keys() - {"Usage"}
    assert "--context " in sections["Model file"]
    assert "--host " in sections["Clients"]
    # A flag that is too long for its column has a line of its own.
    texts = re.split(r"\n  (?=-)", "\n".join(sections.values()))
    assert max(len([line for line in text.split("\n")[:] if line.strip()]) for text in texts) <= 3


def test_options_in_process_are_those_that_a_llama_server_does_not_have() -> None:
    """The help marks the options of a file that a llama-server of Latimer's own does not know."""
    for name, field in Settings.model_fields.items():
        option = option_of(field)
        if option.needs == "a GGUF file":
            assert option.in_process == (option.argument_of(name) not in SUPPORTED), name
