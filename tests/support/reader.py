"""A runner of the documentation's code blocks, in files and in a shell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from latimer.backends.llama_cpp import DEMO_MODEL

from support.documents import Block, Command, commands
from support.programs import ask, program
from support.servers import free_port

ROOT = Path(__file__).parent.parent.parent
EVALUATE = ROOT / "examples" / "evaluate"
ANSWER = "The capital of France is Paris."
# The text that the output of a Python block contains, by a part of its request.
OUTPUTS = {
    "tools=": "get_weather", "response_format=": '"capital"', "logprobs=": "None\n", "": ANSWER,
}  # fmt: skip
HERE = "http://127.0.0.1:8000"
# A local lm-eval task in place of one that needs a download.
TASKS = {"hellaswag": "choice.yaml"}


class Reader:
    """A runner of blocks in a folder that has a `model.gguf`.

    Only addresses, the port and the names of tasks are replaced.

    Args:
        addresses: the running engines' addresses, by those in the document.
    """

    def __init__(self, folder: Path, addresses: dict[str, str]) -> None:
        port = free_port()
        self._folder = folder
        self._address = f"http://127.0.0.1:{port}"
        self._addresses = {**addresses, HERE: self._address}
        self._variables = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "LATIMER_PORT": str(port),
            **{f"HF_{name}_OFFLINE": "1" for name in ("HUB", "DATASETS")},
            "HF_HOME": str(folder / "huggingface"),
        }
        shutil.copy(DEMO_MODEL, folder / "model.gguf")
        shutil.copy(EVALUATE / "choice.yaml", folder)
        questions = (EVALUATE / "questions.jsonl").read_text().splitlines(keepends=True)
        (folder / "questions.jsonl").write_text("".join(questions[:4]))

    def run(self, block: Block) -> None:
        """Run a block.

        Raises:
            AssertionError: it fails, or is of a kind that this class cannot run.
        """
        if block.language == "python":
            self._python(self._local(block.text))
        elif block.language == "sh":
            self._shell(self._local(block.text))
        elif block.language == "json":
            self._fields(block.text)
        else:
            raise AssertionError(f"no way to run a block of the language {block.language!r}")

    def _local(self, text: str) -> str:
        theirs = "|".join(map(re.escape, self._addresses))
        return re.sub(rf"({theirs})\b", lambda match: self._addresses[match[1]], text)

    def _python(self, text: str) -> None:
        if re.search(r"^app = ", text, re.MULTILINE):
            self._app(text)
            return
        assert self._address in text, "a Python block makes an app, or asks a running Latimer"
        (self._folder / "block.py").write_text(text)
        with self._serving("latimer", "serve"):
            expected = next(OUTPUTS[key] for key in OUTPUTS if key in text)
            assert expected in self._output(sys.executable, "block.py")

    def _fields(self, text: str) -> None:
        """Send each line as fields of a chat request."""
        with self._serving("latimer", "serve"):
            for line in text.splitlines():
                ask(self._address, json.loads(line))

    def _app(self, text: str) -> None:
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
            for command in commands(text):
                self._command(command, background)

    def _command(self, command: Command, background: contextlib.ExitStack) -> None:
        words = command.words
        if words[:2] == ("latimer", "serve"):
            with contextlib.ExitStack() as foreground:
                stack = background if command.background else foreground
                stack.enter_context(self._serving(*words))
                assert ask(self._address) == ANSWER
            return
        known: dict[str, Callable[..., None]] = {
            "latimer check": self._check,
            "latimer conform": self._conform,
            "lm_eval --model": self._lm_eval,
            "make": _make,
        }
        runs = known.get(" ".join(words[:2])) or known.get(words[0])
        assert runs is not None, f"no way to run {' '.join(words)}"
        assert not command.background, f"{words[0]} does not serve"
        runs(*words)

    def _serving(self, *words: str) -> contextlib.AbstractContextManager[None]:
        return program(words, f"{self._address}/health", self._variables, self._folder)

    def _check(self, *words: str) -> None:
        assert "reachable" in self._output(*words)

    def _conform(self, *words: str) -> None:
        # A full run takes minutes.
        assert " checks: " in self._output(*words, "--only", "models.*")

    def _lm_eval(self, *words: str) -> None:
        output = self._output(*(TASKS.get(word, word) for word in words))
        found = re.search(r"^\|demo_choice\|.*\|acc .*?\|\s*([\d.]+)\|", output, re.MULTILINE)
        assert found, output
        assert float(found[1]) > 0.5

    def _output(self, *words: str) -> str:
        done = subprocess.run(
            words, cwd=self._folder, env=self._variables, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done.stdout


def _make(_command: str, target: str) -> None:
    """Check that a target exists; CI and `tests/install` run it."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
