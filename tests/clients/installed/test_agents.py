"""Coding agents work in a folder with their own tools; a llama-server returns scripted answers.

Codex uses the Responses API, and Claude Code the Messages API.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from clients.installed.conftest import Packages
from support import notes_server
from support.codex import call, stepped
from support.engines.front import directed
from support.environments import Environment
from support.forwarding import forwarding
from support.servers import command, llama_server

pytestmark = pytest.mark.timeout(1200)
TEXT = "Bonjour from the agent\n"
DONE = "The file is written."
ANSWERED = re.compile(r"ANSWER:([0-9a-f]+):END")
KEY = {"OPENAI_API_KEY": "unused"}
OPENCODE = """{"autoupdate": false, "share": "disabled", "provider": {"latimer": {
  "npm": "@ai-sdk/openai-compatible",
  "options": {"baseURL": "@URL", "apiKey": "unused"},
  "models": {"demo": {"limit": {"context": 131072, "output": 4096}}}}}}
"""
PI = """{"providers": {"latimer": {"baseUrl": "@URL", "api": "openai-completions",
  "apiKey": "unused", "models": [{"id": "demo"}]}}}
"""
OPENCLAW = """{
  "models": {"providers": {"latimer": {
    "baseUrl": "@URL", "apiKey": "unused", "api": "openai-completions",
    "models": [{"id": "demo", "name": "demo", "contextWindow": 131072, "maxTokens": 4096}]}}},
  "agents": {"defaults": {"model": {"primary": "latimer/demo"}}}}
"""
COPILOT = {
    "COPILOT_OFFLINE": "true", "COPILOT_PROVIDER_BASE_URL": "@URL", "COPILOT_MODEL": "demo"
}  # fmt: skip
CONTINUE = """
name: local
version: 1.0.0
schema: v1
models:
  - name: demo
    provider: openai
    model: demo
    apiBase: @URL
    apiKey: unused
    roles: [chat]
"""
# The tools of Claude Code that a task with files needs.
TOOLS = "Write,Read,Edit,Bash"
CODEX = """
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
# What a user sets who has nothing but a base URL.
BASE_URL = """
model = "demo"
openai_base_url = "@URL"
"""
NOTES = f"""
[mcp_servers.notes]
command = {json.dumps(sys.executable)}
args = [{json.dumps(notes_server.__file__)}]
"""
WORK_DONE = "The work is done."
LAST = ("<think>All is ", "there.</think>", WORK_DONE)
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
# The share of a prompt that the engine of Claude Code's fifth turn has read before, at least.
LEAST_CACHED = 0.95


def claude_scripts(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Return what Claude Code's model does with a file, by the number of results it has seen."""
    file = {"file_path": str(path)}
    edit = {**file, "old_string": "Bonjour", "new_string": "Salut"}
    show = {"command": f"cat {path.name}", "description": "Show the file"}
    return {
        "0": ("<think>I need ", *call("a file.", "Write", **file, content="Bonjour\n")),
        "1": ("<think>Let me ", *call("look at it.", "Read", **file)),
        "2": ("<think>Better ", *call("another word.", "Edit", **edit)),
        "3": ("<think>Now I ", *call("check it.", "Bash", **show)),
        "4": LAST,
    }


class Agent(NamedTuple):
    """An agent: its commands, its settings, and its tool that writes a file.

    Args:
        words: the command; the prompt is its last argument.
        arguments: the names of the tool's arguments for a path and a content.
        files: settings, by their path in the home folder.
        before, after: commands that run first, and at the end.
    """

    words: tuple[str, ...]
    tool: str
    arguments: tuple[str, str]
    files: dict[str, str] = {}  # noqa: RUF012
    variables: dict[str, str] = {}  # noqa: RUF012
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


AGENTS = {
    "qwen-code": Agent(
        ("qwen", "--auth-type", "openai", "--yolo", "-p"), "write_file", ("file_path", "content"),
        variables={**KEY, "OPENAI_BASE_URL": "@URL", "OPENAI_MODEL": "demo"},
    ),
    "opencode": Agent(
        ("opencode", "run", "--model", "latimer/demo"), "write", ("filePath", "content"),
        files={".config/opencode/opencode.json": OPENCODE},
    ),
    "pi": Agent(
        ("pi", "-p", "--provider", "latimer", "--model", "demo"), "write", ("path", "content"),
        files={".pi/agent/models.json": PI},
    ),
    "opencode, responses": Agent(
        ("opencode", "run", "--model", "latimer/demo"), "write", ("filePath", "content"),
        files={".config/opencode/opencode.json": OPENCODE.replace("-compatible", "")},
    ),
    "pi, responses": Agent(
        ("pi", "-p", "--provider", "latimer", "--model", "demo"), "write", ("path", "content"),
        files={".pi/agent/models.json": PI.replace("completions", "responses")},
    ),
    "claude code": Agent(
        ("node", "@MODULES/@anthropic-ai/claude-code/cli-wrapper.cjs", "--model", "demo",
         "--allowedTools", "Write", "--permission-mode", "acceptEdits", "-p"),
        "Write", ("file_path", "content"),
        variables={
            "ANTHROPIC_BASE_URL": "@ROOT", "ANTHROPIC_AUTH_TOKEN": "unused",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "continue": Agent(
        ("cn", "-p", "--auto", "--config", "@HOME/config.yaml"), "Write", ("filepath", "content"),
        files={"config.yaml": CONTINUE}, variables={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "cline": Agent(
        ("cline",), "editor", ("path", "new_text"),
        before=("cline", "auth", "-p", "openai", "-k", "unused", "-m", "demo", "-b", "@URL"),
        # It leaves a process in the background.
        after=("cline", "hub", "stop"),
    ),
    "copilot": Agent(
        ("copilot", "--allow-all-tools", "-p"), "create", ("path", "file_text"), variables=COPILOT,
    ),
    "copilot, responses": Agent(
        ("copilot", "--allow-all-tools", "-p"), "create", ("path", "file_text"),
        variables={**COPILOT, "COPILOT_PROVIDER_WIRE_API": "responses"},
    ),
    "copilot, websocket": Agent(
        ("copilot", "--allow-all-tools", "-p"), "create", ("path", "file_text"),
        variables={
            **COPILOT, "COPILOT_PROVIDER_WIRE_API": "responses",
            "COPILOT_PROVIDER_TRANSPORT": "websockets",
        },
    ),
    "copilot, messages": Agent(
        ("copilot", "--allow-all-tools", "-p"), "create", ("path", "file_text"),
        variables={
            **COPILOT, "COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_BASE_URL": "@ROOT",
        },
    ),
    "openclaw": Agent(
        ("openclaw", "agent", "exec"), "write", ("path", "content"),
        files={".openclaw/openclaw.json": OPENCLAW},
    ),
    "openclaw, responses": Agent(
        ("openclaw", "agent", "exec"), "write", ("path", "content"),
        files={".openclaw/openclaw.json": OPENCLAW.replace("completions", "responses")},
    ),
    "openclaw, messages": Agent(
        ("openclaw", "agent", "exec"), "write", ("path", "content"),
        files={
            ".openclaw/openclaw.json":
            OPENCLAW.replace("@URL", "@ROOT").replace("openai-completions", "anthropic-messages"),
        },
    ),
}  # fmt: skip


def answer(prompt: str) -> str:
    """Return the answer that the user's message contains, until the agent has followed it."""
    wanted = ANSWERED.search(prompt)
    if wanted is None or TEXT.strip() in prompt:
        return DONE
    return bytes.fromhex(wanted[1]).decode()


@pytest.fixture(scope="module")
def url(engine: str) -> Iterator[str]:
    """Serve the scripted answers with Latimer."""
    with directed(engine, answer) as written, command(written, "--model-name", "demo") as (_, it):
        yield f"{it}/v1"


def told(text: str) -> str:
    """Return a prompt that is answered with a text."""
    return f"Write a file. ANSWER:{text.encode().hex()}:END"


def run(words: tuple[str, ...], folder: Path, variables: dict[str, str]) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_writes_a_file(
    name: str,
    url: str,
    node_of: Callable[[str], Packages],
    own_home: dict[str, str],
    tmp_path: Path,
) -> None:
    """The agent calls its tool, sends the result back, and shows the last answer."""
    agent = AGENTS[name]
    home = own_home["HOME"]
    made = node_of("agents")

    def local(text: str) -> str:
        places = {
            "@URL": url,
            "@ROOT": url.removesuffix("/v1"),
            "@HOME": home,
            "@MODULES": str(made.folder / "node_modules"),
        }
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    for path, text in agent.files.items():
        (Path(home) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(home) / path).write_text(local(text))
    folder = tmp_path / "work"
    folder.mkdir()
    more = {key: local(value) for key, value in agent.variables.items()}
    variables = made.variables(own_home) | more
    values: list[Any] = [str(folder / "hello.txt"), TEXT]
    call = {"name": agent.tool, "arguments": dict(zip(agent.arguments, values, strict=True))}
    prompt = told(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    if agent.before:
        run(tuple(map(local, agent.before)), folder, variables)
    try:
        said = run((*map(local, agent.words), prompt), folder, variables)
    finally:
        if agent.after:
            run(agent.after, folder, variables)
    assert (folder / "hello.txt").read_text().strip() == TEXT.strip()
    assert DONE in said


def test_claude_code_finds_its_conversation_in_the_cache(
    node_of: Callable[[str], Packages],
    own_home: dict[str, str],
    tmp_path: Path,
    record_property: Callable[[str, str], None],
) -> None:
    """Claude Code does a task in five turns, and the engine has most of its last prompt cached."""
    agent, folder, made = AGENTS["claude code"], tmp_path / "work", node_of("agents")
    folder.mkdir()
    path = folder / "hello.txt"
    model = stepped(tmp_path / "steps.gguf", claude_scripts(path), 32_768)
    # Few tools keep the prompt short for a model whose tokens are bytes.
    own = ("--tools", TOOLS, "--allowedTools", TOOLS, "--permission-mode", "acceptEdits")
    shown = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")
    with command(str(model), "--context", "32768", "--any-model") as (_, address):
        words = [
            one.replace("@MODULES", str(made.folder / "node_modules")) for one in agent.words[:4]
        ]
        more = {key: one.replace("@ROOT", address) for key, one in agent.variables.items()}
        variables = made.variables(own_home) | more
        said = run((*words, *own, *shown, "-p", "Write hello.txt."), folder, variables)
    assert path.read_text() == "Salut\n"
    events = [json.loads(line).get("event", {}) for line in said.splitlines()]
    usages = [one["usage"] for one in events if one.get("type") == "message_delta"]
    assert len(usages) == 5
    cached = usages[-1]["cache_read_input_tokens"]
    size = cached + usages[-1]["input_tokens"]
    record_property("claude code", f"{cached} of {size} tokens of the fifth prompt were cached")
    assert cached >= LEAST_CACHED * size


def test_aider_writes_a_file(
    url: str, python_of: Callable[[str], Environment], tmp_path: Path
) -> None:
    """aider, which calls no tools, applies the file of the answer."""
    made = python_of("aider")
    words = (
        "aider", "--model", "openai/demo", "--edit-format", "whole", "--no-git", "--yes-always",
        "--no-show-model-warnings", "--no-check-update", "--analytics-disable",
    )  # fmt: skip
    prompt = told(f"hello.txt\n```\n{TEXT}```\n")
    variables = made.variables(**KEY, OPENAI_API_BASE=url, TERM="dumb")
    run((*words, "--message", prompt, "hello.txt"), tmp_path, variables)
    assert (tmp_path / "hello.txt").read_text() == TEXT


@pytest.fixture
def codex_at(
    node_of: Callable[[str], Packages], own_home: dict[str, str], tmp_path: Path
) -> Callable[[str], Run]:
    """Return a function that sets Codex up for an address and returns one that runs it."""
    settings = Path(own_home["HOME"]) / ".codex" / "config.toml"
    settings.parent.mkdir()
    folder = tmp_path / "work"
    folder.mkdir()
    variables = node_of("agents").variables(own_home) | {"CODEX_API_KEY": "unused"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        safe = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        return subprocess.run(
            ("codex", "exec", *safe, *words), cwd=folder, env=variables,
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def make(address: str, form: str = CODEX) -> Run:
        settings.write_text(form.replace("@URL", f"{address}/v1") + NOTES)
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
        assert done.stdout.strip() == WORK_DONE
        assert SHOWN[model] in done.stderr
        written_files = {path.name: path.read_text() for path in (tmp_path / "work").iterdir()}
        assert written_files.pop("hello.txt") == "Bonjour\n"
        assert written_files == ({"patched.txt": "Salut\n"} if model == "gpt-5.5" else {})
        # The results of the first run are in the prompt of the second, so that it only answers.
        later = codex("resume", "-m", model, "--last", "And now?")
        assert later.returncode == 0, later.stderr[-5000:]
        assert later.stdout.strip() == WORK_DONE
        assert "hello.txt" not in later.stderr


@pytest.mark.parametrize("model", SCRIPTS)
def test_codex_needs_only_a_base_url(
    model: str, codex_at: Callable[..., Run], tmp_path: Path
) -> None:
    """Codex opens a WebSocket, sends what is new only, uses tools, resumes, and logs no error."""
    scripts = SCRIPTS[model]
    with (
        llama_server(stepped(tmp_path / "steps.gguf", scripts)) as real,
        directed(real, lambda prompt: "".join(scripts.get(prompt[-1], ("",)))) as written,
        command(written, "--model-name", model) as (_, address),
        forwarding(address) as (front, begun),
    ):
        codex = codex_at(front, BASE_URL)
        for words in (("-m", model, "Write hello.txt."), ("resume", "-m", model, "--last", "So?")):
            done = codex(*words)
            assert done.returncode == 0, done.stderr[-5000:]
            assert done.stdout.strip() == WORK_DONE
            assert " ERROR " not in done.stderr
    assert (tmp_path / "work" / "hello.txt").read_text() == "Bonjour\n"
    paths = [line.split()[:2] for line in begun]
    assert ["GET", "/v1/responses"] in paths
    assert ["POST", "/v1/responses"] not in paths


def test_codex_knows_a_full_context(codex_at: Callable[[str], Run]) -> None:
    """Codex says that the context is full, and does not send the request again."""
    with command("--model-name", "demo", "--threads", "1") as (_, address):
        done = codex_at(address)("Hello?")
    assert done.returncode == 1
    assert "ran out of room in the model's context window" in done.stderr
