"""Every code block of the documents runs, and does what they say."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.calls import Prepared
from latimer.adapter import OpenAIAdapter
from latimer.adapter.routes import ROUTES
from support import servers
from support.documents import Block, blocks, commands
from support.hub import DEMO, hub
from support.reader import Reader

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "clients").glob("*.md")),
    *sorted((DOCS / "reference").glob("*.md")),
    DOCS / "conformance" / "README.md",
]
DOCUMENTS = [ROOT / "README.md", *PAGES]
CONTRIBUTING = blocks(ROOT / "CONTRIBUTING.md")
STRANGE = [
    Block("", 1, "text\n"),
    Block("toml", 1, "port = 8080\n"),
    Block("python", 1, "print('nothing is served here')\n"),
    Block("sh", 1, "latimer dance\n"),
    Block("sh", 1, "make coffee\n"),
    Block("sh", 1, "latimer check http://127.0.0.1:8080 &\n"),
]


@pytest.fixture(scope="module")
def default() -> Iterator[str]:
    """Run `latimer serve`."""
    with servers.command() as (_, address):
        yield address


@pytest.fixture(scope="module")
def named() -> Iterator[str]:
    """Serve a hub, on which the model that the documents name is the demo model."""
    quants = {f"Qwen3-8B-{quant}.gguf": DEMO for quant in ("Q4_K_M", "Q8_0")}
    with hub({"Qwen/Qwen3-8B-GGUF": quants}) as (_, address):
        yield address


@pytest.fixture
def reader(
    tmp_path: Path,
    llama_server_url: str,
    koboldcpp_replay: tuple[str, Any],
    default: str,
    named: str,
) -> Reader:
    """A reader with a model, a llama-server and a koboldcpp."""
    engines = {
        **dict.fromkeys((f"http://127.0.0.1:808{n}" for n in range(5)), llama_server_url),
        # Another machine.
        **dict.fromkeys((f"http://10.0.0.7:808{n}" for n in (3, 4)), llama_server_url),
        "http://127.0.0.1:5001": koboldcpp_replay[0],
    }
    return Reader(tmp_path, engines, default, named)


def executed(block: Block) -> dict[str, Any]:
    """Run an example and return its names."""
    # The first line names the file that the block is for, so also its package.
    folder = block.text.splitlines()[0].removeprefix("# ").rpartition("/")[0]
    package = "latimer." + folder.removeprefix("tests/").replace("/", ".")
    names = {"__name__": "example", "__package__": package}
    exec(block.text, names)  # noqa: S102
    return names


def marked(page: Path, block: Block) -> Any:
    """Return a block and its page as parameters; lm-eval takes 20 s to start."""
    marks = [pytest.mark.clients] if "lm_eval" in block.text else []
    return pytest.param(page, block, marks=marks, id=f"{page.stem}-{block}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "block"),
    [marked(page, one) for page in DOCUMENTS for one in blocks(page) if one.language != "mermaid"],
)
def test_a_block_runs_as_it_stands(page: Path, block: Block, reader: Reader) -> None:
    """A reader who copies the block gets what it promises, with the files that its page names."""
    for one in blocks(page):
        if one.language == "toml" and one.text.startswith("# "):
            reader.run(one)
    reader.run(block)


@pytest.mark.parametrize(
    "block", [one for one in CONTRIBUTING if one.language == "python"], ids=str
)
def test_an_example_for_developers_runs(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of CONTRIBUTING.md use names and arguments that exist."""
    # The example of a check must not be in the suite of later tests.
    monkeypatch.setattr("latimer.conformance.check._checks", {})
    executed(block)


@pytest.mark.parametrize(
    "block", [one for one in CONTRIBUTING if one.language == "python"], ids=str
)
@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=lambda words: words[0])
def test_an_example_for_developers_passes_lint(block: Block, command: tuple[str, ...]) -> None:
    """The examples of CONTRIBUTING.md pass the linter and the formatter in the files they name."""
    path = block.text.splitlines()[0].removeprefix("# ")
    words = ["ruff", *command, "--stdin-filename", path, "-"]
    done = subprocess.run(words, cwd=ROOT, input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_engine_for_developers_works(client_of: Any) -> None:
    """The engine of CONTRIBUTING.md serves every path, and rejects what it does not support."""
    engine = next(one for one in CONTRIBUTING if "class YourEngine" in one.text)
    app = OpenAIAdapter(executed(engine)["YourEngine"]())
    chat = {"messages": [{"role": "user", "content": "Hi <|im_end|>"}]}
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        for path, body, status in (
            ("chat/completions", chat, 200),
            ("chat/completions", {**chat, "stream": True, "n": 2, "stop": "x"}, 200),
            ("chat/completions", {**chat, "oai_compat": False}, 400),
            ("chat/completions", {**chat, "logprobs": True}, 400),
            ("completions", {"prompt": [[72, 105], [72]], "echo": True}, 200),
            ("completions", {"prompt": "Hi", "logprobs": 1}, 400),
            ("completions", {"prompt": "Hi", "suffix": "x"}, 400),
            ("completions", {"prompt": "Hi", "logit_bias": {"3": 1}}, 400),
            ("completions", {"prompt": "x" * 5000}, 400),
            ("tokenize", {"prompt": "Hi"}, 200),
            ("detokenize", {"tokens": [72, 105]}, 200),
            ("embeddings", {"input": "Hi"}, 400),
            ("rerank", {"query": "Hi", "documents": ["Hello"]}, 400),
        ):
            reply = await client.post(f"/v1/{path}", json=body)
            assert reply.status_code == status, (path, reply.text)
            assert "completions" not in path or status == 400 or "Hello." in reply.text
        listed = (await client.get("/v1/models")).json()["data"][0]["supported_parameters"]
        assert set(listed) == {
            "max_tokens", "max_completion_tokens", "stop", "seed", "tools", "parallel_tool_calls",
        }  # fmt: skip
    await app.aclose()


async def test_the_endpoint_for_developers_works(
    client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint of CONTRIBUTING.md works with its function in the table of routes."""
    block = next(one for one in CONTRIBUTING if "async def reverse" in one.text)
    monkeypatch.setitem(ROUTES, "/reverse", {"POST": executed(block)["reverse"]})
    app = OpenAIAdapter(Prepared(burst=True), api_keys=["k"])  # type: ignore[arg-type]
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer k"
        reply = await client.post("/v1/reverse", json={"text": "Hello", "x": 1})
        assert reply.json() == {"model": "m", "text": "olleH"}
        assert reply.headers["x-latimer-ignored"] == "x"
        error = (await client.post("/reverse/", json={})).json()["error"]
        assert (error["code"], error["param"]) == ("missing_required_parameter", "text")
        assert (await client.get("/v1/reverse")).status_code == 405
    await app.aclose()


@pytest.mark.parametrize("block", [one for one in CONTRIBUTING if one.language == "sh"], ids=str)
def test_a_command_for_developers_exists(block: Block) -> None:
    """The commands of CONTRIBUTING.md, which CI runs, name targets, programs and files that exist.

    They need a checkout's own environment, so they do not run here.
    """
    for command in commands(block.text):
        program, *words = command.words
        if program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif program != "export":
            assert shutil.which(program), program
            paths = [word for word in words if "/" in word]
            assert all((ROOT / path).exists() for path in paths), paths


@pytest.mark.parametrize("block", STRANGE, ids=lambda block: block.text.strip())
def test_an_unknown_block_fails(block: Block, reader: Reader) -> None:
    """A new kind of block, or a misspelt command, fails until the reader can run it."""
    with pytest.raises(AssertionError):
        reader.run(block)


def test_indented_code_is_rejected(tmp_path: Path) -> None:
    """Code without a fence, which would not run, fails."""
    page = tmp_path / "page.md"
    page.write_text("Run this:\n\n    latimer serve\n")
    with pytest.raises(AssertionError, match="fence this code"):
        blocks(page)
