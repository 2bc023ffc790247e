"""Tests that each extra installs everything its feature needs: `pip install '.[EXTRA]'`.

Most of them run again with the lowest versions that `pyproject.toml` declares.
"""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from install.commands import imported, serving
from support.collector import collecting
from support.environments import QUESTION, Environment, ask

pytestmark = pytest.mark.timeout(1800)
# A stand-in for Piper.
LIBRARIES = Path(__file__).parent.parent / "support" / "libraries"
ANSWER = "The capital of France is Paris."
# tiktoken downloads its own vocabularies, but not one that a plugin provides.
VOCABULARY = """
RANKS = {bytes([byte]): byte for byte in range(256)} | {b" Paris": 256}


def few_words():
    return {"name": "few_words", "pat_str": r"\\S+|\\s+", "mergeable_ranks": RANKS,
            "special_tokens": {}}


ENCODING_CONSTRUCTORS = {"few_words": few_words}
"""


def test_llama_cpp_serves(llama_cpp: Environment) -> None:
    """Every module of the in-process engine imports, and `latimer serve` answers with it."""
    assert imported(llama_cpp, "latimer.backends") > 30
    with serving(llama_cpp) as address:
        assert ask(address) == ANSWER
        body = {"model": "demo", "prompt": "One", "lark": 'start: "two"', "max_tokens": 4}
        reply = httpx2.post(f"{address}/v1/completions", json=body, timeout=60)
        assert reply.json()["choices"][0]["text"] == "two"


def test_prebuilt_serves(prebuilt: Environment) -> None:
    """Without a compiler, `latimer serve` answers through llama.cpp's prebuilt server."""
    with serving(prebuilt) as address:
        assert ask(address) == ANSWER
        assert httpx2.get(f"{address}/v1/models", timeout=60).json()["data"][0]["id"] == "demo"


def test_tiktoken_reads_biases(
    tiktoken: Environment, llama_server_url: str, tmp_path: Path
) -> None:
    """A bias with an id of another vocabulary bans the word in the model's answer."""
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "few_words.py").write_text(VOCABULARY)
    words = (llama_server_url, "--logit-bias-vocabulary", "few_words", "--any-model")
    with serving(tiktoken, *words, PYTHONPATH=str(tmp_path)) as address:
        assert ask(address) == ANSWER
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "logit_bias": {"256": -100},
        }
        reply = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert " Paris" not in reply.json()["choices"][0]["message"]["content"]


STORE_MEDIA = """
import hashlib
from latimer.adapter.store import blobs

storage, data = blobs.of("s3://latimer/installed"), bytes(9)
name = hashlib.sha256(data).hexdigest()
storage.put(name, data)
print(storage.get(name) == data)
"""


def test_s3_stores_media(s3: Environment, s3_variables: dict[str, str]) -> None:
    """A server with the API of S3 stores a medium and returns it."""
    assert imported(s3, "latimer.adapter.store") > 5
    words = ("python", "-c", STORE_MEDIA)
    done = s3.run("env", *(f"{name}={value}" for name, value in s3_variables.items()), *words)
    assert done.stdout == "True\n"


def test_redis_has_its_client(redis: Environment) -> None:
    """The limits of keys in Redis import."""
    without = "latimer.adapter.limits.postgresql"
    assert imported(redis, "latimer.adapter.limits", without=without) > 4


def test_postgres_has_its_driver(postgres: Environment) -> None:
    """The driver of PostgreSQL is installed together with the library that it needs."""
    done = postgres.run("python", "-c", "import psycopg; print(psycopg.pq.__impl__)")
    assert done.stdout == "binary\n"
    without = "latimer.adapter.limits.redis"
    assert imported(postgres, "latimer.adapter.limits", without=without) > 4


def test_conformance_judges(conformance: Environment, llama_server_url: str) -> None:
    """Every module of the conformance suite imports, and `latimer conform` checks a server."""
    assert imported(conformance, "latimer.conformance") > 30
    with serving(conformance, llama_server_url) as address:
        words = ("latimer", "conform", f"{address}/v1", "--only", "models.*", "--report", "it.html")
        said = conformance.run(*words).stdout
    assert "pass" in said
    assert "fail" not in said
    assert (conformance.work / "it.html").exists()


@pytest.mark.parametrize("conformance", ["newest"], indirect=True)
def test_conformance_is_a_plugin_of_pytest(conformance: Environment, llama_server_url: str) -> None:
    """`pytest --pyargs latimer.conformance --openai-url URL` checks a server."""
    with serving(conformance, llama_server_url) as address:
        words = ("pytest", "--pyargs", "latimer.conformance", "--openai-url", f"{address}/v1")
        said = conformance.run(*words, "-k", "models", "-p", "no:cacheprovider").stdout
    assert "passed" in said


def test_speech_encodes(speech: Environment, llama_server_url: str, tmp_path: Path) -> None:
    """The extra has sherpa-onnx, and the encoder of the default format."""
    speech.run("python", "-c", "import numpy, sherpa_onnx")
    voice = tmp_path / "anna.onnx"
    voice.write_bytes(b"onnx")
    voice.with_name("anna.onnx.json").write_text('{"inference": {"length_scale": 1}}')
    words = (llama_server_url, "--speech", f"piper:{voice}", "--any-model")
    with serving(speech, *words, PYTHONPATH=str(LIBRARIES)) as address:
        body = {"model": "m", "voice": "alloy", "input": "One two three."}
        reply = httpx2.post(f"{address}/v1/audio/speech", json=body, timeout=60)
        assert (reply.status_code, reply.headers["content-type"]) == (200, "audio/mpeg")


# A client that disconnects during a speech leaves its encoder to the garbage collection.
ABANDON = """
import gc
from latimer.adapter.audio.formats import Encoder

for form in ("mp3", "opus", "aac", "flac"):
    Encoder(form, 24_000).feed(bytes(48_000))
gc.collect()
"""


def test_abandoned_speech_is_freed(speech: Environment) -> None:
    """Encoders that have not ended are garbage, and do not end the process."""
    speech.run("python", "-c", ABANDON)


def test_otel_sends_spans(otel: Environment, llama_server_url: str) -> None:
    """A collector gets the spans of a server that has only this extra, and its instance."""
    with collecting() as collector:
        variables = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address}
        with serving(otel, llama_server_url, **variables, **endpoint) as address:
            assert ask(address) == ANSWER
            collector.wait(lambda: any("chat" in span.name for _, span in collector.spans()))
    assert all(resource["service.instance.id"] for resource, _ in collector.spans())
