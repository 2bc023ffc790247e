"""Each library's program runs in the library's own environment, against both engines."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from clients.installed.conftest import HERE, Packages
from support.environments import Environment

pytestmark = pytest.mark.timeout(1200)
PYTHON = HERE / "python"
ENVIRONMENTS = {
    "openai": (
        "openai_client", "openai_responses", "openai_agents_client", "openai_agents_responses",
        "openai_agents_websocket", "inspect_client", "pydantic_ai_client", "pydantic_ai_messages",
        "llm_client",
    ),
    "frameworks": (
        "langchain_client", "langchain_responses", "langchain_messages", "langchain_audio",
        "langchain_embeddings", "langchain_standard", "litellm_client", "dspy_client",
        "smolagents_client",
    ),
    # They do not take the current client of OpenAI's.
    "openai_2": ("instructor_client", "llama_index_client", "llama_index_embeddings"),
}  # fmt: skip
NODE = (
    "openai", "openai_responses", "ai_sdk", "ai_sdk_responses", "langchain", "langchain_responses",
    "openai_agents", "openai_agents_responses", "messages", "ai_sdk_messages", "langchain_messages",
    "openai_audio", "ai_sdk_audio", "langchain_audio",
)  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "program"),
    [(name, one) for name, programs in ENVIRONMENTS.items() for one in programs],
)
def test_python(
    environment: str,
    program: str,
    python_of: Callable[[str], Environment],
    run_in: Callable[..., str],
    record_property: Callable[[str, str], None],
) -> None:
    """Every test of a Python client passes."""
    made = python_of(environment)
    words = ["python", "-m", "pytest", "-q", "-c", str(PYTHON / "pytest.ini"), "--tb=short"]
    output = run_in([*words, str(PYTHON / f"{program}.py")], made.work, made.variables())
    record_property(program, output.splitlines()[-1])


@pytest.mark.parametrize("program", NODE)
def test_node(
    program: str,
    node_of: Callable[[str], Packages],
    run_in: Callable[..., str],
    record_property: Callable[[str, str], None],
) -> None:
    """Every test of a client for Node.js passes."""
    made = node_of("node")
    # Imports are found from the file's own folder upwards.
    for one in (HERE / "node").glob("*.mjs"):
        (made.folder / one.name).write_text(one.read_text())
    words = ["node", "--test", "--test-reporter=tap", f"{program}.test.mjs"]
    output = run_in(words, made.folder, made.variables(os.environ))
    counts = [line[2:] for line in output.splitlines() if line.startswith(("# pass", "# fail"))]
    record_property(f"{program} (Node.js)", ", ".join(counts))
