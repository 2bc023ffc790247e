"""Tests of `latimer models`, and of `latimer serve` with names on a hub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from latimer.adapter.engines import with_files
from latimer.adapter.fleet import Fleet
from latimer.adapter.settings import Settings
from support import copies
from support.hub import TestHub, hub, repositories


class Quiet:
    """A receiver that shows nothing."""

    def say(self, line: str) -> None:
        pass

    def show(self, label: str, done: int, total: int) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestHub, str]]:
    """Serve the five repositories."""
    with hub(repositories(tmp_path_factory.mktemp("files"))) as served:
        yield served


@pytest.fixture(autouse=True)
def cache(served: tuple[TestHub, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty cache; the hub is the test's."""
    for name in ("LLAMA_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "MODEL_ENDPOINT", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", served[1])
    served[0].asked.clear()
    return tmp_path / "hub"


def run(*words: str) -> tuple[int, str, str]:
    """Run `latimer models`; return the exit code, standard output and standard error."""
    done = copies.run("models", *words)
    return done.returncode, done.stdout, done.stderr


def test_models_are_got_listed_and_removed(served: tuple[TestHub, str], cache: Path) -> None:
    """`get` prints the path only, `ls` has names that work, and `rm` frees the bytes."""
    code, path, said = run("get", "hf:test/quants")
    assert (code, Path(path.strip()).name) == (0, "demo-Q4_K_M.gguf")
    assert "it also matches demo-UD-Q4_K_M.gguf" in said
    assert "100 %, 2.1 MB of 2.1 MB" in said
    code, listed, _ = run("ls", "--json")
    [row] = json.loads(listed)
    assert (row["name"], row["context"], row["path"]) == (
        "hf:test/quants:Q4_K_M", 2048, path.strip(),
    )  # fmt: skip
    code, shown, _ = run()
    assert shown.splitlines()[1].split()[:5] == [row["name"], "Q4_K_M", "2.1", "MB", "2048"]
    code, _, said = run("rm", row["name"])
    assert (code, said) == (0, "Deleted demo-Q4_K_M.gguf (2.1 MB); 2.1 MB are free again.\n")
    run("get", row["name"])
    code, text, said = run("rm", "--json", row["name"])
    assert (code, said) == (0, "")
    removed = {"name": row["name"], "files": ["demo-Q4_K_M.gguf"], "freed": row["size"]}
    assert json.loads(text) == removed
    code, listed, said = run()
    assert (code, listed) == (0, "")
    assert "`latimer models get hf:ORG/REPO` downloads one" in said
    code, _, said = run("rm", row["name"])
    assert code == 3
    assert "`latimer models` lists what is there" in said


@pytest.mark.slow
def test_a_dry_run_downloads_nothing(served: tuple[TestHub, str], cache: Path) -> None:
    """`get --dry-run` and `show` have the files, what is free, and the memory, as text or JSON."""
    code, text, _ = run("get", "--dry-run", "hf:test/split", "--context", "512", "--json")
    assert code == 0
    found = json.loads(text)
    assert [row["cached"] for row in found["files"]] == [False] * 4
    assert found["download"] == sum(row["size"] for row in found["files"])
    assert found["memory"]["context"] == 512
    code, text, _ = run("show", "hf:test/quants")
    assert "hf:test/quants:Q8_0  2.1 MB" in text
    assert not cache.exists()


@pytest.mark.slow
def test_an_error_is_one_line(served: tuple[TestHub, str]) -> None:
    """A name that is wrong, or not on the hub, ends with exit code 3 and one line."""
    for name in ("x", "hf:test/none", "hf:test/quants:Q9"):
        code, out, said = run("get", name)
        assert (code, out, said.count("\n")) == (3, "", 1)
    done = copies.run("serve", "hf:test/quants:Q9", "--port", "0")
    assert done.returncode == 3
    assert "does not have a file for 'Q9'. It has: BF16 (2.1 MB)" in done.stderr


def test_a_fleet_downloads_while_it_serves(
    served: tuple[TestHub, str], tmp_path: Path, cache: Path
) -> None:
    """An engine's `file` may be a name; its model is downloaded when it is first asked for."""
    file = tmp_path / "fleet.toml"
    file.write_text('[engines.own]\nfile = "hf:test/quants:Q8_0"\ncontext = 256\n')

    async def use() -> str:
        fleet = Fleet(Settings.load(file))
        try:
            assert not served[0].asked
            return (await fleet.replicas["own"].backend.model()).name
        finally:
            await fleet.aclose()

    assert asyncio.run(use()) == "demo-Q8_0"


def test_a_projector_is_used(served: tuple[TestHub, str], cache: Path) -> None:
    """A projector of the repository becomes `--mmproj`, unless that is set."""
    served[0].repos["test/seeing"] = {
        "m-Q8_0.gguf": served[0].repos["test/gated"]["demo-Q8_0.gguf"], "mmproj-m.gguf": b"GGUF",
    }  # fmt: skip
    found = with_files(Settings(model="hf:test/seeing"), Quiet())
    assert found.mmproj is not None
    assert found.mmproj.name == "mmproj-m.gguf"
    own = Settings(model="hf:test/seeing", mmproj=Path("own.gguf"))
    assert with_files(own, Quiet()).mmproj == Path("own.gguf")
