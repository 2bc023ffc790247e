"""Tests of `pip install .` alone: the proxy works, and errors name the missing extra."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from install.commands import imported, serving
from latimer.backends.llama_cpp import DEMO_MODEL
from support.environments import Environment, ask

pytestmark = pytest.mark.timeout(600)
ANSWER = "The capital of France is Paris."
PACKAGES = ("latimer.adapter", "latimer.backends", "latimer.schemas")


def test_every_module_imports(plain: Environment) -> None:
    """All modules import, except those of extras and the suite's."""
    extras = (
        "latimer.backends.llama_cpp.",
        "latimer.adapter.limits.postgresql",
        "latimer.adapter.limits.redis",
        "latimer.adapter.ray_serve",
        "latimer.adapter.traces",
    )
    assert imported(plain, *PACKAGES, without=" ".join(extras)) > 60


def test_it_serves_an_engine(plain: Environment, llama_server_url: str) -> None:
    """`latimer serve URL` answers, also with `--fetch-images`, which needs no extra."""
    with serving(plain, llama_server_url, "--fetch-images") as address:
        assert ask(address) == ANSWER


def test_it_checks_an_engine(plain: Environment, llama_server_url: str) -> None:
    """`latimer check URL` names the engine."""
    assert "llama-server" in plain.run("latimer", "check", llama_server_url).stdout


@pytest.mark.parametrize(
    ("words", "feature", "extra"),
    [
        (["serve", str(DEMO_MODEL), "--backend", "llama-cpp"], "llama.cpp in process", "llama-cpp"),
        (["serve", "--backend", "llama-cpp"], "llama.cpp in process", "llama-cpp"),
        (["check", "--backend", "llama-cpp"], "llama.cpp in process", "llama-cpp"),
        (["conform", "http://127.0.0.1:1/v1"], "'latimer conform'", "conformance"),
        (["conform", "--help"], "'latimer conform'", "conformance"),
        (
            ["serve", "http://127.0.0.1:1", "--logit-bias-vocabulary", "cl100k_base"],
            "logit_bias_vocabulary",
            "tiktoken",
        ),
    ],
)
def test_commands_name_the_missing_extra(
    plain: Environment, words: list[str], feature: str, extra: str
) -> None:
    """A command that needs an extra exits with 3 and says what to install."""
    # Its lines are then for people, as on a terminal.
    more = ["--no-log-requests"] if words[0] == "serve" else []
    said = plain.run("latimer", *words, *more, code=3).stderr
    wanted = f"{feature} requires the extra '{extra}': run pip install '.[{extra}]' in a clone of "
    wanted += "Latimer."
    if extra == "llama-cpp":
        wanted += " Without it, 'latimer serve' uses a llama-server: from llama.cpp, or of "
        wanted += "pip install xllamacpp. An app uses one that runs: LlamaServer(URL)."
    prefix = {"serve": "Latimer cannot start: ", "check": "Latimer cannot check: "}.get(
        words[0], ""
    )
    assert said == f"{prefix}{wanted}\n"


@pytest.mark.parametrize("words", [["serve", str(DEMO_MODEL)], ["serve"], ["check"]])
def test_commands_name_the_ways_to_an_engine(plain: Environment, words: list[str]) -> None:
    """Without an engine, a command exits with 3 and first names one that needs no compiler."""
    more = ["--no-log-requests"] if words[0] == "serve" else []
    said = plain.run("latimer", *words, *more, code=3).stderr
    assert said == (
        f"Latimer cannot {'start' if more else 'check'}: No engine is installed. In a clone of "
        "Latimer, run pip install '.[prebuilt]' for llama.cpp's server, which needs no compiler, "
        "or pip install '.[llama-cpp]' for llama.cpp in process. Or name the URL of a running "
        "engine, such as latimer serve http://127.0.0.1:8080\n"
    )


def test_requests_name_the_missing_extra(plain: Environment, llama_server_url: str) -> None:
    """A request that needs an extra gets a 400 that says what to install."""
    with serving(plain, llama_server_url) as address:
        body = {
            "model": "demo",
            "prompt": "One",
            "logit_bias": {"1": 1},
            "logit_bias_vocabulary": "cl100k_base",
        }
        model = httpx2.get(f"{address}/v1/models").json()["data"][0]["id"]
        reply = httpx2.post(f"{address}/v1/completions", json={**body, "model": model}, timeout=60)
    assert reply.status_code == 400
    assert "pip install '.[tiktoken]'" in reply.json()["error"]["message"]


def test_nothing_comes_from_the_checkout(plain: Environment) -> None:
    """Imports find the installed package, not the checkout."""
    shown = plain.run("python", "-c", "import latimer.adapter as it; print(it.__file__)").stdout
    assert Path(shown).is_relative_to(plain.folder / "venv")
