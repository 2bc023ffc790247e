"""Tests of checks on servers that the toy server cannot be: tokens of words, and no keys."""

from __future__ import annotations

from typing import Any, cast

import httpx2
import pytest
from latimer.conformance.check import all_checks
from latimer.conformance.runner import run
from latimer.conformance.target import Api

CHECKS = {check.id: check for check in all_checks()}


class Words:
    """A server whose tokens are words.

    Args:
        fault: added to each log-probability, for each word of the prompt.
        likelier: by how much token 71 is likelier than token 70.
    """

    def __init__(self, fault: float = 0, likelier: float = 0) -> None:
        self._fault = fault
        self._likelier = likelier
        self.clock = None
        self.exchanges: list[Any] = []

    async def complete(self, prompt: str, **body: Any) -> Any:
        """Return a completion."""
        bias = body.get("logit_bias", {})
        words = [word if at == 0 else f" {word}" for at, word in enumerate(prompt.split(" "))]
        values = [-0.1 * len(word) + self._fault * len(words) for word in words[1:]]
        offsets = [sum(map(len, words[:at])) for at in range(len(words))]
        arrays = {"tokens": words, "token_logprobs": [None, *values], "text_offset": offsets}
        second = bias.get("71", 0) + self._likelier > bias.get("70", 0)
        text = prompt if body.get("echo") else " second" if second else " first"
        return {"choices": [{"text": text, "logprobs": arrays}], "usage": {}}


@pytest.mark.parametrize(
    ("name", "server", "outcome"),
    [
        ("echo.chain", Words(), "pass"),
        ("echo.chain", Words(fault=0.2), "fail"),
        ("sampling.bias-bans", Words(), "pass"),
        ("sampling.bias-bans", Words(likelier=5), "pass"),
    ],
)
async def test_words_are_judged(name: str, server: Words, outcome: str) -> None:
    """The log-probabilities of whole words are compared, and a token may be likely by itself."""
    assert (await run(CHECKS[name], lambda: cast(Api, server))).outcome == outcome


@pytest.mark.parametrize("key", [None, "sk-right"])
@pytest.mark.parametrize("name", ["errors.wrong-key", "messages.wrong-key"])
async def test_a_server_without_keys_does_not_pass(name: str, key: str | None) -> None:
    """A server that accepts a wrong key does not pass the check of wrong keys."""
    accepts = httpx2.MockTransport(lambda request: httpx2.Response(200, json={"choices": []}))
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(
        transport=accepts, headers=headers, base_url="http://a"
    ) as client:
        found = await run(CHECKS[name], lambda: Api(client, "m"))
    assert found.outcome == ("skip" if key is None else "diverges")
