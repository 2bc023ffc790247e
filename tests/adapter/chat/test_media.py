"""Images and audio in messages, in process and on llama-server, with random projectors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import io
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.chat import media
from latimer.backends.base import Backend
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.schemas import limits
from PIL import Image
from support import gguf_files, mrope
from support.clients import adapting
from support.engines.echo import Echo
from support.leaving import closes, leave_at
from support.projector import TOKENS, listener, png, projector, wav
from support.replies import chunks_in
from support.servers import llama_server
from support.texts import fragments

MODEL = Path(__file__).parents[2] / "models" / "bpe.gguf"
WIDTH = 64
HELLO = {"type": "text", "text": "Hello"}
ENGINES = ("llama_cpp", "llama_server")


def image(*colour: int, url: str | None = None) -> dict[str, Any]:
    """Return a content part with an image of one colour, or with a URL."""
    data = base64.b64encode(png(*colour)).decode() if colour else ""
    return {"type": "image_url", "image_url": {"url": url or f"data:image/png;base64,{data}"}}


RED, GREEN = image(255, 0, 0), image(0, 255, 0)


@pytest.fixture(scope="module")
def mmproj(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a projector for the small BPE model."""
    return projector(tmp_path_factory.mktemp("projector") / "mmproj.gguf", WIDTH)


@pytest.fixture(scope="module")
def seeing_server(mmproj: Path) -> Iterator[str]:
    """Run a llama-server with the projector."""
    with llama_server(MODEL, "--mmproj", str(mmproj), context=512) as address:
        yield address


@pytest.fixture(params=ENGINES)
async def client(
    request: pytest.FixtureRequest, mmproj: Path, seeing_server: str
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of a model with vision."""
    local = request.param == "llama_cpp"
    backend: Backend = LlamaCpp(MODEL, mmproj=mmproj) if local else LlamaServer(seeing_server)
    async with adapting(backend) as client:
        yield client


async def post(client: httpx2.AsyncClient, *content: Any, **body: Any) -> httpx2.Response:
    """Send a user message and return the response."""
    messages = [{"role": "user", "content": list(content)}]
    full = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 8, **body}
    return await client.post("/v1/chat/completions", json=full)


async def answer(client: httpx2.AsyncClient, *content: Any, **body: Any) -> tuple[str, int]:
    """Return the answer to a message and the number of prompt tokens."""
    reply = await post(client, *content, **body)
    assert reply.status_code == 200, reply.text
    value = reply.json()
    return value["choices"][0]["message"]["content"], value["usage"]["prompt_tokens"]


async def test_pictures_are_seen(client: httpx2.AsyncClient) -> None:
    """A different image gives a different answer, and each image counts as its number of tokens."""
    plain, alone = await answer(client, HELLO)
    red, count = await answer(client, HELLO, RED)
    green, _ = await answer(client, HELLO, GREEN)
    assert count == alone + TOKENS
    assert len({plain, red, green}) == 3
    before, _ = await answer(client, GREEN, HELLO)
    assert before != green
    _, both = await answer(client, RED, HELLO, GREEN)
    assert both == alone + 2 * TOKENS


def webp(*colour: int) -> str:
    """Return an image of one colour as WebP, in base64."""
    out = io.BytesIO()
    with Image.open(io.BytesIO(png(*colour))) as picture:
        picture.save(out, "WEBP", lossless=True)
    return base64.b64encode(out.getvalue()).decode()


async def test_webp_is_read(client: httpx2.AsyncClient) -> None:
    """A WebP image gets the answer of the same image as PNG, and a broken one is a 400."""
    part = image(url=f"data:image/webp;base64,{webp(255, 0, 0)}")
    assert await answer(client, HELLO, part) == await answer(client, HELLO, RED)
    broken = image(url=f"data:image/webp;base64,{webp(255, 0, 0)[:40]}")
    reply = await post(client, HELLO, broken)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "image_parse_error")


async def test_messages_have_images(client: httpx2.AsyncClient) -> None:
    """An image block is seen as in chat, by its bytes; also in the result of a call."""

    async def said(*messages: Any) -> tuple[str, int]:
        body = {"model": "m", "max_tokens": 8, "temperature": 0, "messages": list(messages)}
        reply = await client.post("/v1/messages", json=body)
        assert reply.status_code == 200, reply.text
        assert "x-latimer-inexact" not in reply.headers
        found = reply.json()
        usage = found["usage"]
        size = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return "".join(block["text"] for block in found["content"]), size

    def block(data: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/jpeg", "data": data}
        return {"type": "image", "source": source}

    red = base64.b64encode(png(255, 0, 0)).decode()
    wanted = await answer(client, HELLO, RED)
    for data in (red, webp(255, 0, 0)):
        assert await said({"role": "user", "content": [HELLO, block(data)]}) == wanted
    asked = {"role": "user", "content": "Look"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    sizes = []
    for parts in ([HELLO], [HELLO, block(red)]):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts}
        turns = asked, {"role": "assistant", "content": [call]}, {"role": "user", "content": [
            result, HELLO]}  # fmt: skip
        sizes.append((await said(*turns))[1])
    assert sizes[1] == sizes[0] + TOKENS


async def test_both_engines_see_the_same(mmproj: Path, seeing_server: str) -> None:
    """In process and on llama-server an image gets the same answer."""
    async with (
        adapting(LlamaCpp(MODEL, mmproj=mmproj, exact=True)) as local,
        adapting(LlamaServer(seeing_server)) as remote,
    ):
        for content in ((RED, HELLO), (HELLO, GREEN), (RED, HELLO, GREEN)):
            # llama-server does not send an incomplete character at the length limit.
            one, other = await answer(local, *content), await answer(remote, *content)
            assert (one[0].rstrip("\ufffd"), one[1]) == (other[0].rstrip("\ufffd"), other[1])


async def test_several_choices_of_a_picture(client: httpx2.AsyncClient) -> None:
    """Every choice of a request sees its image."""
    reply = await post(client, HELLO, RED, n=3)
    expected, _ = await answer(client, HELLO, RED)
    assert [c["message"]["content"] for c in reply.json()["choices"]] == [expected] * 3


async def test_pictures_beside_other_requests(client: httpx2.AsyncClient) -> None:
    """Concurrent requests with and without images do not affect each other."""
    contents = [(HELLO,), (HELLO, RED), (GREEN, HELLO), (HELLO, GREEN)]
    alone = [await answer(client, *content) for content in contents]
    together = await asyncio.gather(*(answer(client, *content) for content in contents * 4))
    assert together == alone * 4


async def test_a_picture_that_was_seen_is_gone_on_from(mmproj: Path) -> None:
    """A repeated image reuses the KV cache, and a different image reuses nothing."""
    long = {"type": "text", "text": "the of and to in is was " * 12}
    async with adapting(LlamaCpp(MODEL, mmproj=mmproj)) as client:
        first = (await post(client, RED, long)).json()
        again = (await post(client, RED, long)).json()
        other = (await post(client, GREEN, long)).json()
    prompt = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= prompt - 2
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"] == first["choices"]


async def test_log_probabilities_with_a_picture(mmproj: Path, seeing_server: str) -> None:
    """A prompt with an image has the same logprobs on both engines, streamed or not."""
    local = LlamaCpp(MODEL, mmproj=mmproj, exact=True, threads=1)
    remote = LlamaServer(seeing_server)
    banned = dict.fromkeys(map(str, fragments(await local.token_bytes())), -100)
    body = {"logprobs": True, "top_logprobs": 2, "logit_bias": banned, "n": 2}
    replies = []
    for backend in (local, remote):
        async with adapting(backend) as client:
            replies.append((await post(client, HELLO, RED, **body)).json())
            chunks = chunks_in(await post(client, HELLO, RED, stream=True, **body))
        streamed = [one for chunk in chunks for one in chunk["choices"] if one["logprobs"]]
        for choice in replies[-1]["choices"]:
            own = [one for one in streamed if one["index"] == choice["index"]]
            entries = [entry for one in own for entry in one["logprobs"]["content"]]
            assert tokens_of(entries) == tokens_of(choice["logprobs"]["content"])
    one, other = replies
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"] > TOKENS
    for ours, theirs in zip(one["choices"], other["choices"], strict=True):
        assert ours["message"]["content"] == theirs["message"]["content"]
        mine, yours = (choice["logprobs"]["content"] for choice in (ours, theirs))
        assert tokens_of(mine) == tokens_of(yours)
        assert {len(entry["top_logprobs"]) for entry in mine + yours} == {2}
        # The server in this test uses flash attention.
        pairs = zip(mine, yours, strict=True)
        assert all(abs(a["logprob"] - b["logprob"]) < 0.1 for a, b in pairs)


def tokens_of(entries: list[dict[str, Any]]) -> list[str]:
    """Return the texts of the tokens in a `logprobs.content`."""
    return [entry["token"] for entry in entries]


async def test_a_part_of_a_character_after_a_picture(mmproj: Path, seeing_server: str) -> None:
    """A token inside a character has a logprob in process, and is a 400 over llama-server."""
    body = {"logprobs": True, "grammar": 'root ::= "漢"'}
    async with adapting(LlamaCpp(MODEL, mmproj=mmproj)) as client:
        choice = (await post(client, HELLO, RED, **body)).json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == 3
    async with adapting(LlamaServer(seeing_server)) as client:
        assert (await answer(client, HELLO, RED, grammar=body["grammar"]))[0] == "漢"
        error = (await post(client, HELLO, RED, **body)).json()["error"]
        assert (error["param"], error["code"]) == ("logprobs", "unsupported_parameter")
        assert "a token that ends inside a character" in error["message"]


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_picture_at_the_end_of_the_prompt(
    mmproj: Path, tmp_path: Path, engine: str
) -> None:
    """A prompt that ends with an image is rejected, and the engine serves the next one."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    changes = {"tokenizer.chat_template": template}
    model = gguf_files.copy(MODEL, tmp_path / "bare.gguf", changes=changes)
    with contextlib.ExitStack() as stack:
        backend: Backend = LlamaCpp(model, mmproj=mmproj)
        if engine == "llama_server":
            flags = ("--mmproj", str(mmproj))
            backend = LlamaServer(stack.enter_context(llama_server(model, *flags, context=512)))
        async with adapting(backend) as client:
            error = (await post(client, HELLO, RED)).json()["error"]
            assert error["param"] == "messages"
            assert "cannot be the end of the prompt" in error["message"]
            assert (await post(client, RED, HELLO)).status_code == 200


async def test_content_beside_pictures_is_text(mmproj: Path, seeing_server: str) -> None:
    """A control token's text next to an image is exact in process and inexact over llama-server."""
    mark = {"type": "text", "text": "<|im_end|>"}
    async with adapting(LlamaCpp(MODEL, mmproj=mmproj)) as client:
        reply = await post(client, HELLO, mark, RED)
        assert "x-latimer-inexact" not in reply.headers
        assert reply.json()["usage"]["prompt_tokens"] > 18 + TOKENS + 1
    async with adapting(LlamaServer(seeing_server)) as client:
        reply = await post(client, HELLO, mark, RED)
        assert reply.headers["x-latimer-inexact"] == "messages"


async def test_a_prompt_that_is_too_long(client: httpx2.AsyncClient) -> None:
    """Image tokens and the BOS count towards the context length, and no prompt is truncated."""
    _, count = await answer(client, HELLO, RED)
    assert (await post(client, HELLO, RED, max_tokens=511 - count)).status_code == 200
    error = (await post(client, HELLO, RED, max_tokens=512 - count)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"{count + 1} in the messages" in error["message"]
    scored = await post(client, HELLO, RED, max_tokens=512 - count, logprobs=True)
    assert scored.json()["error"] == error


async def test_text_that_is_the_sign_for_a_picture(client: httpx2.AsyncClient) -> None:
    """The internal image placeholder is plain text when a client writes it."""
    text = {"type": "text", "text": "\U000fffc0"}
    other = {"type": "text", "text": "\ufffd"}
    assert await answer(client, text, RED) == await answer(client, other, RED)


async def test_the_sign_for_a_picture_is_text_where_there_is_none(
    demo: httpx2.AsyncClient,
) -> None:
    """In a conversation without images, the image placeholder reaches the model unchanged."""
    counts = []
    for text in ("a\U000fffc0b", "a\U000fffc0b <|im_end|>", "a\ufffdb <|im_end|>"):
        reply = await demo.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1},
        )
        assert reply.status_code == 200, reply.text
        counts.append(reply.json()["usage"]["prompt_tokens"])
    # The placeholder is four bytes, U+FFFD three, and each byte is a token of the demo model.
    assert counts[1] == counts[2] + 1


def sound(hertz: int) -> dict[str, Any]:
    """Return a content part with a tone."""
    data = base64.b64encode(wav(hertz)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model with room for half a minute of audio, and a projector for it."""
    folder = tmp_path_factory.mktemp("sound")
    model = gguf_files.copy(MODEL, folder / "m.gguf", changes={"llama.context_length": 2048})
    return model, listener(folder / "mmproj.gguf", WIDTH)


async def test_sounds_are_heard(hearing: tuple[Path, Path]) -> None:
    """A different tone gives a different answer, the same on both engines."""
    model, mmproj = hearing
    contents = ((HELLO,), (HELLO, sound(440)), (HELLO, sound(3000)))
    with llama_server(model, "--mmproj", str(mmproj), context=2048) as address:
        async with (
            adapting(LlamaCpp(model, mmproj=mmproj, context=2048, exact=True)) as local,
            adapting(LlamaServer(address)) as remote,
        ):
            heard = [await answer(local, *content) for content in contents]
            again = [await answer(remote, *content) for content in contents]
            error = (await post(local, RED)).json()["error"]
    assert len({text for text, _ in heard}) == len(contents)
    assert heard[1][1] > heard[0][1] + 700
    assert [text.rstrip("\ufffd") for text, _ in heard] == [
        text.rstrip("\ufffd") for text, _ in again
    ]
    assert error["param"] == "messages[0].content[0].type"


# The header of an MP3 file's frames and their size in bytes: MPEG 1, 2 and 2.5, each without a
# checksum, and with one.
MP3 = (
    (b"\xff\xfb\x50\xc4", 208), (b"\xff\xfa\x50\xc4", 208), (b"\xff\xf3\x38\xc4", 108),
    (b"\xff\xf2\x38\xc4", 108), (b"\xff\xe3\x18\xc4", 72), (b"\xff\xe2\x18\xc4", 72),
)  # fmt: skip


@pytest.mark.parametrize(("head", "size"), MP3)
async def test_every_kind_of_mp3_is_taken(head: bytes, size: int) -> None:
    """Files without tags are known by their first frame, also those of 8 kHz."""
    backend = Echo()
    backend.facts = replace(backend.facts, media=frozenset({"audio"}))
    # Silent frames: no bits are used for their samples.
    data = base64.b64encode((head + bytes(size - len(head))) * 20).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "mp3"}}
    async with adapting(backend) as client:
        reply = await post(client, HELLO, part)
    assert reply.status_code == 200, reply.text


async def test_sounds_that_do_not_fit_together(hearing: tuple[Path, Path]) -> None:
    """Audio prompts that together exceed the KV cache do not deadlock."""
    model, mmproj = hearing
    backend = LlamaCpp(model, mmproj=mmproj, context=1600, batch=1600)
    words = "the of and to in is was " * 45
    async with adapting(backend) as client:
        contents = [({"type": "text", "text": f"{n} {words}"}, sound(400 * n)) for n in (1, 2, 3)]
        # They are queued behind a request that fills the KV cache, so they start in the same step.
        text = {"type": "text", "text": words + words[:600]}
        busy = asyncio.create_task(post(client, text, max_tokens=900, ignore_eos=True))
        await asyncio.sleep(0.25)
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(answer(client, *content) for content in contents))
            assert (await busy).status_code == 200
        assert [count for _, count in found] == [1200] * 3


PNG = base64.b64encode(png(1, 2, 3)).decode()
WRONG = (
    ("data:image/png;base64,%%%", "invalid_base64"),
    ("data:image/png;base64,", "invalid_base64"),
    ("data:image/png;base64,aGVsbG8=", "image_parse_error"),
    (f"data:image/png;base64,{PNG[:60]}", "image_parse_error"),
    (f"data:text/plain;base64,{PNG}", "invalid_image_format"),
    ("ftp://example.com/x.png", "invalid_image_url"),
    ("x.png", "invalid_image_url"),
    ("https://example.com/x.png", "unsupported_parameter"),
)


@pytest.mark.parametrize(("url", "code"), WRONG, ids=[code for _, code in WRONG])
async def test_wrong_pictures(client: httpx2.AsyncClient, url: str, code: str) -> None:
    """An invalid image is a 400 that names the content part."""
    reply = await post(client, HELLO, image(url=url))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == code
    assert error["param"] == "messages[0].content[1].image_url.url"


async def test_data_urls_of_all_shapes(client: httpx2.AsyncClient) -> None:
    """Data URLs may have parameters, line ends in the data, and percent-encoded data."""
    expected = await answer(client, HELLO, RED)
    raw = png(255, 0, 0)
    data = base64.encodebytes(raw).decode()
    percent = "".join(f"%{byte:02x}" for byte in raw)
    for url in (f"data:image/png;charset=x;base64,{data}", f"data:image/png,{percent}",
                f"data:;base64,{data}", f"DATA:IMAGE/PNG;BASE64,{data}"):  # fmt: skip
        assert await answer(client, HELLO, image(url=url)) == expected


async def test_sounds_for_a_model_that_only_sees(client: httpx2.AsyncClient) -> None:
    """Audio for a model with vision only is rejected by name."""
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    error = (await post(client, sound)).json()["error"]
    assert error["param"] == "messages[0].content[0].type"
    assert error["code"] == "unsupported_parameter"


# A FLAC that declares 2**36 - 1 samples (https://xiph.org/flac/format.html), and a tone of one
# sample per second.
SAMPLES = 16_000 << 44 | 15 << 36 | 2**36 - 1
ENDLESS = b"fLaC\x80\0\0\x22" + b"\x10\0\x10\0" + bytes(6) + SAMPLES.to_bytes(8) + bytes(32)
BOMBS = (
    (ENDLESS, "audio_too_long"),
    (wav(440, 8_000.0, 1), "image_parse_error"),
)


@pytest.mark.parametrize(("data", "code"), BOMBS, ids=["endless", "slow"])
async def test_sounds_that_unfold_too_far(
    data: bytes, code: str, hearing: tuple[Path, Path]
) -> None:
    """A small audio file that decodes to gigabytes is rejected before an engine reads it."""
    model, mmproj = hearing
    encoded = base64.b64encode(data).decode()
    part = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    async with adapting(LlamaCpp(model, mmproj=mmproj, context=2048)) as client:
        error = (await post(client, part)).json()["error"]
    assert error["code"] == code
    assert error["param"] == "messages[0].content[0].input_audio.data"


async def test_pictures_that_unfold_too_far(client: httpx2.AsyncClient) -> None:
    """An image whose header declares huge dimensions is rejected."""
    head = base64.b64decode(PNG)[:16] + (40_000).to_bytes(4) * 2 + base64.b64decode(PNG)[24:]
    url = "data:image/png;base64," + base64.b64encode(head).decode()
    error = (await post(client, HELLO, image(url=url))).json()["error"]
    assert error["code"] == "image_too_large"
    assert "40000 x 40000" in error["message"]


def black(width: int, height: int, end: int | None = None) -> dict[str, Any]:
    """Return a content part with a black image as WebP, of which 34 bytes have any size."""
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "WEBP", lossless=True, method=0, quality=0)
    data = base64.b64encode(out.getvalue()[:end]).decode()
    return image(url=f"data:image/webp;base64,{data}")


async def test_large_webp_is_converted_elsewhere(client: httpx2.AsyncClient) -> None:
    """A large WebP image is the PNG that a small one is, and a broken one is a 400."""
    wide = 2_049
    data = io.BytesIO()
    Image.new("RGB", (wide, wide)).save(data, "PNG")
    same = image(url="data:image/png;base64," + base64.b64encode(data.getvalue()).decode())
    assert await answer(client, HELLO, black(wide, wide)) == await answer(client, HELLO, same)
    error = (await post(client, HELLO, black(wide, wide, -6))).json()["error"]
    assert error["code"] == "image_parse_error"


async def test_a_conversion_has_limits(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that takes too long is a 400 that names the limits."""
    monkeypatch.setattr(media, "_WAIT", 0.01)
    error = (await post(client, HELLO, black(2_049, 2_049))).json()["error"]
    assert error["code"] == "image_too_large"
    assert error["message"].endswith(
        "takes more than 20 s or 1024 MiB to convert. Send a smaller image, or PNG or JPEG."
    )


async def test_a_conversion_needs_no_temporary_folder(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A large WebP image is converted without a folder for files, where the system can, and with
    one where a sandbox refuses that; a missing folder, like a full disk, is a 400 that blames the
    server."""

    def refused(_name: str) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as sandboxed:
        sandboxed.setattr(os, "memfd_create", refused, raising=False)
        assert (await post(client, HELLO, black(2_049, 2_049))).status_code == 200
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    if hasattr(os, "memfd_create"):
        assert (await post(client, HELLO, black(2_049, 2_049))).status_code == 200
        monkeypatch.delattr(os, "memfd_create")
    errors = [(await post(client, HELLO, black(2_049, 2_049))).json()["error"]]
    full = partial(open, "/dev/full", "r+b", buffering=0)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full())
    errors.append((await post(client, HELLO, black(2_049, 2_049))).json()["error"])
    for error in errors:
        assert error["code"] == "unsupported_parameter"
        assert error["message"].endswith(
            "This server cannot convert large WebP images. Send PNG or JPEG."
        )


async def test_webp_has_fewer_pixels(client: httpx2.AsyncClient) -> None:
    """A WebP image of 34 bytes with more pixels than are converted is rejected at once."""
    error = (await post(client, HELLO, black(10_001, 5_000))).json()["error"]
    assert error["code"] == "image_too_large"
    assert "10001 x 5000 pixels; at most 50000000 are allowed" in error["message"]


async def test_images_have_a_sum_of_pixels(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images of a request may have a number of pixels together, and the error names the first
    one beyond it."""
    most = limits.ALL_PIXELS._replace(maximum=2 * 16 * 16)
    monkeypatch.setattr(limits, "ALL_PIXELS", most)
    parts = [black(16, 16)] * 3
    assert (await post(client, *parts[:2], HELLO)).status_code == 200
    error = (await post(client, *parts, HELLO)).json()["error"]
    assert (error["code"], error["param"]) == (
        "image_too_large", "messages[0].content[2].image_url.url",
    )  # fmt: skip
    assert "more than 512 pixels. Send fewer or smaller images" in error["message"]


async def test_pictures_that_are_drawn_too_often(client: httpx2.AsyncClient) -> None:
    """A progressive JPEG with too many scans is rejected, since each scan visits all pixels."""
    frame = b"\xff\xc2\0\x11\x08\0\x10\0\x10\x03" + b"\1\x11\0\2\x11\0\3\x11\0"
    data = b"\xff\xd8" + frame + b"\xff\xda" * 101
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    error = (await post(client, HELLO, image(url=url))).json()["error"]
    assert error["code"] == "image_too_large"
    assert "at most 100 are allowed. Save it with fewer scans" in error["message"]


async def test_a_projector_of_another_model(tmp_path: Path) -> None:
    """Loading fails for a missing projector and for one of another output width."""
    backend = LlamaCpp(MODEL, mmproj=projector(tmp_path / "wide.gguf", 2 * WIDTH))
    with pytest.raises(EngineError, match="cannot use"):
        await backend.model()
    with pytest.raises(EngineError, match="no projector"):
        await LlamaCpp(MODEL, mmproj=tmp_path / "none.gguf").model()


async def test_positions_that_depend_on_other_images(tmp_path: Path) -> None:
    """Loading a projector fails for a HunyuanVL, whose images have a number of their own."""
    model = mrope.language_model(tmp_path / "model.gguf", mrope.HUNYUAN)
    mmproj = mrope.projector(tmp_path / "mmproj.gguf", mrope.HUNYUAN)
    assert (await LlamaCpp(model).model()).name == "model"
    with pytest.raises(EngineError, match="depend on the images before them"):
        await LlamaCpp(model, mmproj=mmproj).model()


async def test_a_client_that_leaves_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves when the file for its PNG was just opened leaves it closed."""
    name = "memfd_create" if hasattr(os, "memfd_create") else "open"
    work = media._as_png(b"RIFF", media._SMALL + 1, "image")
    await closes(await leave_at(monkeypatch, os, name, work))
