"""Simon Willison's `llm` command, with a model of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Llm = Callable[..., str]

TOM = "Give me JSON for Tom, age 33."
MODELS = """
- model_id: local
  model_name: demo
  api_base: {url}
  supports_tools: true
  supports_schema: true
- model_id: local-text
  model_name: demo
  api_base: {url}
  completion: true
"""
TOOL = '''
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return '{"temp_c": 21}'
'''


@pytest.fixture(scope="session")
def llm(url: str, tmp_path_factory: pytest.TempPathFactory) -> Llm:
    """Return a function that runs the command and returns its output."""
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=url))
    variables = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "unused"}

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).parent / "llm"), *words], env=variables, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


@pytest.mark.parametrize("more", [[], ["--no-stream"]], ids=["stream", "plain"])
def test_chat(llm: Llm, more: list[str]) -> None:
    """A prompt is answered."""
    said = llm("-m", "local", "-o", "temperature", "0", *more, "What is the capital of France?")
    assert said == "The capital of France is Paris.\n"


def test_tools(llm: Llm) -> None:
    """A function is called and its result used."""
    said = llm(
        "-m", "local", "-o", "temperature", "0", "--functions", TOOL, "--td",
        "What is the weather in Paris?",
    )  # fmt: skip
    assert "21" in said


def test_structured(llm: Llm) -> None:
    """A schema is enforced."""
    said = llm(
        "-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "100",
        "--schema", "name str, age int",
        TOM,
    )  # fmt: skip
    assert list(json.loads(said)) == ["name", "age"]


def test_completions(llm: Llm) -> None:
    """A completion model continues a text."""
    said = llm(
        "-m", "local-text", "-o", "temperature", "0", "-o", "max_tokens", "9",
        "Q: What is the capital of Japan?\nA:",
    )  # fmt: skip
    assert "Tokyo" in said


def test_errors(llm: Llm) -> None:
    """The message of an error is shown."""
    assert "maximum context length" in llm("-m", "local", "word " * 5000, code=1)
