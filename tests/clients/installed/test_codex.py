"""Codex works in a folder over the Responses API; a llama-server returns scripted answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support import notes_server
from support.director import directed
from support.servers import command, llama_server
from support.steps import call, stepped

pytestmark = pytest.mark.timeout(1200)
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


@pytest.fixture(params=SCRIPTS)
def model(request: pytest.FixtureRequest) -> str:
    """Return the name of a model: one of the user's own, and two that Codex knows."""
    return str(request.param)


@pytest.fixture
def codex(
    model: str, node_of: Callable[[str], Path], own_home: dict[str, str], tmp_path: Path
) -> Iterator[Run]:
    """Yield a function that runs `codex exec` with a scripted model."""
    scripts = SCRIPTS[model]
    path = stepped(tmp_path / "steps.gguf", scripts)
    own = node_of("agents") / "node_modules" / ".bin"
    settings = Path(own_home["HOME"]) / ".codex" / "config.toml"
    settings.parent.mkdir()
    folder = tmp_path / "work"
    folder.mkdir()
    variables = {**own_home, "PATH": f"{own}:{own_home['PATH']}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        safe = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        return subprocess.run(
            ("codex", "exec", *safe, "-m", model, *words), cwd=folder, env=variables,
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    with (
        llama_server(path) as real,
        directed(real, lambda prompt: "".join(scripts[prompt[-1]])) as written,
        command(written, "--model-name", model) as (_, address),
    ):
        settings.write_text(CONFIG.replace("@URL", f"{address}/v1") + NOTES)
        yield run


def test_codex_works_and_goes_on(codex: Run, model: str, tmp_path: Path) -> None:
    """Codex runs the calls, sends results and reasoning back, and continues the session later."""
    done = codex("Write hello.txt.")
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.strip() == DONE
    assert SHOWN[model] in done.stderr
    assert "exceeded retry limit" not in done.stderr
    written = {path.name: path.read_text() for path in (tmp_path / "work").iterdir()}
    assert written.pop("hello.txt") == "Bonjour\n"
    assert written == ({"patched.txt": "Salut\n"} if model == "gpt-5.5" else {})
    # The results of the first run are in the prompt of the second, so that it only answers.
    later = codex("resume", "--last", "And now?")
    assert later.returncode == 0, later.stderr[-5000:]
    assert later.stdout.strip() == DONE
    assert "exec_command" not in later.stderr
