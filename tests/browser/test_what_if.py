"""Tests of "what if" in the playground: a chosen token continues from exactly the ids before it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_server import LlamaServer
from support.browser import Browser
from support.firefox import Firefox
from support.playground import Playground
from support.recordings import DEMO_CHATML
from support.servers import serving

pytestmark = pytest.mark.slow

# Firefox has the same page, so a part of them is enough there.
CLICKS, IN_FIREFOX = 50, 15
QUESTION = "What is the capital of France?"
STORY = "The capital of France is"


class Token(NamedTuple):
    """A token of a reply as the API returned it.

    Args:
        ids: the ids of hidden tokens before it, and its own.
        top: the ids of the alternatives by their text.
    """

    ids: tuple[int, ...]
    text: str
    logprob: float
    top: dict[str, int]


def tokens_in(raw: str) -> list[Token]:
    """Return the tokens in a raw stream of chat or of a completion."""
    found: list[Token] = []
    for line in raw.split("\n"):
        choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
        for choice in choices:
            own = choice["logprobs"] or {}
            for entry in own.get("content") or []:
                top = {other["token"]: other["id"] for other in entry["top_logprobs"]}
                ids = (*entry["hidden_token_ids"], entry["id"])
                found.append(Token(ids, entry["token"], entry["logprob"], top))
            found += [
                Token((id_,), text, logprob, top)
                for id_, text, logprob, top in zip(
                    own.get("token_ids") or [], own.get("tokens") or [],
                    own.get("token_logprobs") or [], own.get("top_token_ids") or [], strict=True,
                )
            ]  # fmt: skip
    return found


def body_of(page: Playground) -> Any:
    """Return the body of the last request."""
    page.js(
        "const select = document.getElementById('language'); select.value = 'curl';"
        "select.dispatchEvent(new Event('change'))"
    )
    code = page.js("return document.getElementById('code').textContent")
    return json.loads(code[code.index("-d '") + 4 : -1].replace("'\\''", "'"))


def raw_of(page: Playground) -> str:
    """Return the raw response of the last request."""
    text: str = page.js("return document.getElementById('raw').textContent")
    return text


def ids_in(tokens: list[Token]) -> list[int]:
    """Return all ids of tokens."""
    return [one for token in tokens for one in token.ids]


class Tried:
    """A reply in the page that is continued again and again.

    Args:
        client: a client of the page's server.
    """

    def __init__(self, page: Playground, client: httpx2.Client, mode: str, seed: int = 37) -> None:
        self.page, self.client, self.mode = page, client, mode
        self.random = random.Random(seed)
        self.seen: set[tuple[int, ...]] = set()
        self.tokens: list[Token] = []

    def begin(self) -> None:
        """Generate the first reply."""
        page = self.page
        page.choose("#mode", self.mode)
        page.fill("#p-max_tokens", "5")
        page.fill("#p-temperature", "0")
        page.send(QUESTION if self.mode == "chat" else STORY)
        self.tokens = tokens_in(raw_of(page))
        # A BOS is not counted, but it is part of the exact prompt.
        text = DEMO_CHATML.format(QUESTION) if self.mode == "chat" else STORY
        self.prompt = self.client.post("/tokenize", json={"prompt": text}).json()["tokens"]

    def click(self) -> None:
        """Choose a random alternative of a random token, and check what follows."""
        page = self.page
        # A long reply is cut again, so that it stays short.
        index = self.random.randrange(min(len(self.tokens), 8))
        page.click_token(index)
        choices = page.all("#popover button.row")
        chosen = self.random.choice(choices)
        text = chosen.get_attribute("data-text") or ""
        page.click_on(chosen)
        page.finished()
        assert page.status() == "The reply is complete."
        token = self.tokens[index]
        id_ = token.top[text]
        kept = [*self.tokens[:index], token._replace(ids=(*token.ids[:-1], id_), text=text)]
        body, new = body_of(page), tokens_in(raw_of(page))
        self.check(body, ids_in(kept), new)
        self.seen.add(tuple(ids_in(kept)))
        self.tokens = [*kept, *new]
        shown = page.tokens()
        assert len(shown) == len(self.tokens)
        # Parts of characters are dots, and control characters are spelled.
        if not {"·", "‹"} & set("".join(shown)):
            assert shown == [one.text.replace("\n", "↵\n") for one in self.tokens]

    def check(self, body: Any, kept: list[int], new: list[Token]) -> None:
        """Check that the request and its reply continue from exactly these ids."""
        if self.mode == "chat":
            assert body["messages"] == [{"role": "user", "content": QUESTION}]
            assert body["reply_token_ids"] == kept
        else:
            assert body["prompt"] == [*self.prompt, *kept]
        # Without the page and without chat, these ids are continued in the same way.
        own = {"prompt": [*self.prompt, *kept], "max_tokens": 5, "temperature": 0}
        own |= {"model": body["model"], "logprobs": 0, "logprobs_token_ids": True}
        reply = self.client.post("/v1/completions", json=own).json()["choices"][0]["logprobs"]
        assert reply["token_ids"] == ids_in(new)
        for a, b in zip(reply["token_logprobs"], new, strict=True):
            assert abs(a - b.logprob) < 0.05


@pytest.fixture
def llama_server_page(driver: Browser, llama_server_url: str) -> Iterator[Playground]:
    """Open the page of an adapter over a real llama-server."""

    def app() -> OpenAIAdapter:
        return OpenAIAdapter(LlamaServer(llama_server_url), playground=True)

    with serving(app) as address:
        page = Playground(driver, address)
        page.open()
        yield page
        assert page.console() == []


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_fifty_random_clicks(page: Playground, mode: str) -> None:
    """Each of 50 random alternatives continues from exactly the ids before it and its own."""
    clicks = IN_FIREFOX if isinstance(page.driver, Firefox) else CLICKS
    with httpx2.Client(base_url=page.address) as client:
        tried = Tried(page, client, mode)
        tried.begin()
        for _ in range(clicks):
            tried.click()
    assert len(tried.seen) > clicks / 2


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_clicks_over_llama_server(llama_server_page: Playground, mode: str) -> None:
    """Over llama-server, too, alternatives continue from exactly their ids."""
    with httpx2.Client(base_url=llama_server_page.address) as client:
        tried = Tried(llama_server_page, client, mode)
        tried.begin()
        for _ in range(8):
            tried.click()
