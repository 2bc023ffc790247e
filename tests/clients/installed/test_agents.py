"""Coding agents write a file with their own tools; a llama-server returns scripted answers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.engines.front import directed
from support.environments import Environment
from support.servers import command

# Both files of agents use one environment, so one worker runs them.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.xdist_group("agents")]
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
    name: str, url: str, node_of: Callable[[str], Path], own_home: dict[str, str], tmp_path: Path
) -> None:
    """The agent calls its tool, sends the result back, and shows the last answer."""
    agent = AGENTS[name]
    home = own_home["HOME"]
    own = node_of("agents") / "node_modules" / ".bin"

    def local(text: str) -> str:
        return text.replace("@URL", url).replace("@HOME", home)

    for path, text in agent.files.items():
        (Path(home) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(home) / path).write_text(local(text))
    folder = tmp_path / "work"
    folder.mkdir()
    more = {key: local(value) for key, value in agent.variables.items()}
    variables = {**own_home, **more, "PATH": f"{own}:{own_home['PATH']}"}
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
