"""Environments of the clients, and a Latimer with each of two engines."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.codex import in_steps
from support.dictation import dictation
from support.embeddings import MODELS, ids_of, vector_of
from support.environments import ROOT, Environment
from support.servers import command, llama_server, serving

HERE = Path(__file__).parent
RECORDING = ROOT / "tests" / "conformance" / "recordings" / "sentence.wav"
# Kept between runs; an environment is rebuilt when its list of versions changes.
KEPT = ROOT / ".venv-clients"
collect_ignore = ["python", "node", "agents", "runtime"]
# LangChain sends ids of this vocabulary; a package in the environment has its file.
VOCABULARY = "cl100k_base"
TIKTOKEN = "lib/python3*/site-packages/llama_index/core/_static/tiktoken_cache"
TEXTS = [
    "the capital of France", "mira vipa kato", "text 1", "été, naïve",
    "a [SEP] b <s> <|endoftext|>", "日本語 🎉 12", "the quick brown fox " * 12,
]  # fmt: skip


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Let one worker at a time make an environment; the others wait, and find it."""
    KEPT.mkdir(exist_ok=True)
    with (KEPT / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _folder(name: str, *lists: Path) -> tuple[Path, bool]:
    """Return an environment's folder, and True if it matches the lists."""
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in lists)).hexdigest()
    folder = KEPT / name
    known = folder / "installed"
    if known.exists() and known.read_text() == digest:
        return folder, True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "digest").write_text(digest)
    return folder, False


def _done(folder: Path) -> None:
    (folder / "digest").rename(folder / "installed")


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], Environment]:
    """Return a function that makes the environment of `python/NAME.txt`."""

    def make(name: str) -> Environment:
        versions = HERE / "python" / f"{name}.txt"
        with _locked(name):
            folder, known = _folder(name, versions)
            if known:
                return Environment(folder)
            made = Environment.made(folder)
            made.run("pip", "install", "-q", "-r", str(versions))
            _done(folder)
            return made

    return make


@dataclass(frozen=True)
class Packages:
    """A folder with `node_modules`, and the folders of programs that come first on the path."""

    folder: Path
    programs: tuple[Path, ...]

    def variables(self, known: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables for programs of the packages."""
        return {**known, "PATH": os.pathsep.join([*map(str, self.programs), known["PATH"]])}


def _packages(name: str, runtime: tuple[Path, ...] = ()) -> Packages:
    """Make the `node_modules` of `NAME/package.json` with the Node.js of another folder."""
    lists = [HERE / name / one for one in ("package.json", "package-lock.json")]
    with _locked(f"npm-{name}"):
        folder, known = _folder(f"npm-{name}", *lists)
        made = Packages(folder, (folder / "node_modules" / ".bin", *runtime))
        if not known:
            for one in lists:
                shutil.copy(one, folder)
            # Not `npm ci`: the list lacks binaries of other systems, which are optional.
            words = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"]
            done = subprocess.run(
                words, cwd=folder, env=made.variables(os.environ), capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
            _done(folder)
        return made


@pytest.fixture(scope="session")
def node_of() -> Callable[[str], Packages]:
    """Return a function that makes the packages of `NAME/package.json`."""

    def make(name: str) -> Packages:
        if shutil.which("npm") is None:
            pytest.skip("needs Node.js, with npm")
        # Clients need a newer Node.js than many machines have, and some check it as they install.
        return _packages(name, _packages("runtime").programs)

    return make


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    """Run a real llama-server with the demo model."""
    with llama_server(DEMO_MODEL) as address:
        yield address


@pytest.fixture(scope="session")
def urls(engine: str) -> Iterator[str]:
    """Run `latimer serve` with each engine; yield `LATIMER_URLS` for the clients' programs."""
    named = ("--model-name", "demo")
    # Threads of a small model that share cores with other programs wait longer than they compute.
    alone = command("--threads", "1", *named)
    with alone as (_, inside), command(engine, *named) as (_, before):
        yield f"in-process={inside} llama-server={before}"


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a scripted model that thinks and calls tools; yield `LATIMER_STEPS`."""
    model, projector = in_steps(tmp_path_factory.mktemp("steps"))
    seeing = ("--mmproj", str(projector))
    named = ("--model-name", "demo")
    alone = command(str(model), *seeing, "--threads", "1", *named)
    with (
        llama_server(model, *seeing, context=4096) as server,
        alone as (_, inside),
        command(server, *named) as (_, before),
    ):
        yield f"in-process={inside} llama-server={before}"


@pytest.fixture(scope="session")
def vocabulary(python_of: Callable[[str], Environment]) -> Path:
    """Return a folder for `TIKTOKEN_CACHE_DIR`."""
    (found,) = (python_of("openai_2").folder / "venv").glob(TIKTOKEN)
    return found


@pytest.fixture(scope="session")
def embeddings(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run `latimer serve` with an embedding model on each engine, plain and for LangChain's ids.

    Yields:
        A file for `LATIMER_EMBEDDINGS`: addresses, texts, their ids and their reference vectors.
    """
    model = MODELS / "bert-mean.gguf"
    named = ("--model-name", "demo", "--matryoshka")
    options = {"plain": (), VOCABULARY: ("--logit-bias-vocabulary", VOCABULARY)}
    urls: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(llama_server(model, "--embeddings", context=512))
        engines = {"in-process": (str(model), "--threads", "1"), "llama-server": (server,)}
        for kind, more in options.items():
            for engine, words in engines.items():
                serve = command(*words, *named, *more, TIKTOKEN_CACHE_DIR=str(vocabulary))
                urls.setdefault(kind, {})[engine] = f"{stack.enter_context(serve)[1]}/v1"
        inputs = [
            {"text": text, "ids": ids_of(model, text), "vector": vector_of(model, text).tolist()}
            for text in TEXTS
        ]
        path = tmp_path_factory.mktemp("embeddings") / "embeddings.json"
        path.write_text(json.dumps({"urls": urls, "inputs": inputs}))
        yield path


@pytest.fixture(scope="session")
def audio(engine: str) -> Iterator[str]:
    """Serve each engine with a speaker and a transcriber; yield `LATIMER_AUDIO`."""
    named: Any = {"model_names": ["demo"]}
    inside = serving(lambda: OpenAIAdapter(LlamaCpp(threads=1), **named, **dictation()))
    before = serving(lambda: OpenAIAdapter(LlamaServer(engine), **named, **dictation()))
    with inside as one, before as other:
        yield f"in-process={one} llama-server={other}"


@pytest.fixture
def run_in(
    urls: str, steps: str, embeddings: Path, vocabulary: Path, audio: str
) -> Callable[..., str]:
    """Return a function that runs the program of a client and returns its output."""

    def run(words: list[str], folder: Path, variables: dict[str, str]) -> str:
        more = {"LATIMER_URLS": urls, "LATIMER_STEPS": steps}
        more["LATIMER_EMBEDDINGS"] = str(embeddings)
        more |= {"LATIMER_AUDIO": audio, "LATIMER_RECORDING": str(RECORDING)}
        variables = {**variables, **more, "TIKTOKEN_CACHE_DIR": str(vocabulary)}
        done = subprocess.run(
            words, cwd=folder, env=variables, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    return run


@pytest.fixture
def own_home(tmp_path: Path) -> dict[str, str]:
    """Return environment variables with a home folder of its own and no settings of the user's."""
    (tmp_path / "home").mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {**kept, "HOME": str(tmp_path / "home"), "TERM": "dumb", "CI": "1"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the last output of each client's program."""
    for report in terminalreporter.getreports("passed"):
        for name, said in report.user_properties:
            terminalreporter.write_line(f"{name}: {said}")
