"""Tests of `latimer check` with its memory, its advice, and its forms for programs and issues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from latimer.adapter.cli import main
from latimer.adapter.cli.check import Row, lines_of
from latimer.adapter.limits.config import digest_of
from latimer.backends.llama_cpp import DEMO_MODEL
from support.servers import canned, free_port

LIBRARIES = Path(__file__).parent.parent.parent / "support" / "libraries"
NOWHERE = "http://127.0.0.1:1"


def check(*arguments: str) -> tuple[int, str, str]:
    """Run the command; return its exit code, standard output and standard error."""
    done = CliRunner().invoke(main, ["check", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr


def rows_of(*arguments: str) -> dict[str, Any]:
    """Return the rows of `--json` by their names."""
    _, output, _ = check("--json", *arguments)
    return {row["name"]: row for row in json.loads(output)["rows"]}


def test_the_memory_of_a_file() -> None:
    """The row of the memory has the weights, the KV cache and the rest, for the context asked."""
    small, large = (rows_of(str(DEMO_MODEL), "--context", size) for size in ("512", "1024"))
    numbers = small["memory"]["numbers"]
    assert numbers["weights"] == DEMO_MODEL.stat().st_size
    assert numbers["total"] == numbers["weights"] + numbers["kv"] + numbers["compute"]
    assert large["memory"]["numbers"]["kv"] == 2 * numbers["kv"]
    assert small["memory"]["value"].startswith("about ")
    assert small["logprobs"]["value"] == "with each token"


def test_too_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not fit is a warning with advice, and the exit code stays 0."""
    monkeypatch.setattr("latimer.adapter.hub.memory.free_memory", lambda: 1_000_000)
    code, output, _ = check()
    assert code == 0
    assert "1.0 MB are free\n" in output
    assert "→ Use a smaller --context" in output
    assert rows_of()["memory"]["status"] == "warning"


def test_a_variable_of_no_setting_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in the environment is a row with the setting that was meant; nothing fails."""
    monkeypatch.setenv("LATIMER_API_KEYS", "secret")
    code, output, _ = check()
    assert code == 0
    assert "LATIMER_API_KEYS is no setting\n" in output
    assert "→ Did you mean LATIMER_API_KEY?\n" in output
    assert "secret" not in output
    assert rows_of()["variable"]["status"] == "warning"


def test_a_transcriber() -> None:
    """A library that is unknown, or a koboldcpp that is away, is a failure with advice."""
    unknown = rows_of("--transcription", "other")["transcription"]
    away = rows_of("--transcription", NOWHERE)["transcription"]
    assert {unknown["status"], away["status"]} == {"failed"}
    assert "Expected one of faster-whisper, pocketsphinx" in unknown["value"]
    assert away["advice"] == "Correct --transcription, or start what it names."


def test_an_engine_that_is_away() -> None:
    """An engine that does not answer has advice in both forms, and the exit code is 1."""
    code, output, _ = check(NOWHERE)
    assert code == 1
    assert "Connection refused. Is it running?\n" in output
    assert "→ Start the engine, or correct the address." in output
    code, output, _ = check("--json", NOWHERE)
    found = json.loads(output)
    assert (code, found["ok"], found["error"]) == (1, False, None)
    assert found["rows"][1]["status"] == "failed"


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ((503, b""), "Wait until the engine has loaded"),
        ((404, b"<html>"), "Check the address"),
        ((401, b""), "Use the key that the engine was started with"),
    ],
)
def test_an_engine_that_is_not_ready(answer: tuple[int, bytes], advice: str) -> None:
    """An engine that loads, a server that is not an engine and a wrong key get different advice."""
    with canned({"*": answer}) as (address, _):
        assert rows_of(address)["reachable"]["advice"].startswith(advice)


def test_a_failed_start_is_json_too() -> None:
    """Settings that no engine can be made from are an error in JSON, and exit code 3."""
    code, output, said = check("--json", "/nowhere.gguf")
    found = json.loads(output)
    assert (code, found["ok"], found["rows"]) == (3, False, [])
    assert found["error"].startswith("There is no model at /nowhere.gguf. Specify a GGUF file")
    assert said == f"Latimer cannot check: {found['error']}\n"


def test_the_other_rows_have_advice(tmp_path: Path) -> None:
    """A store, workers and telemetry that cannot work say what to do."""
    rows = rows_of("--store", f"{tmp_path}/no/folder.db", "--workers", "2", "--context", "256")
    assert rows["store"]["status"] == rows["workers"]["status"] == "failed"
    assert rows["store"]["advice"].startswith("Name a new file, or a file of Latimer, in a folder")
    assert "--workers 1" in rows["workers"]["advice"]


def test_workers_have_the_advice_of_their_reason(tmp_path: Path) -> None:
    """Limits in memory have advice about their store, and a model in this process about engines."""
    file = tmp_path / "limits.toml"
    file.write_text(f'[keys.team]\ndigest = "{digest_of("a key")}"\nrequests_per_minute = 10\n')
    limits = rows_of("--config", str(file), "--workers", "2", NOWHERE)["workers"]
    engine = rows_of("--workers", "2", "--context", "256")["workers"]
    assert "keys.team" in limits["value"]
    assert "[admission]" in limits["advice"]
    assert "llama-servers" not in limits["advice"]
    assert "llama-servers" in engine["advice"]


def test_a_fleet_has_a_row_for_each_engine_and_model(tmp_path: Path) -> None:
    """Rows of a fleet name the table that they are about, and failures have advice."""
    file = tmp_path / "fleet.toml"
    file.write_text(f'[engines.a]\nurl = "http://127.0.0.1:{free_port()}"\n')
    code, output, _ = check("--config", str(file), "--json")
    rows = json.loads(output)["rows"]
    assert code == 1
    assert [row.get("of") for row in rows] == [*["engines.a"] * 2, *["models.a"] * 2, None]
    assert all(row["advice"] for row in rows if row["status"] == "failed")
    assert len([row for row in rows if row["status"] == "failed"]) == 3


def test_headings_are_lines_of_their_own() -> None:
    """The table for people has a heading for each engine, and rows cannot draw."""
    rows = [
        Row(of="engines.a", name="x", value="\x1b[2J", status="failed", advice="Mend it."),
        Row(name="store", value="off"),
    ]
    assert [*lines_of(rows)] == [
        "engines.a", "  x  \\x1b[2J", "     → Mend it.", "", "store  off",
    ]  # fmt: skip


def test_a_report_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block for an issue has versions, the file and the settings, without secrets and home."""
    monkeypatch.setenv("HOME", str(DEMO_MODEL.parent))
    monkeypatch.setenv("LATIMER_API_KEY", "hidden-one,hidden-two")
    place = f"postgresql://me:hidden-three@127.0.0.1:{free_port()}/kept"
    speech = f"http://me:hidden-four@127.0.0.1:{free_port()}"
    code, output, _ = check(
        "--report", str(DEMO_MODEL), "--store", place, "--context", "256", "--speech", speech
    )
    assert code == 1
    lines = output.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert "  llama.cpp in process: llama-cpp-python 0.3" in output
    assert "  quantization: Q8_0" in lines
    assert "  trained context: 2048" in lines
    assert "  context: 256  (--context)" in lines
    assert "  api_key: (not shown)  (LATIMER_API_KEY)" in lines
    assert "  model: ~/demo.gguf  (The model)" in lines
    assert "hidden" not in output
    assert str(DEMO_MODEL.parent) not in output


def test_a_report_of_a_fleet_has_keys_of_tables_only(tmp_path: Path) -> None:
    """The block names the keys of tables, since a command can contain a secret."""
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'[engines.a]\nurl = "http://127.0.0.1:{free_port()}"\nengine_key = "hidden"\n'
        '[engines.b]\ncommand = ["llama-server", "--api-key", "hidden", "{port}"]\n'
        '[models.m]\nengines = ["a", "b"]\n'
    )
    _, output, _ = check("--report", "--config", str(file))
    assert "  [engines.a]: engine_key, url" in output
    assert "hidden" not in output


def test_a_voice_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of `--speech` has the voices of a library, or what is wrong with its model."""
    monkeypatch.setenv("PYTHONPATH", str(LIBRARIES))
    monkeypatch.setattr("latimer.backends.speech.libraries.find_spec", lambda _: True)
    voice = tmp_path / "anna.onnx"
    voice.write_bytes(b"onnx")
    voice.with_name("anna.onnx.json").write_text('{"inference": {"length_scale": 1}}')
    row = rows_of("--speech", f"piper:{voice}", "--context", "256")["speech"]
    assert (row["status"], row["value"]) == ("ok", "piper:anna, 1 voice")
    voice.write_bytes(b"")
    row = rows_of("--speech", f"piper:{voice}", "--context", "256")["speech"]
    assert row["status"] == "failed"
    assert "not a voice" in row["value"]
    row = rows_of("--speech", "flute", "--context", "256")["speech"]
    assert row["value"].startswith("no: no library 'flute' speaks")
