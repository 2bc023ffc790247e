"""Tests of the command that starts a llama-server for a file."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter.engines import WrongSetup, backend_of, chosen, is_in_process, unused
from latimer.adapter.on_demand import OnlyModel, options_of
from latimer.adapter.settings import Settings
from latimer.backends.errors import EngineUnavailable
from latimer.backends.fleet import groups
from latimer.backends.fleet.process import EngineProcess
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import command as commands
from latimer.backends.llama_server import wheel
from latimer.backends.llama_server.command import SLOTS, build_of, command_of, find_program
from support.servers import command


def test_settings_become_flags() -> None:
    """The settings that are set become llama-server's flags, and the others stay its own."""
    settings = Settings.load(
        None, context=1024, parallel=3, threads=2, gpu_layers="all", cache_memory=64, mmap=False,
        flash_attention="on", cache_type="q8_0", lora=("a.gguf=0.5",), embeddings=True,
    )  # fmt: skip
    found = command_of(["llama-server"], Path("m.gguf"), "m", options_of(settings))
    text = " ".join(found)
    assert text.startswith("llama-server -m m.gguf -a m --host 127.0.0.1 --port {port} -c 1024")
    for flags in (
        "-np 3", "-t 2 -tb 2", "-ngl 999", "--cache-ram 64", "--no-mmap", "-fa on",
        "-ctk q8_0 -ctv q8_0", "--lora-scaled a.gguf:0.5", "--embeddings",
    ):  # fmt: skip
        assert f" {flags}" in text
    # An input of an embedding has to fit into one step.
    larger = options_of(Settings.load(None, batch=2048, embeddings=True, pooling="mean"))
    words = command_of(["llama-server"], Path("m.gguf"), "m", larger)
    assert " -ub 2048 -b 2048 --embeddings --pooling mean" in " ".join(words)
    plain = command_of(["llama-server"], Path("m.gguf"), "m", options_of(Settings.load(None)))
    assert plain[plain.index("-np") :] == ["-np", str(SLOTS)]


def test_the_wheel_knows_the_flags_of_a_plain_command() -> None:
    """The program of the package xllamacpp accepts the flags that a plain command has."""
    settings = Settings.load(None, context=1024, threads=2, gpu_layers="all", cache_memory=64)
    found = command_of(["x"], Path("m.gguf"), "m", options_of(settings))
    values = wheel.parse([word.replace("{port}", "8080") for word in found[1:]])
    assert (values.m, values.port, values.c, values.np) == ("m.gguf", 8080, 1024, SLOTS)
    assert (values.t, values.ngl, values.cache_ram, values.kv_unified) == (2, 999, 64, True)


def test_the_version_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prebuilt server has its package's version, because it does not know its own."""
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2026.10.11549")
    assert build_of([sys.executable, wheel.__file__]) == "b11549, xllamacpp 2026.10.11549"
    assert build_of(["/usr/bin/llama-server"]) == ""


def test_the_wheel_takes_every_setting_of_a_llama_server(tmp_path: Path) -> None:
    """The prebuilt server sets llama.cpp's parameters for each setting that llama-server takes."""
    settings = Settings.load(
        None, cache_type="q8_0", flash_attention="on", mmap=False, mlock=True, pooling="rank",
        batch=64, lora=["a.gguf=0.5", "b:c.gguf"], mmproj=tmp_path, embeddings=True,
    )  # fmt: skip
    words = command_of([sys.executable, wheel.__file__], DEMO_MODEL, "demo", options_of(settings))
    values = wheel.parse([word.replace("{port}", "8080") for word in words[2:]])
    assert (values.ctk, values.ctv, values.fa, values.mmap) == ("q8_0", "q8_0", "on", False)
    assert (values.mlock, values.reranking, values.ub) == (True, True, 64)
    assert values.lora_scaled == ["a.gguf:0.5", "b:c.gguf:1"]
    library = pytest.importorskip("xllamacpp")
    found = wheel.parameters_of(values)
    assert found.cache_type_k == found.cache_type_v == library.ggml_type.GGML_TYPE_Q8_0
    assert found.flash_attn_type.name.endswith("ENABLED")
    assert found.load_mode == library.llama_load_mode.LLAMA_LOAD_MODE_MLOCK
    adapters = [(one.path, one.scale) for one in found.lora_adapters]
    assert adapters == [("a.gguf", 0.5), ("b:c.gguf", 1.0)]
    plain = wheel.parameters_of(wheel.parse(["-m", "m.gguf"]))
    assert plain.load_mode.name.endswith("AUTO")
    assert not plain.lora_adapters


def test_llama_server_on_the_path_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A llama-server on the PATH is preferred to those of packages; without any there is none."""
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program() == [str(program)]
    program.unlink()
    monkeypatch.setattr(commands, "find_spec", lambda name: name == "xllamacpp" or None)
    assert find_program() == [sys.executable, wheel.__file__]
    monkeypatch.setattr(commands, "find_spec", lambda _name: None)
    assert find_program() is None


def test_llama_server_is_chosen_where_the_extra_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is served by llama-server if llama-cpp-python is missing, and a line says so."""
    monkeypatch.setattr("latimer.adapter.engines.find_spec", lambda _name: None)
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Settings.load(None, model=str(DEMO_MODEL), exact=True, prompt_lookup=False)
    assert not is_in_process(settings)
    assert chosen(settings) == [f"{program} serves the model, in a process of its own."]
    assert unused(settings) == [
        f"Ignored: --exact, --no-prompt-lookup (not supported by {program})."
    ]
    lacking = Settings.load(None, model=str(DEMO_MODEL), mmproj="nothing.gguf")
    with pytest.raises(WrongSetup, match=r"There is no projector at nothing\.gguf"):
        backend_of(lacking)
    assert backend_of(settings).capabilities.engine == "llama-server"
    # Without any llama-server, the error names the extra.
    monkeypatch.setattr(commands, "find_spec", lambda _name: None)
    program.unlink()
    assert is_in_process(settings)


def test_a_file_for_llama_server_is_checked() -> None:
    """A file of another format is refused before a process is started."""
    with pytest.raises(WrongSetup, match="not a GGUF file"):
        backend_of(Settings.load(None, model=__file__, backend="llama-server"))


def records(folder: Path) -> list[Path]:
    """Return the records of the processes that were not ended."""
    return [*folder.rglob("engines/*.json")]


def test_the_demo_model_is_that_of_a_start_without_a_file() -> None:
    """Without a file, llama-server gets the same command as with the demo model's."""
    commands = []
    for given in ({"model": str(DEMO_MODEL)}, {}):
        backend = backend_of(Settings.load(None, backend="llama-server", **given))
        assert isinstance(backend, OnlyModel)
        loader = backend._member.loader
        assert isinstance(loader, EngineProcess)
        commands.append(loader._command)
    assert commands[0] == commands[1]
    assert str(DEMO_MODEL) in commands[0]


def test_a_file_is_served_by_llama_server(tmp_path: Path) -> None:
    """`latimer serve FILE --backend llama-server` serves it, and the process ends with Latimer."""
    import httpx2

    arguments = (str(DEMO_MODEL), "--backend", "llama-server", "--context", "1024")
    with command(*arguments, XDG_STATE_HOME=str(tmp_path)) as (_, url):
        [model] = httpx2.get(f"{url}/v1/models").json()["data"]
        assert (model["id"], model["context_length"]) == (DEMO_MODEL.stem, 1024)
        body = {"model": model["id"], "messages": [{"role": "user", "content": "Hello"}]}
        reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert reply.json()["choices"][0]["message"]["content"]
        # Its errors name options of the program that the user has started.
        for path, asked, option in (
            (
                "embeddings",
                {"input": "x"},
                "--embeddings, or with an embedding model",
            ),
            ("rerank", {"query": "x", "documents": ["y"]}, "a reranking model"),
        ):
            reply = httpx2.post(f"{url}/v1/{path}", json=asked, timeout=60)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].endswith(f"Start Latimer with {option}.")
        assert records(tmp_path)
    assert not records(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (1000, {}, "size of the file with that of its source"),
        (
            1_000_000,
            {},
            "data is not within the file bounds, model is corrupted or incomplete. "
            "Compare the size of the file with that of its source",
        ),
        (None, {"lora": [str(DEMO_MODEL)]}, "to be 'adapter', but got. Correct --lora: an adapter"),
        (None, {"mmproj": DEMO_MODEL}, f"from {DEMO_MODEL}. Correct --mmproj: a model"),
        (
            None,
            {"cache_type": "q4_0", "flash_attention": "off"},
            "quantized V cache requires flash_attn to be enabled.",
        ),
    ],
    ids=["head", "part", "lora", "mmproj", "cache"],
)
async def test_a_failed_start_has_its_cause(
    size: int | None,
    options: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A llama-server that cannot serve a file is an error with the cause and what to do, and leaves
    no process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "broken.gguf"
    file.write_bytes(DEMO_MODEL.read_bytes()[:size])
    settings = Settings.load(None, model=str(file), backend="llama-server", **options)
    async with aclosing(backend_of(settings)) as backend:
        with pytest.raises(EngineUnavailable) as raised:
            await backend.model()
    message = raised.value.message
    assert words in message
    assert "broken.gguf" in message
    # The process has ended, so nothing is tried again.
    assert "next attempt" not in message
    assert not records(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--cache-type", "q4_0", "--flash-attention", "off"),
            "quantized V cache requires flash_attn to be enabled.\n",
        ),
        (("--lora", "nothing.gguf=0.5"), "There is no LoRA adapter at nothing.gguf (--lora)"),
    ],
    ids=["llama-server", "Latimer"],
)
def test_a_failed_start_ends_latimer(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """`latimer serve` ends with the cause, and leaves no process, if llama-server cannot serve a
    file, or an option of it names nothing."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(DEMO_MODEL.read_bytes())
    ended = subprocess.run(
        ["latimer", "serve", str(file), "--backend", "llama-server", "--port", "0", *options],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "LATIMER_LOG_FORMAT": "text"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 3
    *_, last = ended.stderr.splitlines(keepends=True)
    assert last.startswith("Latimer cannot start: ")
    assert words in last
    assert ("broken.gguf" in last) == ("nothing.gguf" not in last)
    # The process ends, so nothing is tried again.
    assert "next attempt" not in ended.stderr
    assert not records(tmp_path)


def test_the_library_of_the_wheel_serves(tmp_path: Path) -> None:
    """The server of the package xllamacpp, where it is installed, answers with its key only, and
    applies adapters."""
    pytest.importorskip("xllamacpp")
    import httpx2
    from support import gguf_files
    from support.servers import free_port, wait_for

    port, adapter = free_port(), tmp_path / "adapter.gguf"
    gguf_files.lora(DEMO_MODEL, adapter)
    options = ("-c", "512", "--port", str(port), "--lora-scaled", f"{adapter}:0.5")
    process = subprocess.Popen(
        [sys.executable, wheel.__file__, "-m", str(DEMO_MODEL), *options],
        env={**os.environ, "LLAMA_API_KEY": "secret"},
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        assert httpx2.get(f"http://127.0.0.1:{port}/props").status_code == 401
        key = {"Authorization": "Bearer secret"}
        [applied] = httpx2.get(f"http://127.0.0.1:{port}/lora-adapters", headers=key).json()
        assert (applied["path"], applied["scale"]) == (str(adapter), 0.5)
    finally:
        process.terminate()
        process.wait(10)
    assert groups.start_of(process.pid) is None
