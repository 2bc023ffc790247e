"""Codex works in a folder over the Responses API; a llama-server returns scripted answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support import notes_server
from support.codex import call, stepped
from support.engines.front import directed
from support.servers import command, llama_server

# Both files of agents use one environment, so one worker runs them.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.xdist_group("agents")]
CONFIG = """
model = "demo"
model_provider = "latimer"
model_context_window = 131072
check_for_update_on_startup = false
analytics.enabled = false

[model_providers.latimer]
name = "Latimer"
base_url = "@URL"
wire_api = "responses"
"""
NOTES = f"""
[mcp_servers.notes]
command = {json.dumps(sys.executable)}
args = [{json.dumps(notes_server.__file__)}]
"""
DONE = "The work is done."
LAST = ("<think>All is ", "there.</think>", DONE)
WRITE = call("a file.", "exec_command", cmd="echo Bonjour > hello.txt")
PATCH = "*** Begin Patch\n*** Add File: patched.txt\n+Salut\n*** End Patch\n"
SCRIPT = 'text((await tools.exec_command({cmd: "echo Bonjour > hello.txt"})).output);'
# What the model does by the number of results that it has seen. Codex offers other tools to the
# models of its own list: patches as text, a search for the tools of MCP servers, JavaScript.
SCRIPTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "demo": {
        "0": ("<think>I need ", *WRITE),
        "1": ("<think>Now the ", *call("notes.", "mcp__notes__count", tag="seven")),
        "2": LAST,
    },
    "gpt-5.5": {
        "0": ("<think>I need ", *WRITE),
        "1": ("<think>Now a ", *call("patch.", "apply_patch", input=PATCH)),
        "2": LAST,
    },
    "gpt-6.1-sol": {
        "0": ("<think>I need ", *call("code.", "functions__exec", input=SCRIPT)),
        "1": LAST,
    },
}
SHOWN = {"demo": "mcp: notes/count (completed)", "gpt-5.5": "patch: completed", "gpt-6.1-sol": ""}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def codex_at(
    node_of: Callable[[str], Path], own_home: dict[str, str], tmp_path: Path
) -> Callable[[str], Run]:
    """Return a function that sets Codex up for an address and returns one that runs it."""
    own = node_of("agents") / "node_modules" / ".bin"
    settings = Path(own_home["HOME"]) / ".codex" / "config.toml"
    settings.parent.mkdir()
    folder = tmp_path / "work"
    folder.mkdir()
    variables = {**own_home, "PATH": f"{own}:{own_home['PATH']}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        safe = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        return subprocess.run(
            ("codex", "exec", *safe, *words), cwd=folder, env=variables,
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def make(address: str) -> Run:
        settings.write_text(CONFIG.replace("@URL", f"{address}/v1") + NOTES)
        return run

    return make


@pytest.mark.parametrize("model", SCRIPTS)
def test_codex_works_and_resumes(
    model: str, codex_at: Callable[[str], Run], tmp_path: Path
) -> None:
    """Codex runs the calls, sends results and reasoning back, and continues the session later."""
    scripts = SCRIPTS[model]
    with (
        llama_server(stepped(tmp_path / "steps.gguf", scripts)) as real,
        directed(real, lambda prompt: "".join(scripts[prompt[-1]])) as written,
        command(written, "--model-name", model) as (_, address),
    ):
        codex = codex_at(address)
        done = codex("-m", model, "Write hello.txt.")
        assert done.returncode == 0, done.stderr[-5000:]
        assert done.stdout.strip() == DONE
        assert SHOWN[model] in done.stderr
        written_files = {path.name: path.read_text() for path in (tmp_path / "work").iterdir()}
        assert written_files.pop("hello.txt") == "Bonjour\n"
        assert written_files == ({"patched.txt": "Salut\n"} if model == "gpt-5.5" else {})
        # The results of the first run are in the prompt of the second, so that it only answers.
        later = codex("resume", "-m", model, "--last", "And now?")
        assert later.returncode == 0, later.stderr[-5000:]
        assert later.stdout.strip() == DONE
        assert "hello.txt" not in later.stderr


def test_codex_knows_a_full_context(codex_at: Callable[[str], Run]) -> None:
    """Codex says that the context is full, and does not send the request again."""
    with command("--model-name", "demo", "--threads", "1") as (_, address):
        done = codex_at(address)("Hello?")
    assert done.returncode == 1
    assert "ran out of room in the model's context window" in done.stderr
