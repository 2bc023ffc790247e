"""Tests of downloads: cut, continued, damaged, refused, too large, and from the cache."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from latimer.adapter.hub import download as downloads
from latimer.adapter.hub.cache import Repo, repos
from latimer.adapter.hub.download import Unreachable
from latimer.adapter.hub.locate import Located, Needs, download, locate
from latimer.adapter.hub.names import HubError, models_of, parse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from support.hub import COMMIT, DEMO, TOKEN, TestHub
from support.servers import serving

HALF = len(DEMO) // 2


class Lines:
    """A receiver that keeps what is said and shown."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown: list[tuple[str, int, int]] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def show(self, label: str, done: int, total: int) -> None:
        self.shown.append((label, done, total))


def found(
    name: str, report: Lines | None = None, *, offline: bool = False, **needs: Any
) -> Located:
    """Locate a model."""
    return locate(parse(name), report or Lines(), Needs(**needs), offline=offline)


def contents(test_hub: TestHub) -> list[str]:
    """Return the requests for the content of large files."""
    return [path for path in test_hub.asked if "/cdn/" in path]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("hf:test/quants", "demo-Q4_K_M.gguf"),
        ("hf:test/quants:Q2_K@v1", "demo-Q2_K.gguf"),
        ("hf:test/quants/demo-UD-Q4_K_M.gguf", "demo-UD-Q4_K_M.gguf"),
        ("hf:test/split", "Q8_0/demo-Q8_0-00001-of-00004.gguf"),
        ("hf:test/vision", "demo-Q4_K_M.gguf"),
        ("hf:test/gated", "demo-Q8_0.gguf"),
        ("hf:test/private", "demo-F16.gguf"),
    ],
)
def test_a_name_is_downloaded_once(
    name: str, file: str, test_hub: TestHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have the hub's bytes; the second start makes no request and says the choice."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    located, parsed = found(name), parse(name)
    for part, path in zip(located.choice.parts, located.parts, strict=True):
        assert path.read_bytes() == test_hub.repos[parsed.repo][part.path]
    assert located.parts[0].as_posix().endswith(f"/snapshots/{COMMIT}/{file}")
    test_hub.asked.clear()
    lines = Lines()
    assert found(name, lines) == located
    assert not test_hub.asked
    assert lines.said[0].startswith(f"{name}: {file}")
    assert lines.said[0].endswith(", from the cache.")


def test_the_cache_is_that_of_the_hub(test_hub: TestHub, cache: Path) -> None:
    """huggingface_hub finds what Latimer has downloaded, and Latimer what huggingface_hub has."""
    located = found("hf:test/vision")
    assert located.projector is not None
    for path in (*located.parts, located.projector):
        load = huggingface_hub.try_to_load_from_cache
        assert load("test/vision", path.name, cache_dir=cache) == str(path)
    info = huggingface_hub.scan_cache_dir(cache)
    assert [repo.repo_id for repo in info.repos] == ["test/vision"]
    assert not info.warnings
    downloaded = huggingface_hub.hf_hub_download(
        "test/quants", "demo-Q4_K_M.gguf", cache_dir=cache, endpoint=downloads.endpoint()
    )
    test_hub.asked.clear()
    assert str(found("hf:test/quants").parts[0]) == downloaded
    assert not test_hub.asked


def test_a_cut_download_is_continued(test_hub: TestHub) -> None:
    """A download that was cut at its half keeps that, and the next start asks for the rest."""
    test_hub.cut = HALF
    lines = Lines()
    with pytest.raises(Unreachable, match="The next start continues it"):
        # Every answer is cut, so the attempts within one start end at some point.
        test_hub.range_ignored = True
        found("hf:test/quants", lines)
    [draft] = (Repo("test/quants").root / "blobs").iterdir()
    size = draft.stat().st_size
    assert size == HALF
    test_hub.cut, test_hub.range_ignored = None, False
    lines = Lines()
    located = found("hf:test/quants", lines)
    assert lines.shown[0][1] == size
    assert any(line.startswith("Continues demo-Q4_K_M.gguf at ") for line in lines.said)
    wanted = test_hub.repos["test/quants"]["demo-Q4_K_M.gguf"]
    assert located.parts[0].read_bytes() == wanted
    assert not draft.exists()


def test_one_cut_is_mended_at_once(test_hub: TestHub) -> None:
    """A connection that ends during a download is continued within the same start."""
    test_hub.cut = HALF + 1000
    assert found("hf:test/quants").parts[0].stat().st_size > len(DEMO)
    assert len(contents(test_hub)) == 3


def test_wrong_content_is_deleted(test_hub: TestHub) -> None:
    """A file without its checksum is an error, leaves nothing, and the next start loads it new."""
    test_hub.wrong.add("demo-Q4_K_M.gguf")
    with pytest.raises(HubError, match="does not have its checksum"):
        found("hf:test/quants")
    assert not [*(Repo("test/quants").root / "blobs").iterdir()]
    test_hub.wrong.clear()
    assert hashlib.sha256(found("hf:test/quants").parts[0].read_bytes())


def test_a_full_disk_is_found_before_the_first_byte(test_hub: TestHub, cache: Path) -> None:
    """The message has both sizes and what to do, and nothing is written."""
    with pytest.raises(HubError) as caught:
        found("hf:test/quants", free_disk=lambda _: (64 << 20) + 1_000_000)
    assert "needs 2.1 MB of disk, and 1.0 MB are free at" in caught.value.message
    assert "No other file of it fits" in caught.value.message
    assert "`latimer models rm`" in caught.value.message
    assert not cache.exists()


def test_a_small_memory_is_found_before_the_first_byte(test_hub: TestHub, cache: Path) -> None:
    """The message has the parts of the estimate, and the largest quantization that fits."""
    test_hub.repos["test/sizes"] = {
        "m-Q8_0.gguf": DEMO + bytes(900_000),
        "m-Q4_K_M.gguf": DEMO + bytes(300_000),
        "m-Q2_K.gguf": DEMO,
    }
    with pytest.raises(HubError) as caught:
        found("hf:test/sizes:Q8_0", context=1024, free_memory=lambda: 7_900_000)
    message = caught.value.message
    assert "for the KV cache of 1024 tokens" in message
    assert "The largest that fits is hf:test/sizes:Q4_K_M (2.4 MB)." in message
    assert not cache.exists()
    needs = Needs(checks_memory=False, free_memory=lambda: 0)
    assert download(parse("hf:test/sizes:Q8_0"), Lines(), needs).parts[0].exists()


def test_a_model_of_the_cache_must_fit_too(test_hub: TestHub) -> None:
    """A model that does not fit in memory is an error from the cache, too, with its path."""
    test_hub.repos["test/sizes"] = {
        "m-Q8_0.gguf": DEMO + bytes(900_000),
        "m-Q4_K_M.gguf": DEMO + bytes(300_000),
    }
    located = found("hf:test/sizes:Q8_0", free_memory=lambda: None)
    test_hub.asked.clear()
    with pytest.raises(HubError) as caught:
        found("hf:test/sizes:Q8_0", context=1024, free_memory=lambda: 7_900_000)
    message = caught.value.message
    assert "for the KV cache of 1024 tokens" in message
    assert "The largest that fits is hf:test/sizes:Q4_K_M (2.4 MB)." in message
    assert f"or serve it anyway by its path, {located.parts[0]}." in message
    assert found("hf:test/sizes:Q8_0", context=256, free_memory=lambda: 7_900_000) == located
    assert found("hf:test/sizes:Q8_0", checks_memory=False, free_memory=lambda: 0) == located
    assert not test_hub.asked


def test_offline_uses_the_cache(test_hub: TestHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, a missing model is an error without a request, and one of the cache is served."""
    with pytest.raises(HubError, match=r"The cache has no model of it\. Start once without"):
        found("hf:test/quants", offline=True)
    assert not test_hub.asked
    found("hf:test/quants:Q8_0")
    test_hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"The cache has of it: Q8_0 \(2.1 MB\)"):
        found("hf:test/quants:Q2_K")
    assert found("hf:test/quants:Q8_0").parts[0].name == "demo-Q8_0.gguf"
    assert not test_hub.asked


def test_a_hub_that_is_gone(test_hub: TestHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the network, the best of the cache is served with a line, or the error says why."""
    found("hf:test/quants:Q8_0")
    (Repo("test/quants").root / "trees" / f"{COMMIT}.json").unlink()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    lines = Lines()
    assert found("hf:test/quants", lines).parts[0].name == "demo-Q8_0.gguf"
    assert "does not answer" in lines.said[0]
    with pytest.raises(HubError, match="Check the network and HF_ENDPOINT"):
        found("hf:test/split")
    for address, reason in (("127.0.0.1:9", "Connection refused"), ("nowhere.invalid", "its name")):
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        with pytest.raises(HubError, match=rf"{address} does not answer: {reason}[^\[]*$"):
            found("hf:test/split")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "run pip install socksio"),
        ("ALL_PROXY", "socks://127.0.0.1:9", "Unknown scheme for proxy URL"),
        ("ALL_PROXY", "a:b:c", "Invalid port: 'b:c'. Correct or unset ALL_PROXY"),
        ("HF_ENDPOINT", "http://[x", "HF_ENDPOINT must be an address"),
        ("HF_ENDPOINT", "http://", "HF_ENDPOINT must be an address"),
    ],
)
def test_a_wrong_environment_is_an_error(
    variable: str, value: str, says: str, test_hub: TestHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that the client of the hub cannot use is an error that names it."""
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv(variable, value)
    with pytest.raises(HubError) as caught:
        found("hf:test/split")
    assert says in caught.value.message
    assert not test_hub.asked


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((302, {"location": "/api"}, b""), "Exceeded maximum allowed redirects. Check"),
        ((200, {"content-encoding": "gzip"}, b"hello"), "does not answer: Error"),
        ((200, {}, b'{"sha": "%b"}' % COMMIT.encode()), "does not answer like a hub"),
        ((200, {}, b"[1]"), "does not answer like a hub"),
        ((200, {}, b"<html>"), "does not answer like a hub"),
    ],
)
def test_a_page_of_a_network_is_no_hub(
    answer: tuple[int, dict[str, str], bytes],
    says: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address that redirects in a circle, or sends other things, is an error in one line."""
    status, headers, body = answer

    def page(_request: Request) -> Response:
        return Response(body, status, headers)

    app = Starlette(routes=[Route("/{path:path}", page)])
    with serving(lambda: app) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        for name in ("hf:test/quants", f"hf:test/quants@{COMMIT}"):
            with pytest.raises(HubError, match=says):
                found(name)


def test_a_password_of_the_hub_is_not_shown(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has the address of the hub without the user and the password in it."""
    monkeypatch.setenv("HF_ENDPOINT", "http://me:secret@127.0.0.1:9/hub")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9/hub does not") as caught:
        found("hf:test/quants")
    assert "secret" not in caught.value.message


def test_a_hub_that_breaks_off_at_once(test_hub: TestHub) -> None:
    """A connection that ends before a file's metadata is a hub that does not answer."""
    found("hf:test/quants:Q8_0")
    test_hub.cut, test_hub.cuts_heads = 1_000, True
    lines = Lines()
    with pytest.raises(Unreachable, match="does not answer: peer closed connection"):
        found("hf:test/quants:Q4_K_M", lines)
    (Repo("test/quants").root / "trees" / f"{COMMIT}.json").unlink()
    assert found("hf:test/quants", lines).parts[0].name == "demo-Q8_0.gguf"
    assert "Latimer uses the cache" in lines.said[0]


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("hf:test/gated", None, "is gated. Accept its terms on the hub's page of the model, and"),
        ("hf:test/private", None, "or it is private. Check the name; for a private or gated"),
        ("hf:test/missing", None, "There is no model test/missing at http"),
        ("hf:test/missing", TOKEN, "use the token of an account that may read it"),
        ("hf:test/quants", "hf_wrong", "The hub rejects the token of HF_TOKEN"),
        ("hf:test/quants@nope", None, "has no revision 'nope'. Write another one after @"),
        ("hf:test/quants:Q5_K_S", None, "does not have a file for 'Q5_K_S'. It has: BF16 (2.1 MB)"),
        ("hf:test/quants/x.gguf", None, "does not have the file x.gguf. It has: BF16 (2.1 MB)"),
    ],
)
def test_an_error_says_the_next_step(
    name: str, token: str | None, said: str, test_hub: TestHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the hub refuses is an error that says what to do, and shows no token."""
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError) as caught:
        found(name)
    assert said in caught.value.message
    assert "hf_" not in caught.value.message


def test_a_token_of_the_hub_is_found(test_hub: TestHub, tmp_path: Path) -> None:
    """The file that `hf auth login` writes opens a private model."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert found("hf:test/private").parts[0].name == "demo-F16.gguf"


def test_a_removed_model_is_gone(test_hub: TestHub, cache: Path) -> None:
    """Blobs go with their last name; other models of the repository stay."""
    first, second = found("hf:test/quants:Q2_K"), found("hf:test/quants:Q8_0")
    [repo] = repos()
    freed = repo.remove(first.choice.parts)
    assert freed == first.choice.size
    assert second.parts[0].exists()
    assert [file.path for file in models_of(repo.files(COMMIT))] == ["demo-Q8_0.gguf"]
    repo.remove(repo.files(COMMIT))
    assert not [*cache.glob("models--*")]


@pytest.mark.parametrize("has_more", [False, True])
def test_a_linked_repository_is_removed(
    test_hub: TestHub, cache: Path, tmp_path: Path, has_more: bool
) -> None:
    """The link goes, and the folder that it names, but nothing that the user has in that."""
    first = found("hf:test/quants:Q2_K")
    elsewhere, [repo] = tmp_path / "elsewhere", repos()
    repo.root.rename(elsewhere)
    repo.root.symlink_to(elsewhere)
    own = elsewhere / "own.txt"
    if has_more:
        own.write_text("mine")
    assert found("hf:test/quants:Q2_K") == first
    assert repo.remove(repo.files(COMMIT)) == first.choice.size
    assert not repo.root.is_symlink()
    assert elsewhere.exists() == own.exists() == has_more
    assert [*cache.iterdir()] == []
