"""Tests of the commands."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx2
import pytest
from click.testing import CliRunner
from latimer.adapter.auth import UnusableKey
from latimer.adapter.cli import main, serve
from latimer.adapter.cli.listener import bound
from latimer.adapter.engines import backend_of
from latimer.adapter.settings import Settings
from latimer.adapter.settings_file import WrongSettings
from latimer.backends.errors import EngineError
from latimer.backends.identity import LazyBackend
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from support import copies
from support.servers import begun, command, free_port, llama_server


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, on any free port unless the arguments name one."""
    return copies.run(*arguments, **{"LATIMER_PORT": "0", **environment})


def test_help_shows_examples() -> None:
    """Each command's help shows examples."""
    for arguments in ([], ["serve"], ["check"]):
        shown = CliRunner().invoke(main, [*arguments, "--help"]).output
        assert "Examples:" in shown
        assert "latimer " in shown


@pytest.mark.timed
def test_help_is_quick_and_light() -> None:
    """The help imports neither a server nor an engine and appears within two seconds."""
    code = (
        "import sys\nfrom latimer.adapter.cli import main\n"
        "try:\n main(['serve', '--help'])\nexcept SystemExit:\n pass\n"
        "heavy = {'uvicorn', 'starlette', 'llama_cpp', 'numpy', 'jinja2'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - start < 2


def test_a_proxy_needs_no_llama_cpp() -> None:
    """The adapter and both upstream backends import without the in-process engine, in 60 MB."""
    code = (
        "import sys\nfrom latimer.adapter import OpenAIAdapter\n"
        "import latimer.backends.llama_server, latimer.backends.koboldcpp\n"
        "assert not {'llama_cpp', 'numpy', 'pypdf'} & sys.modules.keys()\n"
        "print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 60_000


# The distributions that a start imports. uvicorn imports watchfiles if it is installed.
AT_START = {
    "annotated_types", "anyio", "click", "httptools", "jinja2", "latimer", "markupsafe", "orjson",
    "pydantic", "pydantic_core", "python_multipart", "sniffio", "starlette", "typing_extensions",
    "typing_inspection", "uvicorn", "uvloop", "watchfiles",
}  # fmt: skip
# Modules of Latimer that are imported after the start, or only with a setting.
LATER = (
    "adapter.admin", "adapter.fleet", "adapter.endpoints.completions",
    "adapter.endpoints.conversations", "adapter.endpoints.embeddings", "adapter.endpoints.models",
    "adapter.endpoints.responses", "adapter.endpoints.stored", "adapter.on_demand",
    "adapter.responses.input", "adapter.responses.output", "adapter.store.database",
    "backends.fleet.machine", "backends.fleet.plan", "backends.fleet.pool", "backends.koboldcpp",
    "backends.sandbox", "backends.speech.base", "schemas.openai.audio",
    "schemas.openai.completions", "schemas.openai.conversations", "schemas.openai.embeddings",
    "schemas.openai.models", "schemas.openai.responses", "schemas.openai.response_items",
    "schemas.openai.stored",
)  # fmt: skip


def test_a_start_imports_what_chat_needs() -> None:
    """A proxy starts without the libraries and modules that a chat request does not need."""
    code = (
        "import sys\nfrom latimer.adapter.cli import commands, serve\nimport uvloop\n"
        "print(*(name for name in sys.modules if name[0] != '_'"
        " and name.split('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = set(done.stdout.split())
    loaded = {name.partition(".")[0] for name in modules}
    # Cython, editable installs and Debian have modules of their own.
    own = "cython|__|distutils|sitecustomize"
    assert {name for name in loaded if not re.match(own, name)} <= AT_START
    assert not {f"latimer.{name}" for name in LATER} & modules


def test_modules_that_are_imported_later_exist() -> None:
    """The list above has no name that was changed."""
    assert all(find_spec(f"latimer.{name}") for name in LATER)


def test_serve_answers_with_the_demo_model() -> None:
    """`latimer serve` alone serves the demo model and prints its URL at the start."""
    with command() as (process, address):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        reply = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=30)
        message = reply.json()["choices"][0]["message"]["content"]
        assert message == "The capital of France is Paris."
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert f"Latimer serves demo (llama.cpp in process, 2048 tokens) at {address}/v1" in (
            said.decode()
        )
        assert "Set --reasoning-key SECRET if they must be able to" in said.decode()
        assert process.returncode == 0


def test_serve_finds_out_which_engine_it_is(llama_server_url: str) -> None:
    """`latimer serve` detects the engine at a URL and takes names and keys from its settings."""
    with command(llama_server_url, "--model-name", "one", LATIMER_API_KEY="secret,other") as (
        _,
        address,
    ):
        reply = httpx2.get(f"{address}/v1/models")
        assert reply.status_code == 401
        reply = httpx2.get(f"{address}/v1/models", headers={"authorization": "Bearer other"})
        assert reply.json()["data"][0]["id"] == "one"


def test_check_shows_a_table(llama_server_url: str) -> None:
    """`latimer check` shows an engine's features, and exits with 1 if it is unreachable."""
    done = run("check", llama_server_url, "--context", "512")
    assert done.returncode == 0
    assert done.stderr.startswith("Ignored: --context (")
    assert "llama-server" in done.stdout
    assert "2048 tokens" in done.stdout
    done = run("check", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "cannot be reached" in done.stdout


def test_check_of_engines_on_demand(tmp_path: Path) -> None:
    """An engine that a request loads passes the check, unless its program is missing."""
    file = tmp_path / "fleet.toml"
    # The environment has a llama-server in a package only.
    path = str(Path(sys.executable).parent)
    for program, code in ((sys.executable, 0), ("llama-server", 0), ("no-such-program", 1)):
        file.write_text(
            f'[engines.a]\nbackend = "llama-server"\ncommand = ["{program}", "{{port}}"]\n'
        )
        done = run("check", "--config", str(file), PATH=path)
        assert done.returncode == code, done.stdout
        assert ("loads on demand" in done.stdout.split("models.a")[0]) == (not code)
        assert ("there is no program 'no-such-program'" in done.stdout) == bool(code)
        # The table of the model says the same as that of its engine.
        assert ("loads on demand" in done.stdout) == (not code)
        assert ("no engine is ready" in done.stdout) == bool(code)


def test_a_fleet_without_engines_warns_at_the_start(tmp_path: Path) -> None:
    """A model whose engines are all away is a warning, with the reasons; another one is not."""
    file = tmp_path / "fleet.toml"
    away = f"http://127.0.0.1:{free_port()}"
    with llama_server(DEMO_MODEL) as url:
        file.write_text(
            f'[engines.one]\nurl = "{away}"\n[engines.two]\nurl = "{url}"\n'
            '[models.a]\nengines = ["one"]\n[models.b]\nengines = ["one", "two"]\n'
        )
        with begun("--config", str(file), LATIMER_LOG_FORMAT="json") as (process, _, line):
            assert process.stderr is not None
            first, second = json.loads(line), json.loads(process.stderr.readline())
            while "engines" not in second:
                second = json.loads(process.stderr.readline())
            process.terminate()
            rest = process.stderr.read()
    assert first["message"].startswith("Latimer serves a, b over 2 engines at http://")
    assert (second["level"], second["model"], second["engines"]) == ("warning", "a", ["one"])
    assert "No engine of the model a is ready, so its requests get a 503" in second["message"]
    assert "Start one, or correct its table: latimer check --config FILE" in second["message"]
    assert away.removeprefix("http://") in second["message"]
    assert "model b" not in rest


def test_a_model_with_a_fallback_is_served(llama_server_url: str, tmp_path: Path) -> None:
    """`serve` and `check` name the model that serves instead of one without an engine."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'[engines.one]\nurl = "http://127.0.0.1:{free_port()}"\n'
        f'[engines.two]\nurl = "{llama_server_url}"\n'
        '[models.a]\nengines = ["one"]\nfallback = ["c", "b"]\n'
        '[models.b]\nengines = ["two"]\n[models.c]\nengines = ["one"]\n'
    )
    done = run("check", "--config", str(file))
    assert "→ Mend one of its engines; b serves its requests until then." in done.stdout
    assert done.stdout.count("requests get a 503 until then") == 1
    with begun("--config", str(file)) as (process, _, _):
        assert process.stderr is not None
        line = ""
        while "of the model a" not in line:
            line = process.stderr.readline()
        process.terminate()
    assert "No engine of the model a is ready, so b serves its requests until one is." in line


def test_check_of_a_koboldcpp(koboldcpp_replay: tuple[str, Any]) -> None:
    """`latimer check` recognizes a koboldcpp, although it also answers llama-server's paths."""
    done = run("check", koboldcpp_replay[0])
    assert done.returncode == 0, done.stdout
    assert "engine            koboldcpp" in done.stdout
    assert "frequency_penalty" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--port", "x"], 2, "--port"),
        (["serve", "--model-name", ""], 2, "--model-name: a model name is empty"),
        (["serve", "--port", "99999"], 2, "--port must be at most 65535, not 99999."),
        (["serve", "--config", "/nowhere.toml"], 2, "/nowhere.toml cannot be read: No such file"),
        (["serve", "--lora", "x.gguf=y"], 2, "--lora: 'x.gguf=y' must end with a number"),
        (["serve", "--api-key-file", str(DEMO_MODEL)], 3, "is not UTF-8 text"),
        (["serve", "--logit-bias-vocabulary", "x"], 2, "--logit-bias-vocabulary: Invalid value"),
        (["serve", "/nowhere.gguf"], 3, "no model at /nowhere.gguf"),
        (["serve", "--mmproj", "/nowhere"], 3, "no projector at /nowhere"),
        (["serve", "--lora", "/nowhere"], 3, "no LoRA adapter at /nowhere"),
        (
            ["serve", "--cache-dir", str(DEMO_MODEL)],
            3,
            "cannot be used for saved prompts: File exists. Set --cache-dir to a folder",
        ),
        (["serve", "--cache-dir", "x", "--cache-ram", "0"], 3, "requires host memory"),
        (["serve", "--host", "a" * 64], 3, ": it is not a valid host name"),
        (["serve", "localhost:8080"], 3, "Did you mean http://localhost:8080?"),
        (["serve", "http://127.0.0.1:99999"], 3, "Port out of range"),
        (
            ["serve", "http://me:secret@127.0.0.1:8080"],
            3,
            "must not contain a user name or password",
        ),
        (["check", "ftp://127.0.0.1"], 3, "Latimer cannot check: 'ftp://127.0.0.1'"),
        (["conform", "http://127.0.0.1:99999"], 2, "Port out of range"),
        (["conform", "--diff", str(DEMO_MODEL), str(DEMO_MODEL)], 2, "it is not UTF-8 text"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, words: str) -> None:
    """A usage error exits with 2 and a failed start with 3, and the message gives the reason."""
    done = run(*arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    if code == 3:
        assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_no_start() -> None:
    """A port in use is a failed start: exit code 3 and one line."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # A process that starts from nothing, as every start of a user does.
        done = subprocess.run(
            ["latimer", "serve", "--port", str(port)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 3
    # A log that no terminal shows is JSON.
    (line,) = done.stderr.splitlines()
    event = json.loads(line)
    assert event["level"] == "error"
    assert event["message"] == (
        f"Latimer cannot start: cannot listen on 127.0.0.1:{port}: Address already in use. Choose "
        "another address with --host and --port, or LATIMER_PORT."
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_any_free_port_is_told(host: str) -> None:
    """Port 0 binds one free port on every address of the host."""
    sockets = bound(host, 0)
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
        assert sockets[0].getsockname()[1] > 0
    finally:
        for one in sockets:
            one.close()


def test_flags_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag takes precedence over the environment, and the environment over the file."""
    file = tmp_path / "latimer.toml"
    file.write_text('port = 1\nhost = "0.0.0.0"\ndrain = 7\nmodel_name = ["a", "b"]\n')
    monkeypatch.setenv("LATIMER_PORT", "2")
    monkeypatch.setenv("LATIMER_HOST", "::1")
    settings = Settings.load(file, port=3, host=None, model_name=())
    assert (settings.port, settings.host, settings.drain) == (3, "::1", 7)
    assert settings.model_name == ["a", "b"]


def test_engine_options_are_read_from_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine options given as words are converted to the engine's values."""
    monkeypatch.setenv("LATIMER_LORA", "a.gguf,b=c.gguf=0.5")
    settings = Settings.load(None, flash_attention="on", gpu_layers="all", cache_type="q8_0")
    assert settings.adapters() == [("a.gguf", 1.0), ("b=c.gguf", 0.5)]
    assert (settings.flash_attention, settings.gpu_layers) == (True, -1)
    assert Settings.load(None, flash_attention="auto").flash_attention is None
    with pytest.raises(WrongSettings, match="--cache-type must be one of f32"):
        Settings.load(None, cache_type="q3_k")


async def test_the_queue_is_set_for_every_engine(
    monkeypatch: pytest.MonkeyPatch, llama_server_url: str
) -> None:
    """The queue limit applies to every engine, and its default is 1,024 requests."""
    assert Settings.load(None).queue == 1_024
    monkeypatch.setenv("LATIMER_QUEUE", "7")
    settings = Settings.load(None, model=llama_server_url)
    backend = backend_of(settings)
    await backend.model()
    assert isinstance(backend, LazyBackend)
    assert isinstance(backend._backend, LlamaServer)
    assert (settings.queue, backend._backend.server.turns._limit) == (7, 7)
    with pytest.raises(ValueError, match="queue"):
        Settings.load(None, queue=-1)
    await backend.aclose()


def test_a_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    """A settings file with an unknown key is rejected."""
    file = tmp_path / "latimer.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ValueError, match="prot"):
        Settings.load(file)


def test_keys_from_a_file(tmp_path: Path) -> None:
    """A key file has one key per line, adds to the keys from flags, and no key is in the repr."""
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    settings = Settings.load(None, api_key=("zero",), api_key_file=file)
    assert settings.api_keys() == ["zero", "one", "two"]
    assert "zero" not in repr(settings)


@pytest.mark.parametrize("empty", ["", " , "])
def test_a_key_that_is_empty_opens_no_server(
    empty: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An empty variable or list of keys is an error, not a server without keys."""
    monkeypatch.setenv("LATIMER_API_KEY", empty)
    with pytest.raises(UnusableKey, match="no key is set"):
        Settings.load(None).api_keys()
    monkeypatch.delenv("LATIMER_API_KEY")
    file = tmp_path / "latimer.toml"
    file.write_text("api_key = []\n")
    with pytest.raises(UnusableKey, match="no key is set"):
        Settings.load(file).api_keys()
    assert Settings.load(None).api_keys() == []


def test_a_running_stream_ends_after_sigterm() -> None:
    """SIGTERM lets a running stream finish, and then the server stops."""
    with command("--drain", "60") as (process, address):
        body = {
            "model": "demo",
            "prompt": "One day,",
            "max_tokens": 600,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
            chunks = reply.iter_raw()
            text = next(chunks)
            process.send_signal(signal.SIGTERM)
            text += b"".join(chunks)
        assert text.endswith(b"data: [DONE]\n\n")
        assert text.count(b'"finish_reason":"length"') == 1
        process.communicate(timeout=30)
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{address}/health")  # noqa: S310


@pytest.mark.slow
def test_a_vocabulary_that_cannot_be_loaded_is_said_at_the_start(tmp_path: Path) -> None:
    """A vocabulary that cannot be loaded fails the start, and the message says what to do."""
    nowhere = {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = run(
        *("serve", "--logit-bias-vocabulary", "cl100k_base"),
        TIKTOKEN_CACHE_DIR=str(tmp_path),
        **nowhere,
    )
    assert done.returncode == 3
    assert "set TIKTOKEN_CACHE_DIR to a directory with its file" in done.stderr


@pytest.mark.slow
def test_exact_scores_do_not_depend_on_what_else_runs() -> None:
    """`--exact` gives a repeated prompt exactly the same log-probabilities."""
    body = {"model": "demo", "prompt": "Count to 7.", "echo": True, "logprobs": 0, "max_tokens": 0}
    with command("--exact") as (_, address):
        replies = [
            httpx2.post(f"{address}/v1/completions", json=body, timeout=30).json() for _ in range(2)
        ]
    first, second = (reply["choices"][0]["logprobs"] for reply in replies)
    assert first == second
    assert len(first["tokens"]) > 2


@pytest.mark.parametrize(
    ("flags", "is_open"),
    [
        ({"host": "0.0.0.0"}, True),  # noqa: S104
        ({"host": "0.0.0.0", "api_key": ["secret"]}, False),  # noqa: S104
        ({"host": "127.0.0.1"}, False),
    ],
)
def test_the_log_warns_of_an_open_server_and_of_wrong_variables(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, Any],
    is_open: bool,
) -> None:
    """The first lines of a log say that other machines need no key, and which variable is wrong."""
    monkeypatch.setenv("LATIMER_API_KEYS", "secret")
    monkeypatch.setattr("latimer.adapter.cli.terminal._is_json", True)
    serve._warn_of_settings(Settings.load(None, **flags), "http://0.0.0.0:8000/v1")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    expected = ["LATIMER_API_KEYS is no setting; did you mean LATIMER_API_KEY?"]
    if is_open:
        expected.append(
            "No API key is needed, and other machines can connect to http://0.0.0.0:8000/v1. Set "
            "--api-key, or --host 127.0.0.1 for this machine only."
        )
    assert [line["message"] for line in lines] == expected
    assert {(line["level"], line["event"]) for line in lines} == {("warning", "start")}


async def test_a_failed_start_names_wrong_variables_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the engine of a misspelt variable is missing, the variable is named before the error."""

    async def made(_: Settings) -> NoReturn:
        raise EngineError("No engine is installed.")

    monkeypatch.setenv("LATIMER_MODLE", "http://127.0.0.1:8080")
    monkeypatch.setattr(serve, "_made_from", made)
    door: Any = SimpleNamespace(address="http://127.0.0.1:8000/v1")
    with pytest.raises(SystemExit):
        await serve._serve(Settings.load(None), door)
    output = capsys.readouterr().err
    assert 0 <= output.find("LATIMER_MODLE is no setting; did") < output.find("No engine is")
