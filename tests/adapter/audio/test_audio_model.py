"""Tests of language models as transcribers: a scripted one, and real ones that hear a tone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.audio.audio_model import Head
from latimer.backends.base import Backend
from latimer.backends.errors import ContextExceeded
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support import gguf_files
from support.clients import adapting
from support.engines.echo import Echo
from support.projector import listener
from support.servers import llama_server
from support.sounds import HELLO, tone, wav

T = "/v1/audio/transcriptions"
MODEL = Path(__file__).parents[2] / "models" / "bpe.gguf"
WIDTH = 64
QWEN = "language English<asr_text>Hello there."


def hearing(backend: Echo, name: str = "demo") -> Echo:
    """Return a backend whose model hears."""
    facts: Any = backend.facts
    backend.facts = type(facts)(
        name, facts.context, facts.template, "", facts.eos_token, False, "fp_echo", 7,
        frozenset({"audio"}),
    )  # fmt: skip
    return backend


async def ask(client: httpx2.AsyncClient, file: bytes = HELLO, **fields: str) -> httpx2.Response:
    """Send a form."""
    reply: httpx2.Response = await client.post(
        T, data={"model": "whisper-1", **fields}, files={"file": file}
    )
    return reply


@pytest.mark.parametrize(
    ("text", "heard", "language"),
    [
        (QWEN, "Hello there.", "en"),
        ("language None<asr_text>", "", ""),
        ("<asr_text>Hi", "Hi", ""),
        ("language is a tool", "language is a tool", ""),
        ("lang", "lang", ""),
        ("Hello", "Hello", ""),
    ],
)
def test_what_qwen_writes_before_a_transcript(text: str, heard: str, language: str) -> None:
    """The head is removed wherever the text is cut, and names the language."""
    for cut in range(len(text) + 1):
        head = Head()
        found = head.feed(text[:cut]) + head.feed(text[cut:]) + head.end()
        assert (found, head.language) == (heard, language)


async def test_the_order_that_a_model_gets() -> None:
    """The model gets llama-server's order, the recording, and the request's fields."""
    backend = hearing(Echo(QWEN))
    async with adapting(backend) as client:
        reply = await ask(client, language="de", prompt="Latimer", temperature="0.5")
    assert reply.json()["text"] == "Hello there."
    assert reply.json()["usage"]["type"] == "tokens"
    (job,) = backend.jobs
    content: Any = job.prompt.content
    assert "Transcribe audio to text (language: german) (context: Latimer)" in str(content)
    assert [one.kind for one in job.prompt.media] == ["audio"]
    assert job.prompt.media[0].data == HELLO
    assert job.sampling.temperature == 0.5
    assert job.max_tokens is not None


async def test_lfm2_gets_its_own_order() -> None:
    """LFM2 transcribes by a system message."""
    backend = hearing(Echo("Hello."), "LFM2-Audio-1.5B")
    async with adapting(backend) as client:
        assert (await ask(client)).json()["text"] == "Hello."
    content: Any = backend.jobs[0].prompt.content
    assert "Perform ASR." in str(content)
    assert "Transcribe" not in str(content)


async def test_long_recordings_are_cut() -> None:
    """Each half a minute is a job; the texts are joined, and the head of each is removed."""
    backend = hearing(Echo(QWEN))
    async with adapting(backend) as client:
        reply = await ask(client, wav(tone(10) * 7))
        streamed = await ask(client, wav(tone(10) * 7), stream="true")
    assert reply.json()["text"] == "Hello there. Hello there. Hello there."
    assert '"text":"Hello there. Hello there. Hello there."' in streamed.text
    lengths = [len(job.prompt.media[0].data) - 44 for job in backend.jobs[:3]]
    assert sum(lengths) == 70 * 32_000
    assert max(lengths) <= 30 * 32_000


@pytest.mark.parametrize("form", ["srt", "vtt", "verbose_json"])
async def test_no_times_are_made_up(form: str) -> None:
    """A language model has no times, so formats with times are refused by name."""
    async with adapting(hearing(Echo(QWEN))) as client:
        reply = await ask(client, response_format=form)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format"


async def test_translations_are_not_served() -> None:
    """A language model is not asked to translate."""
    async with adapting(hearing(Echo(QWEN))) as client:
        reply = await client.post(
            "/v1/audio/translations", data={"model": "m"}, files={"file": HELLO}
        )
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unsupported_endpoint")


async def test_a_context_that_is_too_short() -> None:
    """The error names the file, and says what to do."""
    async with adapting(hearing(Echo(error=ContextExceeded(512, 900)))) as client:
        reply = await ask(client)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "file")
    assert error["code"] == "context_length_exceeded"


@pytest.fixture(scope="module", params=["llama_cpp", "llama_server"])
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Backend]:
    """Return a real engine with a model that hears, whose weights are random."""
    folder = tmp_path_factory.mktemp("sound")
    model = gguf_files.copy(MODEL, folder / "m.gguf", changes={"llama.context_length": 2048})
    mmproj = listener(folder / "mmproj.gguf", WIDTH)
    if request.param == "llama_cpp":
        yield LlamaCpp(model, mmproj=mmproj, context=2048)
        return
    with llama_server(model, "--mmproj", str(mmproj), context=2048) as address:
        yield LlamaServer(address)


async def test_real_engines_hear(engine: Backend) -> None:
    """A recording passes through the engine; its tokens count, and a stream has the same text."""
    async with adapting(engine, model_names=["m"], any_model=False) as client:
        plain = await ask(client)
        streamed = await ask(client, stream="true")
        broken = await ask(client, b"RIFF" + bytes(500))
    assert plain.status_code == 200, plain.text
    found = plain.json()
    assert found["usage"]["input_tokens"] > 700
    assert found["usage"]["output_tokens"] > 0
    assert '"type":"transcript.text.done"' in streamed.text
    assert broken.status_code == 400
