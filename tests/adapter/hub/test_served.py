"""Tests of `latimer serve hf:…` over five repositories: each one served, and all that can go wrong.

That a name chooses the same files as llama-server's `-hf` is in `test_same_choice.py`.
"""

from __future__ import annotations

import base64
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.hub.cache import UNFINISHED
from support.hub import DEMO, TOKEN, TestHub
from support.projector import png
from support.servers import QUIET, command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HALF = len(DEMO) // 2
QUESTION = "What is the capital of France?"
# 64 MiB stay free on a disk, so the first one has room for half of a model, and the other for one.
SMALL, LARGE = "65m", "68m"
Disk = Callable[[str], Path]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Return a function that mounts a disk of a size as the folder of the cache."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("needs the right to mount a small disk")
        monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        return folder

    yield mount
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def asked(address: str, content: Any) -> Any:
    """Return the reply to a message, with log-probabilities."""
    body = {"model": "x", "temperature": 0, "logprobs": True, "max_tokens": 16,
            "messages": [{"role": "user", "content": content}]}  # fmt: skip
    reply = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def answers(name: str, *options: str) -> None:
    """Serve a name, and compare the answer with the demo model's."""
    with command(f"hf:{name}", "--context", "256", "--any-model", *options) as (_, address):
        assert "Paris" in asked(address, QUESTION)["choices"][0]["message"]["content"]


def refused(name: str, *options: str) -> str:
    """Return what `latimer serve` says when it cannot start."""
    done = subprocess.run(
        ["latimer", "serve", f"hf:{name}", "--port", "0", *options],
        capture_output=True, text=True, timeout=60, env={**os.environ, **QUIET},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    return done.stderr


def drafts(cache: Path) -> list[Path]:
    """Return the unfinished downloads."""
    return [*cache.rglob(f"*{UNFINISHED}")]


def stalled(name: str, test_hub: TestHub, cache: Path) -> subprocess.Popen[str]:
    """Start to serve a name over a hub that sends half of a file, and wait until that is there."""
    test_hub.cut, test_hub.stalls = HALF, True
    process = subprocess.Popen(
        ["latimer", "serve", f"hf:{name}", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 30
    while not any(draft.stat().st_size == HALF for draft in drafts(cache)):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("test/quants:Q8_0", "llama-cpp"),
        ("test/split", "llama-cpp"),
        ("test/split", "llama-server"),
        ("test/vision", "llama-cpp"),
        ("test/gated", "llama-cpp"),
        ("test/private", "llama-cpp"),
    ],
)
def test_each_repository_is_served_by_name(
    name: str, backend: str, test_hub: TestHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name answers with the model, and again offline without a request."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    answers(name, "--backend", backend)
    assert test_hub.asked
    monkeypatch.delenv("HF_TOKEN")
    test_hub.asked.clear()
    answers(name, "--backend", backend, "--offline")
    assert not test_hub.asked


@pytest.mark.parametrize("backend", ["llama-cpp", "llama-server"])
def test_a_projector_sees(backend: str, test_hub: TestHub) -> None:
    """The projector of a repository is served with its model: pictures differ in the answer."""
    content: list[Any] = [{"type": "text", "text": QUESTION}, {"type": "image_url"}]
    with command("hf:test/vision", "--any-model", "--backend", backend) as (_, address):
        replies = []
        for colour in ((255, 0, 0), (0, 0, 255)):
            picture = base64.b64encode(png(*colour)).decode()
            content[1]["image_url"] = {"url": f"data:image/png;base64,{picture}"}
            replies.append(asked(address, content))
        plain = asked(address, QUESTION)
    red, blue = (reply["choices"][0]["logprobs"]["content"] for reply in replies)
    assert [row["logprob"] for row in red] != [row["logprob"] for row in blue]
    assert replies[0]["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_a_download_that_was_killed_at_its_half_is_continued(
    test_hub: TestHub, cache: Path
) -> None:
    """The next start asks for the rest only, and serves the whole model."""
    process = stalled("test/quants", test_hub, cache)
    process.kill()
    process.communicate(timeout=30)
    [draft] = drafts(cache)
    assert draft.stat().st_size == HALF
    test_hub.cut, test_hub.stalls = None, False
    test_hub.ranges.clear()
    answers("test/quants")
    assert f"bytes={HALF}-" in test_hub.ranges
    assert None not in test_hub.ranges
    assert not drafts(cache)


def test_two_servers_download_once(test_hub: TestHub, cache: Path) -> None:
    """A second server waits for the download of the first one, and both serve."""
    first = stalled("test/quants", test_hub, cache)
    second = subprocess.Popen(
        ["latimer", "serve", "hf:test/quants", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert second.stderr is not None
        assert any("this one waits for it" in line for line in second.stderr)
        test_hub.ranges.clear()
        test_hub.cut, test_hub.stalls = None, False
        assert any("Latimer serves demo-Q4_K_M" in line for line in second.stderr)
        assert first.stderr is not None
        assert any("Latimer serves demo-Q4_K_M" in line for line in first.stderr)
        assert not test_hub.ranges
    finally:
        for process in (first, second):
            process.terminate()
            process.communicate(timeout=30)


def test_without_the_network_nothing_is_asked(test_hub: TestHub) -> None:
    """`--offline` with an empty cache is one line with the next step, and no request."""
    said = refused("test/quants", "--offline")
    assert "is not in the cache, and Latimer is offline. The cache has no model of it." in said
    assert not test_hub.asked


def test_a_wrong_checksum_is_not_served(test_hub: TestHub, cache: Path) -> None:
    """A damaged file is an error and is deleted; the next start serves a whole one."""
    test_hub.wrong.add("demo-Q4_K_M.gguf")
    assert "does not have its checksum" in refused("test/quants")
    assert not [path for path in cache.rglob("blobs/*") if path.is_file()]
    test_hub.wrong.clear()
    answers("test/quants")


@pytest.mark.parametrize("name", ["test/gated", "test/private"])
def test_a_token_is_asked_for(name: str, test_hub: TestHub, cache: Path) -> None:
    """Without a token, the error of a gated or private repository names HF_TOKEN."""
    assert "HF_TOKEN" in refused(name)
    assert not cache.exists()


def test_a_small_disk_is_found_before_the_first_byte(test_hub: TestHub, disk: Disk) -> None:
    """A disk without room for the model is an error with both sizes, and nothing is written."""
    folder = disk(SMALL)
    said = refused("test/quants")
    assert "needs 2.1 MB of disk, and 1.0 MB are free at" in said
    assert not [*folder.iterdir()]


def test_a_disk_that_becomes_full_keeps_what_is_there(test_hub: TestHub, disk: Disk) -> None:
    """The error says so, and the next start, with room again, asks for the rest only."""
    folder = disk(LARGE)
    process = stalled("test/quants", test_hub, folder)
    ballast = folder / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(80 << 20))
    test_hub.stalls = False
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "cannot be written: No space left on device" in said
    [draft] = drafts(folder)
    size = draft.stat().st_size
    assert size >= HALF
    ballast.unlink()
    test_hub.cut = None
    test_hub.ranges.clear()
    answers("test/quants")
    assert f"bytes={size}-" in test_hub.ranges
