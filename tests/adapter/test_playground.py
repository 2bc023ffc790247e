"""Tests of how the playground is served; tests/browser has those of the page itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.playground import FOLDER, POLICY, files
from latimer.adapter.settings import Settings
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from support.engines.echo import Echo

MOST = 250_000


def client_of(prefix: str = "", **options: Any) -> TestClient:
    """Return a client of an adapter, mounted under a prefix if there is one."""
    app: Any = OpenAIAdapter(Echo(), **options)
    return TestClient(Starlette(routes=[Mount(prefix, app)]) if prefix else app)


def test_the_page_is_at_the_root() -> None:
    """`/` is the page, `/playground/NAME` are its files, and none of them needs a key."""
    client = client_of(playground=True, api_keys=["secret"])
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name in files():
        if name != "index.html":
            assert client.get(f"/playground/{name}").status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.get("/playground/__init__.py").status_code == 404


def test_a_client_with_the_pages_address_gets_the_base_url() -> None:
    """A request of a client whose base URL is that of the page is OpenAI's 404, with advice."""
    reply = client_of(playground=True).post("/", json={"inputs": "Hi"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"].startswith("Invalid URL (POST /). This is the base URL")


def test_its_headers_are_strict() -> None:
    """Every file has a policy without outside sources, inline scripts, or frames, and an ETag."""
    client = client_of(playground=True)
    for path in ("/", "/playground/page.js", "/playground/style.css"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-cache"
        again = client.get(path, headers={"if-none-match": headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in POLICY


def test_it_is_small() -> None:
    """All files together have at most 250 kB."""
    assert sum(len(file.data) for file in files().values()) <= MOST


def test_nothing_comes_from_elsewhere() -> None:
    """No file names another server, makes markup from text, or runs text as a script."""
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
    for name, file in files().items():
        text = file.data.decode()
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text), name
        assert not re.search(unsafe, text), name
    page = files()["index.html"].data.decode()
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style|<script(?! type=\"module\" src=)", page)


def test_the_page_names_its_icon() -> None:
    """No browser looks for `/favicon.ico`, which a server of engines does not have."""
    assert '<link rel="icon" href="data:,">' in files()["index.html"].data.decode()


def test_every_import_is_a_file() -> None:
    """Each module imports only files of the folder, and the page loads one module."""
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'^import .* from "\./([^"]+)";', path.read_text(), re.MULTILINE):
            assert name in files(), f"{path.name} imports {name}"


def test_it_is_off_unless_asked_for() -> None:
    """An adapter inside another app has no page by default; `latimer serve` has one."""
    assert client_of().get("/").status_code == 404
    assert client_of("/ai").get("/ai/").status_code == 404
    mounted = client_of("/ai", playground=True)
    assert mounted.get("/ai/").status_code == 200
    assert mounted.get("/ai/playground/page.js").status_code == 200
    assert Settings().arguments("adapter")["playground"] is True
    assert Settings(playground=False).arguments("adapter")["playground"] is False


def test_it_needs_both_prefixes() -> None:
    """The page calls paths below `/v1` next to it, so an adapter without them cannot have it."""
    with pytest.raises(ValueError, match="prefixes"):
        OpenAIAdapter(Echo(), ("/v1",), playground=True)


def test_the_rules_of_a_server_without_a_key_apply() -> None:
    """A website whose name resolves to this machine gets no page."""
    from latimer.adapter.origins import LocalRules

    client = client_of(playground=True, local_rules=LocalRules())
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"host": "localhost"}).status_code == 200


def test_a_page_in_an_app_calls_its_own_origin() -> None:
    """The page's requests are accepted in an app, where the adapter sends no CORS headers."""
    client = client_of("/ai", playground=True)
    headers = {"origin": "http://testserver", "sec-fetch-site": "same-origin"}
    assert client.get("/ai/", headers=headers).status_code == 200
    reply = client.post("/ai/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert reply.status_code == 200


PURE = """
import assert from "node:assert";
const tokens = await import("./tokens.js");
const talk = await import("./conversation.js");
const legacy = {
  tokens: ["a", "bytes:\\\\xf0\\\\x9f", "bytes:\\\\x98\\\\x80"], token_logprobs: [null, -2, -0.5],
  token_ids: [1, 2, 3], text_offset: [0, 1, 1],
  top_logprobs: [null, { x: -0.5, "bytes:\\\\xf0\\\\x9f": -2 }, { "bytes:\\\\x98\\\\x80": -0.5 }],
  top_token_ids: [null, { x: 9, "bytes:\\\\xf0\\\\x9f": 2 }, { "bytes:\\\\x98\\\\x80": 3 }],
};
const read = tokens.ofCompletion(legacy, 1);
assert.equal(tokens.textOf(tokens.joined(read)), "a\\u{1f600}");
assert.equal(tokens.rankOf(read[1]), null);  // outside the list of one
assert.equal(read[1].top[0].id, 9);
assert.equal(tokens.rankOf(read[2]), 1);
assert.equal(tokens.textOf(tokens.joined(read.slice(0, 2))), null);  // inside a character
const sum = tokens.summary(read);
assert.equal(sum.scored, 2);
assert.equal(sum.mean, -1.25);
assert.equal(sum.perplexity, Math.exp(1.25));
assert.equal(tokens.levelOf("probability", read[2]), 2);
assert.equal(tokens.levelOf("rank", read[1]), 7);
assert.ok(Math.abs(tokens.entropyOf(read[2]) - 0.967) < 0.001);
const one = talk.create("chat");
const question = talk.add(one, null, { role: "user", content: "Q" });
talk.add(one, question.id, { role: "assistant", content: "A" });
talk.add(one, question.id, { role: "assistant", content: "B" });
assert.deepEqual(talk.path(one).map((node) => node.content), ["Q", "B"]);
talk.undo(one);
assert.deepEqual(talk.path(one).map((node) => node.content), ["Q", "A"]);
talk.redo(one);
assert.deepEqual(talk.messages(one, one.leaf).map((node) => node.content), ["Q", "B"]);
const again = talk.imported(JSON.parse(talk.exported(one)));
assert.deepEqual(talk.path(again).map((node) => node.content), ["Q", "B"]);
const circle = JSON.parse(talk.exported(one));
circle.nodes[question.id].parent = circle.leaf;
assert.throws(() => talk.imported(circle), /place/);
const broken = JSON.parse(talk.exported(one));
broken.nodes[question.id].tokens = [{ text: "a", logprob: "much" }];
assert.throws(() => talk.imported(broken), /broken/);
const chat = tokens.ofChat({ content: [
  { token: "a", logprob: -1, bytes: [97], id: 5, hidden_token_ids: [1, 2],
    top_logprobs: [{ token: "b", logprob: -0.5, bytes: [98], id: 6 }] },
  { token: "c", logprob: -1, bytes: [99], id: 7, hidden_token_ids: [], top_logprobs: [] },
] });
assert.deepEqual(tokens.idsOf(chat), [1, 2, 5, 7]);
assert.ok(tokens.haveIds(chat) && chat[0].top[0].id === 6);
const bare = { content: [{ token: "a", logprob: -1, bytes: [97], top_logprobs: [] }] };
assert.ok(!tokens.haveIds(tokens.ofChat(bare)));
"""
LIVE = """
import assert from "node:assert";
globalThis.document = { baseURI: "http://localhost/", getElementById: () => null };
globalThis.sessionStorage = { getItem: () => null };
const fleet = await import("./fleet.js");
const scrape = (generated) => `# TYPE latimer_num_requests_running gauge
latimer_num_requests_running{engine="e",model_name="a \\\\"b"} 2.0
latimer_num_requests_waiting{model_name="a \\\\"b"} 3.0
latimer_engine_state{engine="e",model_name="a \\\\"b",state="ready"} 0.0
latimer_engine_state{engine="e",model_name="a \\\\"b",state="loading"} 1.0
latimer_generation_tokens_total{engine="e",model_name="a \\\\"b"} ${generated}
latimer_requests_total{endpoint="/v1/x",model_name="a",status="200"} 4.0
latimer_requests_total{endpoint="/v1/y",model_name="a",status="200"} 1.0
latimer_time_to_first_token_seconds_bucket{engine="e",le="1.0",model_name="a \\\\"b"} 1.0
latimer_time_to_first_token_seconds_bucket{engine="e",le="2.0",model_name="a \\\\"b"} 3.0
latimer_time_to_first_token_seconds_bucket{engine="e",le="+Inf",model_name="a \\\\"b"} 4.0
process_open_fds 5.0
`;
const [first, second] = [fleet.read(scrape(100), 1), fleet.read(scrape(150), 3)];
const [row] = second.rows.values();
assert.equal(second.rows.size, 1);
assert.deepEqual([row.model, row.engine, row.state], ['a "b', "e", "loading"]);
assert.deepEqual([row.running, row.waiting], [2, 3]);
assert.equal(second.counts.get("200"), 5);
assert.equal(fleet.rate("generated", row, first.rows.get(row.key), 2), 25);
assert.equal(fleet.rate("generated", { generated: 10 }, { generated: 90 }, 2), 5);
assert.equal(fleet.rate("generated", row, undefined, 2), null);
assert.equal(fleet.median(row.buckets.time_to_first_token_seconds_bucket), 1.5);
assert.equal(fleet.median([[1, 0], [Infinity, 0]]), null);
"""


@pytest.mark.parametrize("script", [PURE, LIVE], ids=["tokens and messages", "metrics"])
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_pure_modules(tmp_path: Any, script: str) -> None:
    """Tokens and metrics are read and measured, and a tree of messages is undone and exported."""
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "try.js").write_text(script)
    done = subprocess.run(
        ["node", "try.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
